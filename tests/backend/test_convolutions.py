"""Convolutions with pruned weights in graphs: which become regions, what comes out against dense torch, what stays and why."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.convolution import find_convolutions
from tests.backend.harness import assert_same, compile_and_run
from tests.fuzz.convolutions import difference, trained_difference


def prune_(module: nn.Module) -> nn.Module:
    """Zeroes most of each kernel, in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 2:
                parameter *= torch.rand_like(parameter) < 0.2
    return module


class Block(nn.Module):
    """A stage of a residual network: strided 3x3 and pointwise layers, batch norms, a projected shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink = nn.Conv2d(20, 33, 3, 2, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (33, 40, 40))
        self.widen, self.shortcut = nn.Conv2d(33, 40, 1, bias=False), nn.Conv2d(20, 40, 1, 2)
        self.last = nn.Conv2d(40, 24, 3, padding="same")
        for norm in self.norms:
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.norms
        y = F.relu6(first(self.shrink(x)))
        y = F.hardswish(second(self.widen(y)) + third(self.shortcut(x)))
        return F.gelu(self.last(y))


def test_a_residual_block_with_its_norms_is_four_regions() -> None:
    block, x = prune_(Block()).eval(), torch.randn(2, 20, 17, 15)
    run = compile_and_run(block, x, regions=4, dense="inductor")
    with torch.no_grad():
        assert_same(run.output, block(x))
        block.last.weight.mul_(2)
        assert_same(run.function(x), block(x))  # type: ignore[operator]
        block.last.weight.normal_()
        assert_same(run.function(x), block(x))
        planar_not = x.contiguous(memory_format=torch.channels_last)
        assert_same(run.function(planar_not), block(x))
    assert [d.op for d in run.regions] == ["conv 3x3", "conv 1x1", "conv 1x1", "conv 3x3"]
    assert all(d.schedule == "convolve" and d.packed_bytes for d in run.regions)
    assert [d.reason for d in run.regions][1:] != ["nothing to fuse"] * 3


def test_pointwise_layers_take_any_number_and_size_of_images() -> None:
    layer = prune_(nn.Conv2d(12, 7, 1)).eval()
    x = torch.randn(2, 12, 9, 5)
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dim)
    run = compile_and_run(layer, x, regions=1)
    with torch.no_grad():
        for shape in ((2, 12, 9, 5), (5, 12, 16, 4), (3, 12, 40, 31)):
            given = torch.randn(shape)
            given[0, 0, 0, 0] = float("nan")
            out, dense = run.function(given), layer(given)
            assert out.isnan().any() and not (out.isnan() & ~dense.isnan()).any()  # what is multiplied by zeros is not read
            assert_same(out[1:], dense[1:])
            assert_same(out[0, :, 1:], dense[0, :, 1:])


def test_a_batch_may_be_dynamic_and_empty() -> None:
    layer, x = prune_(nn.Conv2d(5, 6, 3, padding=1)).eval(), torch.randn(3, 5, 8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    run = compile_and_run(layer, x, regions=1)
    with torch.no_grad():
        assert_same(run.function(torch.randn(0, 5, 8, 8)), torch.empty(0, 6, 8, 8))
        assert_same(run.function(torch.cat([x, x])), layer(torch.cat([x, x])))


class Separable(nn.Module):
    """Pointwise and depthwise layers in turns, as MobileNets have them: padding as TensorFlow has it, a squeeze, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(6, 20, 1, bias=False), nn.Conv2d(20, 6, 1)
        self.depthwise, self.norm = nn.Conv2d(20, 20, 3, padding=1, groups=20, bias=False), nn.BatchNorm2d(20)
        self.shrink, self.last = nn.Conv2d(6, 6, 5, 2, groups=6), nn.Conv2d(6, 9, 1)
        self.squeeze = nn.Conv2d(20, 20, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.depthwise(F.relu6(self.expand(x)))))
        y = y * F.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = x + self.project(y)
        return self.last(F.hardswish(self.shrink(F.pad(y, (1, 2, 1, 2)))))


