"""Convolutions of points as CUDA tensors have them: their kernels in the emulator, assembled, and layers as a whole."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

import gossamer.nn as spconv
from gossamer.backend import sparse as backend
from gossamer.dialects.errors import DeviceError
from gossamer.dialects.kernel import KernelOp
from gossamer.dialects.points import ConvolvePointsGradOp, ConvolvePointsOp
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.ptx import Architecture, assemble
from gossamer.sparsity.compiler import op_kernels
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import schedule_of
from gossamer.sparsity.nn.site_maps import SiteMaps
from gossamer.sparsity.nn.sites import PairMap, Sites
from gossamer.sparsity.nn.windows import Window
from tests.contracts import TYPES
from tests.gpu.assembler import assembled
from tests.gpu.emulated_device import STREAM, EmulatedDevice, emulated_device
from tests.gpu.emulator import Fault
from tests.gpu.kernels import no_generic_access, planted, run
from tests.gpu.open_products import Compiled


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@cache
def compiled(op: type[KernelOp], element: str = "f32", capability: int = 90) -> Compiled:
    types = [TYPES[element] if each.element == "W" else torch.int32 for each in op.signature.takes + op.signature.gives]
    kernels = gpu_pipelines.lower(pipelines.plan(op_ir(op, types), schedule_of(op), gpu_pipelines.WARP_BITS))
    return Compiled(kernels, assemble(kernels.llvm_ir, Architecture(capability)))


def some_sites(count: int, *shape: int) -> Tensor:
    """Of one grid, in no order."""
    places = torch.randperm(torch.Size(shape).numel())[:count]
    return torch.stack([torch.zeros_like(places), *torch.unravel_index(places, shape)], 1).int()


def pairs_of(count: int, *shape: int) -> PairMap:
    """Of windows of 3 x 3."""
    window = Window((3, 3), (1, 1), (1, 1), (1, 1))
    return SiteMaps(Sites.of(some_sites(count, *shape), shape, 1)).map("same", (), window)


def products(pairs: PairMap) -> Iterator[tuple[Tensor, Tensor]]:
    for first, *_, end in pairs.positions.tolist():
        yield pairs.inputs[first:end].long(), pairs.outputs[first:end].long()


def convolved(
    pairs: PairMap, x: Tensor, weight: Tensor, bias: Tensor, variant: str, seed: int | None = None, ptx: str | None = None
) -> Tensor:
    made = compiled(ConvolvePointsOp, "f32" if x.dtype == torch.float32 else "f64")
    out = torch.full((len(pairs.rows), weight.shape[2]), float("nan"), dtype=x.dtype)
    given = [x, weight, bias, pairs.inputs, pairs.outputs, pairs.rows, pairs.positions, out]
    return run(made.kernels, ptx or made.ptx, variant, given, seed)


def summed(pairs: PairMap, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = bias.double().expand(len(pairs.rows), -1).clone()
    for k, (into, out) in enumerate(products(pairs)):
        y.index_add_(0, out, x.double()[into] @ weight[k].double())
    return y


def gradient(pairs: PairMap, x: Tensor, upstream: Tensor, seed: int | None = None, ptx: str | None = None) -> Tensor:
    made = compiled(ConvolvePointsGradOp, "f32" if x.dtype == torch.float32 else "f64")
    out = torch.full((9, x.shape[1], upstream.shape[1]), float("nan"), dtype=x.dtype)
    given = [x, upstream, pairs.inputs, pairs.outputs, pairs.positions, out]
    return run(made.kernels, ptx or made.ptx, "o1", given, seed)


def near(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "filters"), [(1, 1), (3, 5), (4, 33), (8, 64), (6, 130)])
def test_any_number_of_channels(channels: int, filters: int) -> None:
    pairs = pairs_of(30, 7, 8)
    x, weight, bias = torch.randn(30, channels), torch.randn(9, channels, filters), torch.randn(filters)
    for variant in ("r256", "c4"):
        near(convolved(pairs, x, weight, bias, variant), summed(pairs, x, weight, bias))
    upstream = torch.randn(30, filters)
    expected = torch.stack([x.double()[into].t() @ upstream.double()[out] for into, out in products(pairs)])
    near(gradient(pairs, x, upstream), expected)


@pytest.mark.parametrize("count", [1, 255, 300])
def test_any_number_of_sites(count: int) -> None:
    """One tile, and more: offsets without pairs, tiles with a few."""
    pairs, x, weight, bias = pairs_of(count, 20, 16), torch.randn(count, 4), torch.randn(9, 4, 3), torch.randn(3)
    near(convolved(pairs, x, weight, bias, "r256"), summed(pairs, x, weight, bias))


def test_doubles() -> None:
    pairs, x, weight, bias = pairs_of(20, 6, 6), torch.randn(20, 3), torch.randn(9, 3, 5), torch.randn(5)
    x, weight, bias = x.double(), weight.double(), bias.double()
    torch.testing.assert_close(convolved(pairs, x, weight, bias, "r256"), summed(pairs, x, weight, bias))
    upstream = torch.randn(20, 5).double()
    torch.testing.assert_close(
        gradient(pairs, x, upstream), torch.stack([x[into].t() @ upstream[out] for into, out in products(pairs)])
    )


def test_infinity_and_nan_reach_the_sites_around_them_only() -> None:
    pairs, x, weight, bias = pairs_of(12, 5, 5), torch.randn(12, 4), torch.ones(9, 4, 2), torch.zeros(2)
    x[3, 1], x[7, 2] = torch.inf, torch.nan
    result = convolved(pairs, x, weight, bias, "r256")
    expected = summed(pairs, x, weight, bias)
    torch.testing.assert_close(result.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps(seed: int) -> None:
    pairs, x, weight, bias = pairs_of(80, 9, 10), torch.randn(80, 4), torch.randn(9, 4, 6), torch.randn(6)
    near(convolved(pairs, x, weight, bias, "c4", seed), summed(pairs, x, weight, bias))


FAULTS = {
    "no barrier": (r"bar\.sync[^;]*;", "", 0),
    "shifted": (r"(ld\.global\.nc\.v4\.b32[^\[]*\[%rd\d+)\]", r"\1+16]", 0),
    "unclamped": (r"min\.u64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    pairs, x, weight, bias = pairs_of(80, 9, 10), torch.randn(80, 4), torch.randn(9, 4, 6), torch.randn(6)
    broken = planted(compiled(ConvolvePointsOp).ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        near(convolved(pairs, x, weight, bias, "c4", 0, broken), summed(pairs, x, weight, bias))


def test_a_gradient_without_its_barrier_is_caught() -> None:
    pairs, x, upstream = pairs_of(30, 7, 8), torch.randn(30, 4), torch.randn(30, 5)
    broken = planted(compiled(ConvolvePointsGradOp).ptx, r"bar\.sync[^;]*;", "", 1)  # before sums of other warps are read
    with pytest.raises(Fault):
        gradient(pairs, x, upstream, 0, broken)


@pytest.mark.parametrize(("element", "capability"), [("f32", 80), ("f32", 90), ("f32", 100), ("f64", 90)])
def test_they_assemble(element: str, capability: int) -> None:
    for op, names in ((ConvolvePointsOp, {"region_r256", "region_c4"}), (ConvolvePointsGradOp, {"region_o1"})):
        made = compiled(op, element, capability)
        usage = assembled(made.ptx, capability)
        assert set(usage) == set(made.kernels.launches) == names
        most = 128 if element == "f32" else 192
        assert all(kernel.registers <= most and kernel.spilled == 0 for kernel in usage.values())
        assert no_generic_access(made.ptx) and "fma.rn.f" in made.ptx and "mul.rn.f" not in made.ptx


# Layers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """One to install in place of the CPU, which computes what is expected before."""
    torch._dynamo.reset()
    yield emulated_device()


class Network(nn.Module):
    """Every kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = spconv.SparseSequential(
            spconv.SubMConv2d(3, 4, 3),
            nn.ReLU(),
            spconv.SparseConv2d(4, 6, 3, stride=2, padding=1, indice_key="down"),
            spconv.SubMConv2d(6, 6, 3, bias=False),
            spconv.SparseInverseConv2d(6, 4, 3, indice_key="down"),
            spconv.SparseMaxPool2d(2, 2),
            spconv.SparseAvgPool2d(2, 2),
            spconv.SparseConvTranspose2d(4, 3, 2, stride=2),
            spconv.ToDense(),
        )

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        result: Tensor = self.layers(spconv.SparseConvTensor(x, indices, [8, 7], 1))
        return result


