"""Layers with rows of zeros in all states: open sizes, changed weights, training, autocast, another process."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.backend.harness import assert_same
from tests.backend.smaller import Attention, Pair, Residual, empty_, run, shifted, small_layers_pay, smaller

__all__ = ["small_layers_pay"]


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_any_number_of_tokens(tokens: int) -> None:
    pair = Pair()
    empty_(pair.first.weight)
    made = run(pair, torch.randn(5, 16), dynamic=True)
    assert len(smaller(made)) == 2
    x = torch.randn(tokens, 16)
    assert_same(made.function(x), pair(x).detach())


def test_a_marked_dimension_stays_open() -> None:
    attention = Attention()
    with torch.no_grad():
        attention.o.weight[:, 8:24] = 0
    x = torch.randn(2, 9, 32)
    torch._dynamo.mark_dynamic(x, 1)
    made = run(attention, x)
    assert len(smaller(made)) == 4
    for tokens in (4, 17):
        x = torch.randn(2, tokens, 32)
        assert_same(made.function(x), attention(x).detach())


@pytest.mark.parametrize(("kept", "found"), [(1, {}), (2, {"first.weight": "32x2"})])
def test_an_unbacked_dimension_stays_unknown_in_gradients(kept: int, found: dict[str, str]) -> None:
    pair, x = Pair(torch.tanh), torch.randn(2, 9, 16, requires_grad=True)
    prune.custom_from_mask(pair.first, "weight", (torch.arange(16) < kept).expand(32, 16))
    torch._dynamo.decorators.mark_unbacked(x, 1)
    made = run(pair, x, grad=True, regions=len(found))
    assert smaller(made) == found
    assert_same(made.output, pair(x))
    made.output.sum().backward()
    found_gradient, x.grad = x.grad, None
    pair(x).sum().backward()
    assert_same(found_gradient, x.grad)


def test_new_values_are_noticed() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    made = run(pair, x)
    for change in (pair.first.weight.mul_, pair.first.bias.mul_, pair.second.weight.mul_, pair.second.bias.mul_):
        with torch.no_grad():
            change(1.5)
            assert_same(made.function(x), pair(x))
            pair.first.weight.data.mul_(0.5)
            assert_same(made.function(x), pair(x))


def test_rows_that_become_nonzero_again_are_noticed() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    rows = empty_(pair.first.weight)
    made = run(pair, x)
    with torch.no_grad():
        pair.first.weight[rows[0], 3] = 2.0
        assert_same(made.function(x), pair(x))
        pair.first.weight.normal_()
        assert_same(made.function(x), pair(x))
        empty_(pair.first.weight)
        assert_same(made.function(x), pair(x))


WITH_ZEROS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "scaled": lambda net, x: net.c(net.a(x) * x.mean(-1, keepdim=True)),
    "scaled by a table": lambda net, x: net.c(net.a(x) * net.table),
    "dropped out": lambda net, x: net.c(F.dropout(net.a(x), 0.0, True)),
    "two of them": lambda net, x: net.c(net.a(x) * net.b(x)),
    "in heads": lambda net, x: net.c((net.a(x).view(-1, 4, 8) * net.d(x).view(-1, 4, 8)).reshape(-1, 32)),
    "kept beside others": lambda net, x: torch.cat([net.c(net.e(net.a(x)).tanh()), net.a(x) + net.d(x)], -1),
}


@pytest.mark.parametrize("how", WITH_ZEROS)
def test_constants_that_layers_count_on_are_noticed(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.d = (nn.Linear(16, 32) for _ in range(3))
            self.c, self.e, self.table = nn.Linear(32, 24), nn.Linear(32, 32), nn.Parameter(torch.randn(7, 1))

        def forward(self, x: Tensor) -> Tensor:
            return WITH_ZEROS[how](self, x)

    net, x = Net(), torch.randn(7, 16)
    with torch.no_grad():
        for empty in (net.a.weight, net.a.bias, net.b.weight):
            empty[:16] = 0
        net.e.weight[:16, 1:] = 0  # rows that read a constant alone
    made = run(net, x)
    assert smaller(made)
    assert_same(made.output, net(x).detach())
    for change in (net.a.bias, net.a.weight[0], net.b.bias, net.b.weight[1]):
        with torch.no_grad():
            change.add_(1)
            assert_same(made.function(x), net(x))


def test_weights_that_change_at_every_call() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    made = run(pair, x)
    for _ in range(6):
        with torch.no_grad():
            pair.first.weight.mul_(1.1)
            assert_same(made.function(x), pair(x))
    for _ in range(3):
        assert_same(made.function(x), pair(x).detach())


def test_a_nan_in_an_empty_row_is_no_zero() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    rows = empty_(pair.first.weight)
    made = run(pair, x)
    with torch.no_grad():
        pair.first.weight[rows[0], 0] = torch.nan
    assert made.function(x).isnan().all()


def test_a_shift_that_becomes_nonzero_is_noticed() -> None:
    """A convolution with padding may leave out channels of zeros, but no others."""
    network, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)).eval(), torch.randn(2, 3, 8, 8)
    rows = empty_(network[0].weight)
    with torch.no_grad():
        network[0].bias[rows] = -1
        made = run(network, x)
        assert smaller(made) == {"0.weight": "8x3", "2.weight": "8x8"}
        network[0].bias[rows[:2]] = 1
        assert_same(made.function(x), network(x))


def test_layers_that_share_a_graph_differ_in_what_is_empty() -> None:
    layers, x = [nn.Linear(16, 32).eval() for _ in range(3)], torch.randn(7, 16)
    for share, layer in zip((0.25, 0.5, 0.0), layers, strict=True):
        empty_(layer.weight, share)

    def apply(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    made = run(apply, layers[0], x)
    for _ in range(2):
        for layer in layers:
            with torch.no_grad():
                assert_same(made.function(layer, x), layer(x))


def test_a_copy_has_its_own_weights() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    made = run(pair, x)
    other = copy.deepcopy(pair)
    with torch.no_grad():
        other.first.weight.normal_()
        assert_same(run(other, x, regions=0).output, other(x))
        assert_same(made.function(x), pair(x))


def test_weights_of_inference_mode_are_compared() -> None:
    with torch.inference_mode():
        pair, x = Pair(), torch.randn(7, 16)
        rows = empty_(pair.first.weight)
        made = run(pair, x)
        assert len(smaller(made)) == 2
        pair.first.weight[rows[0], 0] = 3
        assert_same(made.function(x), pair(x))


def test_full_verification_sees_every_write() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    rows = empty_(pair.first.weight)
    made = run(pair, x, verify="full")
    assert len(smaller(made)) == 2
    pair.first.weight.detach().numpy()[int(rows[0]), 5] = 2
    assert_same(made.function(x), pair(x).detach())


@pytest.mark.parametrize("between", [F.gelu, torch.relu])
def test_masks_are_trained_in_the_smaller_layers(between: Callable[[Tensor], Tensor]) -> None:
    pair, x = Pair(between), torch.randn(7, 16)
    reference = copy.deepcopy(pair)
    for each in (pair, reference):
        prune.ln_structured(each.first, "weight", 0.5, 2, 0)
    made = run(pair, x, grad=True, fullgraph=False)
    assert smaller(made) == {"first.weight": "16x16", "second.weight": "24x16"}
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (pair, reference)]
    for _ in range(3):
        for function, optimizer in zip((made.function, reference), optimizers, strict=True):
            optimizer.zero_grad()
            function(x).square().sum().backward()
            optimizer.step()
        for found, expected in zip(pair.parameters(), reference.parameters(), strict=True):
            assert_same(found.grad, expected.grad)  # type: ignore[arg-type]
            assert_same(found.detach(), expected.detach())


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_smaller_layers_warn_of_nothing(training: bool) -> None:
    pair, x, seen = Pair().train(training), torch.randn(7, 16), list[Tensor]()
    prune.ln_structured(pair.first, "weight", 0.5, 2, 0)
    pair.first.weight_orig.register_hook(seen.append)  # type: ignore[operator, union-attr]
    made = run(pair, x, grad=True)
    assert not seen, "hooks run in backward passes of the user alone"
    made.output.sum().backward()
    assert len(smaller(made)) == 2 and len(seen) == 1


def test_what_nobody_reads_is_written_all_the_same() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.norm, self.relu = Pair(), nn.BatchNorm1d(24), nn.ReLU(inplace=True)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.pair(x))
            self.count.add_(1)
            self.count += 1
            self.relu(y)
            return y

    network, x = Network(), torch.randn(7, 16)
    prune.ln_structured(network.pair.first, "weight", 0.5, 2, 0)
    expected = copy.deepcopy(network.norm)(network.pair(x)).relu()
    made = run(network, x, grad=True)
    assert len(smaller(made)) == 2
    assert_same(made.output, expected)
    assert network.count == 2 and network.norm.num_batches_tracked == 1


def test_a_mask_that_changes_in_training_is_noticed() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    prune.ln_structured(layer, "weight", 0.5, 2, 0)
    made = run(layer, x, grad=True, fullgraph=False)
    assert smaller(made) == {"weight": "16x16"}
    layer.weight_mask.fill_(1)
    assert_same(made.function(x), layer(x))


def test_a_mask_that_depends_on_what_is_trained_is_looked_at_in_every_step() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    rows = empty_(layer.weight)

    def thresholded(x: Tensor) -> Tensor:
        weight = layer.weight
        return F.linear(x, torch.where(weight.abs() > 1e-3, weight, 0), layer.bias)

    made = run(thresholded, x, grad=True)
    assert smaller(made) == {"layer.weight": "16x16"}
    with torch.no_grad():
        layer.weight[rows[0], 3] = 1
    assert_same(made.function(x), thresholded(x))


def test_zeros_that_a_mask_keeps_are_trained_in_a_transposed_square_weight() -> None:
    weight, bias, mask, x = nn.Parameter(torch.randn(16, 16)), torch.randn(16), torch.ones(16, 16), torch.randn(7, 16)
    mask[:, 8:] = 0
    with torch.no_grad():
        weight[14:] = 0

    def function(x: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight * mask)

    made = run(function, x, grad=True, regions=0)
    found, expected = (torch.autograd.grad(each.square().sum(), weight)[0] for each in (made.output, function(x)))
    assert_same(found, expected)


def test_zeros_without_a_mask_are_trained_whole() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    empty_(layer.weight)
    made = run(layer, x, grad=True, regions=0)
    made.output.square().sum().backward()
    found = layer.weight.grad
    layer.weight.grad = None
    layer(x).square().sum().backward()
    assert found is not None and layer.weight.grad is not None
    assert_same(found, layer.weight.grad)


def test_zeros_in_what_is_left_go_to_sparse_kernels() -> None:
    pair, x = Pair(), torch.randn(64, 16)
    with torch.no_grad():
        pair.second.weight *= torch.rand(24, 32) < 0.3
    empty_(pair.first.weight)
    made = run(pair, x, min_gain=0)
    shapes = {d.name: d.shape for d in made.decisions if d.sparse and d.schedule != "smaller"}
    assert shapes["second.weight"] == (24, 16)
    assert_same(made.output, pair(x).detach())


def test_the_reference_is_not_made_smaller() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    empty_(layer.weight)
    for options in ({"schedule": "reference", "disable": []}, {"disable": ["smaller-layers"]}):
        torch._dynamo.reset()
        made = run(layer, x, **{"min_gain": 0, **options})
        assert not smaller(made)
        assert_same(made.output, layer(x).detach())


def test_too_little_to_pay_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.smaller.worth._CALL_US", 5.0)
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.second.weight, axis=0)
    made = run(pair, x, regions=0)
    assert [d.name for d in made.decisions] == ["second.weight"]


def test_channels_are_left_out_where_that_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse kernels gain more than is predicted here, so that no gain is asked for; but a loss is one."""
    monkeypatch.setattr("gossamer.backend.smaller.worth._FREE", 0.9)
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    assert smaller(run(pair, x, min_gain=1e3))
    torch._dynamo.reset()
    monkeypatch.setattr("gossamer.backend.smaller.worth._CALL_US", 1e4)
    assert not smaller(run(pair, x, min_gain=1e3, regions=0))


