"""Layers with rows, columns, filters or heads of zeros are compiled as smaller ones; results are those of dense torch."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.backend.harness import Run, assert_same, compile_and_run


@pytest.fixture(autouse=True)
def small_layers_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these tests are tiny, and so are predicted as if calls and copies took no time."""
    for name, value in (("_CALL_US", 0.0), ("_COPY_CALL_US", 0.0), ("_COPIED", 1e9), ("_FREE", 1.0)):
        monkeypatch.setattr(f"gossamer.backend.smaller.worth.{name}", value)


WHOLE = {"min_gain": 1.1, "disable": ["convolutions"]}
"""What is not smaller stays dense."""


def run(function: Callable[..., Any], *inputs: Any, **options: Any) -> Run:
    """A call through the backend; further calls have gradients, or not, as this one."""
    made = compile_and_run(function, *inputs, **{**WHOLE, **options})
    return made if options.get("grad") else replace(made, function=torch.no_grad()(made.function))


def smaller(made: Run) -> dict[str, str]:
    """What became of the weights that are smaller now."""
    return {d.name: str(d.format) for d in made.decisions if d.schedule == "smaller"}


@torch.no_grad()
def empty_(weight: Tensor, share: float = 0.5, axis: int = 0) -> Tensor:
    """Zeroes some rows, or columns; which they are."""
    chosen = torch.randperm(weight.shape[axis])[: int(share * weight.shape[axis])].sort().values
    weight.index_fill_(axis, chosen, 0)
    return chosen