def pruned_between(network: nn.Module) -> nn.Module:
    """Zeroes most of all pointwise kernels."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            prune_(layer)
    return network.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_depthwise_layers_stay_planar_between_sparse_ones(dtype: torch.dtype) -> None:
    network, x = pruned_between(Separable()).to(dtype), torch.randn(2, 6, 21, 19, dtype=dtype)
    run = compile_and_run(network, x, regions=4, dense="inductor" if dtype == torch.float32 else "eager")
    depthwise = [d for d in run.decisions if "depthwise" in d.op]
    assert [d.op for d in depthwise] == ["conv 3x3 depthwise", "conv 5x5 depthwise"]
    assert all("as it is, by a kernel" in d.reason and not d.sparse for d in depthwise)
    with torch.no_grad():
        assert_same(run.output, network(x))
        network.depthwise.weight.mul_(2)
        network.depthwise.weight[3, 0, 1, 1] = float("nan")
        out, dense = run.function(x), network(x)
        assert not (out.isnan() & ~dense.isnan()).any()  # what is multiplied by zeros is not read
        network.depthwise.weight[3, 0, 1, 1] = 0
        x[1, 2, 3, 4] = float("inf")
        assert_same(run.function(x)[:1], network(x)[:1])
        assert_same(run.function(x[:0]), network(x[:0]))


def test_depthwise_layers_take_any_number_and_size_of_images() -> None:
    layers = (nn.Conv2d(5, 10, 1), nn.ReLU(), nn.Conv2d(10, 10, (3, 5), (1, 2), (1, 2), groups=10), nn.Conv2d(10, 4, 1))
    network, x = pruned_between(nn.Sequential(*layers)), torch.randn(2, 5, 9, 40)
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dim)
    run = compile_and_run(network, x, regions=2)
    assert [d.op for d in run.decisions if not d.sparse] == ["conv 3x5 depthwise"]
    with torch.no_grad():
        for shape in ((2, 5, 9, 40), (1, 5, 2, 3), (3, 5, 33, 16)):
            given = torch.randn(shape)
            assert_same(run.function(given), network(given))
            last = given.contiguous(memory_format=torch.channels_last)
            assert_same(run.function(last), network(given))


def test_a_graph_in_which_few_layers_are_sparse_stays_as_it_is() -> None:
    network, x = pruned_between(Separable()), torch.randn(1, 6, 20, 20)
    run = compile_and_run(network, x, regions=0, min_gain=1.1)
    assert all(d.reason.startswith(("too small", "too little for its graph")) for d in run.decisions)
    with torch.no_grad():
        assert_same(run.output, network(x))


def test_small_layers_of_all_kinds_follow_their_weights() -> None:
    """In one graph: groups, several results a channel, volumes, transposed ones, other paddings, an image without a batch."""
    layers: list[tuple[nn.Module, tuple[int, ...]]] = [
        (nn.Conv2d(8, 12, 3, groups=4, padding=1), (2, 8, 9, 21)),
        (nn.Conv1d(6, 12, 5, 2, groups=6), (2, 6, 40)),
        (nn.Conv2d(6, 6, 3, 3, groups=6), (2, 6, 9, 9)),
        (nn.Conv3d(4, 8, 3, (2, 1, 2), (1, 0, 2), (1, 2, 1)), (2, 4, 6, 7, 9)),
        (nn.Conv3d(6, 6, (3, 1, 2), groups=6), (1, 6, 5, 4, 20)),
        (nn.Conv3d(4, 5, 2, padding=(1, 0, 0)), (2, 4, 1, 5, 5)),
        (nn.Conv2d(5, 4, 3, padding=2, padding_mode="circular"), (1, 5, 8, 8)),
        (nn.Conv1d(5, 4, 3), (5, 19)),
        (nn.ConvTranspose2d(6, 4, 4, 2, 1), (2, 6, 5, 7)),
        (nn.ConvTranspose2d(6, 9, 3, (1, 3), (2, 0), (0, 2), groups=3, dilation=(2, 1)), (2, 6, 5, 7)),
        (nn.ConvTranspose1d(6, 4, 3, 2, 5, 1), (2, 6, 30)),
        (nn.ConvTranspose3d(3, 4, 2, 2, bias=False), (1, 3, 3, 2, 5)),
    ]
    network, images = prune_(nn.ModuleList(layer for layer, _ in layers)).eval(), [torch.randn(shape) for _, shape in layers]

    def call(*images: Tensor) -> list[Tensor]:
        return [F.relu(layer(x)) for layer, x in zip(network, images, strict=True)]

    run = compile_and_run(call, *images, regions=len(layers))
    assert [d.op for d in run.regions if "transposed" in d.op] == [f"conv {k} transposed" for k in ("4x4", "3x3", "3", "2x2x2")]
    assert all(0.05 < d.density < 0.45 for d in run.regions)
    with torch.no_grad():
        for change in (lambda w: w, lambda w: w * -2, torch.randn_like):
            for parameter in network.parameters():
                parameter.copy_(change(parameter))
            for actual, expected in zip(run.function(*images), call(*images), strict=True):
                assert_same(actual, expected)


class Open(nn.Module):
    """Layers whose images have sizes that are not known: strided, dilated, in groups, transposed, volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(5, 8, 3, 2, 1), nn.Conv2d(8, 6, 3, padding=2, dilation=2, groups=2)
        self.up, self.rows = nn.ConvTranspose2d(6, 4, 4, 2, 1), nn.Conv1d(4, 7, 5, padding=2)
        self.volume = nn.Conv3d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.silu(self.first(x))
        y = F.relu6(self.last(y) + y[:, :6])
        up = self.up(y)
        return up, F.gelu(self.rows(up.mean(2))), self.volume(y[:, :4, None].expand(-1, -1, 3, -1, -1))