def test_a_network_and_its_gradients(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, indices = Network(), torch.randn(25, 3, requires_grad=True), some_sites(25, 8, 7)
    expected = model(x, indices)
    upstream, leaves = torch.randn_like(expected), [x, *model.parameters()]
    gradients = torch.autograd.grad(expected, leaves, upstream)
    indices = indices.clone()  # or its maps are known
    with gpu.installed(monkeypatch), gpu.operations(monkeypatch):
        found = model(x, indices)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for ours, same in zip(torch.autograd.grad(found, leaves, upstream), gradients, strict=True):
            torch.testing.assert_close(ours, same, rtol=1e-4, atol=1e-5)
        assert Counter(gpu.schedules) == {"convolve-points": 5 + 5, "convolve-points-grad": 5}
        assert {call[9] for call in gpu.driver.named("cuLaunchKernel")} == {STREAM}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow ones are computed in f32."""
    layer, x, indices = spconv.SubMConv2d(4, 5, 3).to(dtype), torch.randn(12, 4, dtype=dtype), some_sites(12, 5, 6)
    expected = layer(spconv.SparseConvTensor(x, indices, [5, 6], 1)).features
    with gpu.installed(monkeypatch), gpu.operations(monkeypatch):
        found = layer(spconv.SparseConvTensor(x, indices.clone(), [5, 6], 1)).features
        assert found.dtype == dtype and gpu.schedules == ["convolve-points"]
        torch.testing.assert_close(found, expected)


def test_no_sites(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu.installed(monkeypatch), gpu.operations(monkeypatch):
        result = spconv.SubMConv2d(4, 5, 3)(spconv.SparseConvTensor(torch.randn(0, 4), some_sites(0, 5, 6), [5, 6], 1))
        assert result.features.shape == (0, 5) and not gpu.schedules


def test_a_compiled_graph(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for any number of sites."""
    model, graphs = Network().requires_grad_(False), list[fx.GraphModule]()

    def counting(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(gm)
        return backend(gm, inputs, options={"dense": "eager", "strict": True})

    cases = [(torch.randn(count, 3), some_sites(count, 8, 7)) for count in (20, 31)]
    expected = [model(*case) for case in cases]
    with gpu.installed(monkeypatch), gpu.operations(monkeypatch):
        run = torch.compile(model, backend=counting, fullgraph=True, dynamic=True)
        for (x, indices), same in zip(cases, expected, strict=True):
            torch.testing.assert_close(run(x, indices.clone()), same, rtol=1e-4, atol=1e-5)
        assert len(graphs) == 1 and gpu.schedules == ["convolve-points"] * (5 + 5)


def test_a_gpu_without_kernels_says_so(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_kernels, "loaded_kernel", lambda *_: None)
    with gpu.installed(monkeypatch), gpu.operations(monkeypatch), pytest.raises(DeviceError, match="from sm_80 on"):
        spconv.SubMConv2d(4, 5, 3)(spconv.SparseConvTensor(torch.randn(5, 4), some_sites(5, 5, 6), [5, 6], 1))