class Pair(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(16, 32), between, nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Attention(nn.Module):
    """Four heads of eight features, spelled in one of several ways."""

    def __init__(self, spelling: str = "sdpa") -> None:
        super().__init__()
        self.spelling = spelling
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        if self.spelling == "fused":
            q, k, v = self.qkv(x).reshape(batch, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.spelling == "split":
            q, k, v = (part.view(batch, tokens, 4, 8).transpose(1, 2) for part in self.qkv(x).split(32, dim=2))
        else:
            q, k, v = (layer(x).view(batch, tokens, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.spelling == "written":
            scores = torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5
            mixed = torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Residual(nn.Module):
    """A residual block of convolutions with batch norms."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb, self.relu = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.nb(self.b(self.relu(self.na(self.a(x)))))
        y += x
        return self.relu(y)


def shifted(module: nn.Module) -> nn.Module:
    """A module in evaluation, whose batch norms have seen something."""
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            nn.init.normal_(each.weight)
            nn.init.normal_(each.bias)
            nn.init.normal_(each.running_mean)
            nn.init.uniform_(each.running_var, 0.5, 2)
    return module.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_empty_rows_give_their_bias(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(16, 32).to(dtype), torch.randn(5, 3, 16, dtype=dtype)
    rows = empty_(layer.weight)
    made = run(layer, x)
    assert smaller(made) == {"weight": "16x16"}
    assert_same(made.output, layer(x).detach())
    assert torch.equal(made.output[..., rows], layer.bias[rows].detach().expand(5, 3, -1))


def test_without_a_bias_empty_rows_give_zeros() -> None:
    layer, x = nn.Linear(16, 32, bias=False), torch.randn(7, 16)
    rows = empty_(layer.weight)
    made = run(layer, x)
    assert smaller(made) and not made.output[:, rows].any()
    assert_same(made.output, layer(x).detach())


def test_empty_columns_are_not_read() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    columns = empty_(layer.weight, axis=1)
    made = run(layer, x)
    assert smaller(made) == {"weight": "32x8"}
    assert_same(made.output, layer(x).detach())
    x[:, columns] = torch.nan
    assert made.function(x).isfinite().all()


@pytest.mark.parametrize(
    "between", [F.gelu, torch.relu, torch.sigmoid, lambda x: F.silu(x) * 2 + 1, lambda x: torch.exp(-x).clamp(0, 3)]
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients of x"])
def test_constants_go_into_the_bias_of_the_next_layer(between: Callable[[Tensor], Tensor], grad: bool) -> None:
    pair, x = Pair(between).requires_grad_(False), torch.randn(7, 16, requires_grad=grad)
    empty_(pair.first.weight)
    made = run(pair, x, grad=grad)
    assert smaller(made) == {"first.weight": "16x16", "second.weight": "24x16"}
    assert_same(made.output, pair(x))
    if grad:
        weights = torch.randn(7, 24)
        found, expected = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (made.output, pair(x)))
        assert_same(found, expected)


def test_gradients_of_x_go_through_layers_that_are_made_whole_again() -> None:
    """For one that reads some columns, and one that gives some rows."""
    layers, x = nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 24)).requires_grad_(False), torch.randn(7, 16)
    empty_(layers[0].weight, axis=1)
    empty_(layers[2].weight, axis=0)
    made = run(layers, x.requires_grad_(), grad=True)
    assert smaller(made) == {"0.weight": "32x8", "2.weight": "12x32"}
    weights = torch.randn(7, 24)
    found, expected = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (made.output, layers(x)))
    assert_same(found, expected)


def test_neurons_that_nobody_reads_are_left_out() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.second.weight, axis=1)
    made = run(pair, x)
    assert smaller(made) == {"first.weight": "16x16", "second.weight": "24x16"}
    assert_same(made.output, pair(x).detach())


def test_a_product_with_zeros_leaves_out_the_other_factor() -> None:
    gate, up, down, x = nn.Linear(16, 32), nn.Linear(16, 32, bias=False), nn.Linear(32, 16), torch.randn(7, 16)
    empty_(up.weight)

    def gated(x: Tensor) -> Tensor:
        return down(F.silu(gate(x)) * up(x))

    made = run(gated, x)
    assert sorted(smaller(made).values()) == ["16x16"] * 3
    assert_same(made.output, gated(x).detach())


def test_a_layer_in_two_halves_loses_the_same_rows_of_each() -> None:
    both, down, x = nn.Linear(16, 64), nn.Linear(32, 16), torch.randn(7, 16)
    empty_(down.weight, axis=1)

    def gated(x: Tensor) -> Tensor:
        gate, up = both(x).chunk(2, -1)
        return down(F.silu(gate) * up)

    made = run(gated, x)
    assert sorted(smaller(made).values()) == ["16x16", "32x16"]
    assert_same(made.output, gated(x).detach())


@pytest.mark.parametrize("spelling", ["sdpa", "written", "fused", "split"])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_nobody_reads_are_left_out(spelling: str, masked: bool) -> None:
    attention, x = Attention(spelling), torch.randn(2, 9, 32)
    with torch.no_grad():
        attention.o.weight[:, 8:24] = 0
    mask = (torch.randn(2, 1, 9, 9),) if masked else ()
    made = run(attention, x, *mask)
    names = ["qkv.weight"] if spelling in ("fused", "split") else ["q.weight", "k.weight", "v.weight"]
    rows = {name: "48x32" if name == "qkv.weight" else "16x32" for name in names}
    assert smaller(made) == {**rows, "o.weight": "32x16"}
    assert_same(made.output, attention(x, *mask).detach())


def test_heads_without_values_give_their_bias() -> None:
    attention, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        for layer in (attention.q, attention.k, attention.v):
            layer.weight[8:24] = 0
    made = run(attention, x)
    assert smaller(made)["o.weight"] == "32x16"
    assert_same(made.output, attention(x).detach())


def test_a_mask_may_hide_everything_and_so_keeps_the_constants_of_a_head() -> None:
    attention, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        attention.v.weight[8:24] = 0
    mask = torch.rand(2, 1, 9, 9) > 0.3
    mask[:, :, 4] = False
    made = run(attention, x, mask, regions=0)
    assert_same(made.output, attention(x, mask).detach())


def test_part_of_a_head_is_no_reason_to_leave_it_out() -> None:
    attention, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        attention.o.weight[:, 4:20] = 0
    made = run(attention, x)
    assert smaller(made)["v.weight"] == "24x32"
    assert_same(made.output, attention(x).detach())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_filters_before_a_shift_are_left_out(memory_format: torch.memory_format) -> None:
    """Inside of the image they are constants; around it the next convolution sees zeros, and so one of them stays."""
    network, x = shifted(nn.Sequential(Residual(), Residual())), torch.randn(2, 16, 9, 8)
    network, x = network.to(memory_format=memory_format), x.to(memory_format=memory_format)
    for block in network:
        empty_(block.a.weight)
    made = run(network, x)
    assert smaller(made) == {f"{n}.{name}.weight": sizes for n in (0, 1) for name, sizes in (("a", "9x16"), ("b", "16x9"))}
    expected = network(x.clone()).detach()
    assert_same(made.output, expected)
    assert made.output.stride() == expected.stride()


def test_channels_of_scale_zero_are_constants() -> None:
    network, x = shifted(nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1))), torch.randn(2, 3, 6, 6)
    empty_(network[1].weight)
    made = run(network, x)
    assert smaller(made) == {"0.weight": "8x3", "2.weight": "8x8"}
    assert_same(made.output, network(x).detach())


def test_channels_go_through_depthwise_convolutions_pools_and_flattening() -> None:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(), nn.Linear(144, 10)).eval()
    x = torch.randn(2, 3, 8, 8)
    chosen = empty_(network[0].weight)
    with torch.no_grad():
        network[0].bias[chosen] = -1  # which the activation makes zeros
    made = run(network, x)
    assert smaller(made) == {"0.weight": "8x3", "6.weight": "10x72"}
    assert_same(made.output, network(x).detach())


def test_a_residual_keeps_what_one_of_its_terms_has() -> None:
    a, b, c, x = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16), torch.randn(7, 16)
    with torch.no_grad():
        a.weight[:16], b.weight[8:24] = 0, 0

    def added(x: Tensor) -> Tensor:
        return c(torch.tanh(a(x) + b(x)))

    made = run(added, x)
    assert sorted(str(d.format) for d in made.regions) == ["16x24", "24x16", "24x16"]
    assert_same(made.output, added(x).detach())


def test_what_is_written_to_in_place_and_seen_elsewhere_stays_whole() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    empty_(layer.weight)

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        z = y.view(7, 4, 8)
        z.mul_(2)
        return y + 1, z

    made = run(seen, x, regions=0)
    for found, expected in zip(made.output, seen(x), strict=True):
        assert_same(found, expected.detach())


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