class Net(nn.Module):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.first(x)
        up = self.up(F.max_pool2d(skipped, 2).relu())
        rest = [0, skipped.shape[3] - up.shape[3], 0, skipped.shape[2] - up.shape[2]]
        return self.last(torch.cat([F.pad(up, rest), skipped], 1))


def test_sizes_within_bounds() -> None:
    """Users' bounds of sizes forbid guards on them, also on halves of sizes."""
    torch.manual_seed(0)
    network, x = prune_(Net()).eval(), torch.randn(2, 3, 32, 48)
    for axis in (2, 3):
        torch._dynamo.mark_dynamic(x, axis, min=16, max=256)
    run = compile_and_run(network, x, regions=3)
    with torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        for sizes in ((32, 48), (33, 47), (17, 16)):
            given = torch.randn(2, 3, *sizes)
            assert_same(run.function(given), network(given))


def test_images_of_open_sizes() -> None:
    torch.manual_seed(0)
    network, x = prune_(Open()).eval(), torch.randn(2, 5, 20, 40)
    for axis in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, axis)
    run = compile_and_run(network, x, regions=5)
    with torch.no_grad():
        for shape in ((2, 5, 20, 40), (1, 5, 4, 2), (3, 5, 36, 68), (0, 5, 8, 8)):
            given = torch.randn(shape)
            for actual, expected in zip(run.function(given), network(given), strict=True):
                assert_same(actual, expected)
        given = torch.randn(2, 5, 16, 36)
        given[0, :, 3, 5], given[1, 0, 8, 30] = float("inf"), float("nan")
        dense = network(given)
        for actual, expected in zip(run.function(given), dense, strict=True):
            assert not (actual.isfinite() & ~expected.isfinite() & expected.isinf()).any()
            assert not (actual.isnan() & expected.isfinite()).any()  # what is multiplied by zeros is not read


def test_images_of_unbacked_sizes() -> None:
    layer = prune_(nn.Conv2d(3, 4, 3, padding=1)).eval()

    def call(x: Tensor, rows: Tensor) -> Tensor:
        n = int(rows.item())
        torch._check(n > 2)
        torch._check(n < 100)
        return F.relu(layer(x.new_ones(2, 3, n, 17)))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compile_and_run(call, torch.randn(1), torch.tensor(9), regions=1)
        with torch.no_grad():
            for rows in (9, 3, 40):
                assert_same(run.function(torch.randn(1), torch.tensor(rows)), F.relu(layer(torch.ones(2, 3, rows, 17))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2, (2, 1), 3])