def test_inductor_compiles_what_is_left() -> None:
    network, x = shifted(nn.Sequential(Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Pair())), torch.randn(2, 16, 6, 6)
    empty_(network[0].a.weight)
    empty_(network[3].first.weight)
    made = run(network, x, dense="inductor")
    assert len(smaller(made)) == 4
    with torch.no_grad():
        assert_same(made.output, network(x.clone()))
        network[3].first.weight.normal_()
        assert_same(made.function(x), network(x.clone()))


def test_autocast_computes_the_smaller_layers_in_bf16() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    with torch.autocast("cpu", torch.bfloat16):
        made = run(pair, x)
        expected = pair(x).detach()
    assert len(smaller(made)) == 2 and made.output.dtype is torch.bfloat16
    assert_same(made.output, expected)


def test_the_next_process_finds_the_smaller_graph(tmp_path: Path) -> None:
    """Torch's code and ours for it, and loads no compiler."""
    program = """
import sys, torch
from torch._dynamo.utils import counters
from gossamer.backend.smaller import worth
worth._CALL_US = worth._COPY_CALL_US = 0
torch.manual_seed(0)
pair = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).eval()
pair[0].weight.data[64:] = 0
x = torch.randn(40, 64)
with torch.no_grad():
    y = torch.compile(pair, backend="sparse", fullgraph=True, options={"dense": "inductor"})(x)
    torch.testing.assert_close(y, pair(x))
print(counters["gossamer"]["regions"], counters["aot_autograd"]["autograd_cache_hit"], "torch_mlir" in sys.modules)
"""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "GOSSAMER_CACHE_DIR": str(tmp_path / "gossamer")}
    for hits in (0, 1):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **caches})
        assert run.returncode == 0, run.stderr
        regions, found, loaded = run.stdout.split()
        assert (regions, found) == ("2", str(hits)) and (hits == 0 or loaded == "False")