@pytest.mark.parametrize("across", [1, 2, 3])
def test_columns_of_taps_may_lie_apart(
    monkeypatch: pytest.MonkeyPatch, across: int, stride: int | tuple[int, int], dtype: torch.dtype
) -> None:
    planned = find_convolutions.planned
    monkeypatch.setattr(
        find_convolutions, "planned", lambda found: replace(planned(found), channels=3, vectors=2 * across, across=across)
    )
    layer = nn.Conv2d(8, 6, (3, 5), stride, (1, 2), (2, 1), groups=2, dtype=dtype)
    with torch.no_grad():
        layer.weight *= torch.rand_like(layer.weight) < 0.3
    x = torch.randn(2, 8, 21, 39, dtype=dtype)
    x[1, 3, 7, 11] = float("nan")
    run = compile_and_run(layer, x)
    expected = copy.deepcopy(layer).double()(x.double())
    same = ~(run.output.isnan() | expected.isnan())
    bounds = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}
    assert same[0].all() and run.output.isnan().any() and not (run.output.isnan() & ~expected.isnan()).any()
    torch.testing.assert_close(run.output[same].double(), expected[same], rtol=bounds[dtype], atol=bounds[dtype])


def test_other_schedules_leave_them_dense_with_a_reason() -> None:
    layer, x = prune_(nn.Conv2d(8, 8, 3)).eval(), torch.randn(1, 8, 9, 9)
    run = compile_and_run(layer, x, regions=0, schedule="broadcast")
    assert [d.reason for d in run.decisions] == ["schedule broadcast is not for convolutions"]
    with torch.no_grad():
        assert_same(run.output, layer(x))


def test_small_layers_say_why_they_stay_dense() -> None:
    layer, x = prune_(nn.Conv2d(8, 8, 3)), torch.randn(1, 8, 9, 9)
    for grad in (True, False):
        small = compile_and_run(layer, x.clone().requires_grad_(grad), grad=grad, regions=0, min_gain=1.1).decisions
        assert [d.reason.startswith("too small") and d.gain is not None and d.gain < 1.1 for d in small] == [True] * (1 + grad)


def test_convolutions_that_cannot_be_measured_leave_the_others_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images by themselves, by an open number of templates, and by integers, beside a sparse layer."""
    monkeypatch.setattr("gossamer.backend.measuring.convolution_times._us", lambda what, *given: 1e5)
    layer, edges = prune_(nn.Conv2d(16, 16, 3, padding=1)).eval(), torch.tensor([[1, 0, -1]] * 3).expand(2, 16, 3, 3)
    edges = edges.clone()

    def network(x: Tensor, templates: Tensor) -> tuple[Tensor, ...]:
        y = layer(x)
        return y, F.conv2d(y, y), F.conv2d(y, templates), F.conv2d(x.long(), edges)

    x, templates = torch.randn(2, 16, 9, 9), torch.randn(5, 16, 3, 3)
    torch._dynamo.mark_dynamic(templates, 0)
    with torch.no_grad():
        run = compile_and_run(network, x, templates, regions=1, min_gain=0.01)
        for found, expected in zip(run.output, network(x, templates), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_pointwise_volumes_and_rows() -> None:
    for layer, x in (
        (nn.Conv3d(6, 5, 1), torch.randn(2, 6, 3, 4, 5)),
        (nn.Conv1d(6, 5, 4, stride=2, padding=3), torch.randn(2, 6, 41)),
    ):
        run = compile_and_run(prune_(layer).eval(), x, regions=1, dynamic=False)
        with torch.no_grad():
            assert_same(run.output, layer(x))


@pytest.mark.parametrize("seed", range(8))
def test_random_convolutions(seed: int) -> None:
    error, told = (difference, trained_difference)[seed % 2](seed)
    assert error <= 1, told


@pytest.mark.parametrize("grad", [False, True])
def test_filters_over_a_spectral_norm(grad: bool) -> None:
    layer, x = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 32, 3)), torch.randn(2, 8, 6, 5)
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(torch.rand(32, 8, 3, 3) < 0.2)  # type: ignore[union-attr, operator]
    layer(x)
    run = compile_and_run(layer.eval(), x, grad=grad, regions=1)
    for _ in range(2):
        assert_same(run.function(x), layer(x))
        with torch.no_grad():
            layer.parametrizations.weight.original.mul_(torch.rand(32, 1, 1, 1))  # type: ignore[union-attr, operator]
