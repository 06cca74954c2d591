"""Quantized layers through the backend: sums bit for bit those of integers, in every state that a model can be in."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import gossamer
from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.regions.importer import import_region
from gossamer.dialects.packing import Quads
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import Target, host
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.quantization.quantized_linear import quantized_linear
from tests.backend.harness import compile_and_run, prune_, pruned

in_chains = pytest.mark.skipif("bytedots" not in host().instructions, reason="chains need dot products of bytes")
SCHEDULES = ["quads", *(["lookup8"] if {"bytedots", "avx512vbmi"} <= host().instructions else []), "reference"]


class Sums(nn.Module):
    """Integers in, the sums of their products as floats out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x, self.weight.t()).double()


def bytes_of(*shape: int, density: float = 1.0, block: int = 1) -> Tensor:
    """Extreme values among others."""
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    values[torch.rand(shape) < 0.2] = -128
    kept = torch.rand(-(-shape[0] // block), -(-shape[1] // block)) < density
    return values * kept.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]


def quantized_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.GELU(), nn.Linear(90, 40)).eval()
    gossamer.quantize(prune_(model))
    return model


def kernel_of(
    weight: Tensor, schedule: str, stored: str = "MK", target: Target | None = None, **hints: Any
) -> tuple[RegionKernel, Packed]:
    """The bare product with its sums as f32, and the weight as it wants it."""
    contract = contract_of(weight, stored, target or host(), **hints)
    kernel = compile_region(contract, schedule=schedule, target=target)
    storage = kernel.formats[1]
    assert storage is not None
    return kernel, pack(weight, storage)


def contract_of(weight: Tensor, stored: str, target: Target, **hints: Any) -> str:
    """The bare product with its sums as f32."""
    (m, k), graph = (weight.shape if stored == "MK" else weight.t().shape), fx.Graph()
    pattern = Pattern.of(weight if stored == "MK" else weight.t()).rounded
    found = {"block": pattern.block, "fill": pattern.fill, "features": target.instructions, **hints}
    matrix = Matrix(m, k, 1 if stored == "MK" else 0, "i8", target.vector_bits, pattern.density, **found)
    wide: list[fx.Node] = []
    for name, shape in (("x", (None, k)), ("w", tuple(weight.shape))):
        node = graph.placeholder(name)
        node.meta = {"shape": shape, "dtype": torch.int8}
        wide.append(node)
    x, w = (graph.call_function(torch.ops.prims.convert_element_type.default, (node, torch.int32)) for node in wide)
    factor = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0])) if stored == "MK" else w
    product = graph.call_function(torch.ops.aten.mm.default, (x, factor))
    graph.output(graph.call_function(torch.ops.prims.convert_element_type.default, (product, torch.float32)))
    return import_region(fx.GraphModule({}, graph, "Product"), matrix, None)


def check(kernel: RegionKernel, packed: Packed, weight: Tensor, tokens: int) -> None:
    """Small sums are floats without rounding; larger ones are rounded once."""
    x = bytes_of(tokens, weight.shape[1])
    y = torch.full((tokens, weight.shape[0]), torch.nan)
    kernel([x, packed], y)
    assert torch.equal(y, (x.long() @ weight.long().t()).float()), (kernel.schedule, tuple(weight.shape), tokens)


SHAPES = ((33, 70, 1), (64, 64, 4))
"""M, K, and the block of the nonzeros."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_are_exact(schedule: str) -> None:
    torch.manual_seed(0)
    for m, k, block in SHAPES[: 1 if schedule == "reference" else None]:
        weight = bytes_of(m, k, density=0.3, block=block)
        kernel, packed = kernel_of(weight, schedule)
        for tokens in (66, 1, 2, 5, 9, 16, 17, 40, 64, 131, 0):
            check(kernel, packed, weight, tokens)
        packed.refresh(weight // 2)
        check(kernel, packed, weight // 2, 7)


@pytest.mark.parametrize("schedule", SCHEDULES[:-1])
def test_rows_may_differ_as_they_like(schedule: str) -> None:
    """Rows without a nonzero beside full ones, a window that nobody uses, and nothing at all."""
    torch.manual_seed(0)
    weight = bytes_of(50, 200, density=0.1)
    weight[3], weight[16:32], weight[:, 64:128] = bytes_of(1, 200)[0] | 1, 0, 0
    for each in (weight, torch.zeros_like(weight)):
        kernel, packed = kernel_of(each, schedule)
        for tokens in (1, 9, 40):
            check(kernel, packed, each, tokens)


def test_a_weight_may_lie_transposed_in_panels() -> None:
    torch.manual_seed(0)
    weight = bytes_of(70, 8200, density=0.2)  # more columns than fit into any first-level cache
    kernel, packed = kernel_of(weight.t().contiguous(), "quads", "KM")
    assert isinstance(packed.format, Quads)
    assert packed.format.width < 8200
    for tokens in (1, 70):
        check(kernel, packed, weight, tokens)


def test_the_largest_sums_fit() -> None:
    k = 40_000
    for weight, value in ((-128, -128), (127, -128), (-128, 127)):
        w, x, y = torch.full((2, k), weight, dtype=torch.int8), torch.full((3, k), value, dtype=torch.int8), torch.empty(3, 2)
        kernel, packed = kernel_of(w, "quads")
        kernel([x, packed], y)
        assert torch.equal(y, torch.full((3, 2), float(k * weight * value)))


@torch.no_grad()
def test_a_model_has_regions_with_all_that_follows_inside() -> None:
    model, x = quantized_model(), torch.randn(2, 9, 70)
    run = compile_and_run(model, x, regions=2)
    assert [d.op for d in run.regions] == ["linear", "linear"]
    assert "5 ops fused" in run.regions[0].reason  # to a float, two scales, the bias, GELU
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)
    x[1, 3, 5] = torch.nan
    y = run.function(x)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool(y[1, 3].isnan().all())
    assert int(y.isnan().sum()) == 40


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_inputs_of_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, scale, bias = bytes_of(24, 40, density=0.2), torch.rand(24) * 1e-3, torch.randn(24)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Buffer(weight)

        def forward(self, x: Tensor) -> Tensor:
            return quantized_linear(x, self.w, scale, bias)

    x = torch.randn(7, 40).to(dtype)
    run = compile_and_run(Layer(), x, regions=1)
    assert run.output.dtype == dtype
    torch.testing.assert_close(run.output, Layer()(x))


def test_training_goes_straight_through() -> None:
    model = quantized_model().train()
    reference = copy.deepcopy(model)
    x = torch.randn(11, 70, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    run = compile_and_run(model, x, grad=True)
    run.output.square().sum().backward()
    reference(other).square().sum().backward()
    torch.testing.assert_close(run.output, reference(other), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model[0].bias.grad, reference[0].bias.grad, rtol=1e-3, atol=1e-4)
    names = ["0.weight_int8"] * 2 + ["2.weight_int8"] * 2  # sums of integers, and gradients
    assert sorted(d.name for d in run.regions) == names


@in_chains
@torch.no_grad()
@pytest.mark.parametrize(("between", "error"), [(nn.LeakyReLU, 1e-4), (nn.GELU, 5e-3)])
@pytest.mark.parametrize("schedule", SCHEDULES[:-1])
def test_chains_make_integers_of_x_where_it_lies(
    schedule: str, between: type[nn.Module], error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before bytes, GELU is an approximation, so that a few bytes are the next ones."""
    torch.manual_seed(0)
    for other in {"quads", "lookup8", "amxexpand"} - {schedule}:
        monkeypatch.setitem(FAMILIES, other, replace(FAMILIES[other], chain=None))
    wide = nn.Linear(64, 1200)  # of so many columns the next one takes several panels
    model = prune_(nn.Sequential(wide, between(), nn.Linear(1200, 40), nn.LayerNorm(40), nn.Linear(40, 24))).eval()
    gossamer.quantize(model, skip=["4"])
    x = torch.randn(2, 9, 64)
    torch._dynamo.mark_dynamic(x, 1)
    run = compile_and_run(model, x, regions=3)
    assert [d.reason for d in run.regions] == ["in a chain of 3"] * 3
    assert [d.schedule for d in run.regions][:2] == [schedule] * 2
    for tokens in (9, 65, 2, 130, 0):
        x = torch.randn(2, tokens, 64)
        x[:, 1:2] = 0
        torch.testing.assert_close(run.function(x), model(x), rtol=error, atol=error)
    x = torch.randn(2, 9, 64)
    x[1, 3, 5], x[0, 2, 7] = torch.nan, -torch.inf
    y = run.function(x)
    assert y.isnan().any(2).nonzero().tolist() == [[0, 2], [1, 3]]
    torch.testing.assert_close(y, model(x), rtol=error, atol=error, equal_nan=True)
    model[0].weight_int8.copy_(model[0].weight_int8.roll(1, 1))
    model[2].weight_scale.mul_(2)
    torch.testing.assert_close(run.function(x), model(x), rtol=error, atol=error, equal_nan=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        run.function(torch.randn(2, 33, 64))


@in_chains
@torch.no_grad()
@pytest.mark.parametrize("width", [40, 96, 200, 704, 708])
@pytest.mark.parametrize("schedule", SCHEDULES[:-1])
def test_chains_of_any_width(schedule: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for other in {"quads", "lookup8", "amxexpand"} - {schedule}:
        monkeypatch.setitem(FAMILIES, other, replace(FAMILIES[other], chain=None))
    model = prune_(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 48))).eval()
    gossamer.quantize(model)
    x = torch.randn(70, 64)
    run = compile_and_run(model, x, regions=2)
    assert [(d.reason, d.schedule) for d in run.regions] == [("in a chain of 2", schedule)] * 2
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


@in_chains
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "chained"), [(torch.bfloat16, True), (torch.float64, False)])
def test_chains_of_other_types(dtype: torch.dtype, chained: bool) -> None:
    torch.manual_seed(0)
    model = prune_(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40))).eval().to(dtype)
    gossamer.quantize(model)
    x = torch.randn(20, 64).to(dtype)
    run = compile_and_run(model, x, regions=2)
    assert ["chain" in d.reason for d in run.regions] == [chained] * 2
    tolerance = 3e-2 if chained else 1e-6  # within a chain nothing is rounded between
    torch.testing.assert_close(run.output, model(x), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_changed_weights_are_seen() -> None:
    torch.manual_seed(0)
    model, x = Sums(bytes_of(40, 70, density=0.3)), bytes_of(20, 70)
    run = compile_and_run(model, x, regions=1)
    for _ in range(3):
        model.weight.copy_(bytes_of(40, 70, density=0.3))
        assert torch.equal(run.function(x), model(x))
    model.weight.neg_()
    assert torch.equal(run.function(x), model(x))


def test_the_next_process_finds_the_regions_and_what_they_call_where_a_weight_is_full(tmp_path: Path) -> None:
    program = """
import sys, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
class Sums(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Buffer(torch.randint(1, 128, (48, 64), dtype=torch.int8) * (torch.rand(48, 64) < 0.1))
    def forward(self, x):
        return torch._int_mm(x, self.weight.t()).float() + 1
model, x = Sums(), torch.randint(-128, 128, (40, 64), dtype=torch.int8)
with torch.no_grad():
    run = torch.compile(model, backend="sparse", fullgraph=True, options={"min_gain": 1e-9, "dense": "inductor"})
    run(x)
    print(counters["gossamer"]["regions"], counters["aot_autograd"]["autograd_cache_hit"], "torch_mlir" in sys.modules)
    model.weight.fill_(3)
    assert torch.equal(run(x), model(x))
"""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "GOSSAMER_CACHE_DIR": str(tmp_path / "gossamer")}
    for expected in ("1 0 True", "1 1 False"):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **caches})
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == expected


@torch.no_grad()
def test_what_has_no_kernel_stays_torch_s_own() -> None:
    weight = bytes_of(40, 70, density=0.3)

    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Buffer(weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch._int_mm(x, self.w.t()) // 3

    x = bytes_of(5, 70)
    run = compile_and_run(Integers(), x, regions=0)
    assert torch.equal(run.output, Integers()(x))
    assert [d.reason for d in run.decisions] == ["its sums are used as integers"]

    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Buffer(weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch._int_mm(self.w, x.t()).float()

    run = compile_and_run(Left(), x, regions=0)
    assert torch.equal(run.output, Left()(x))
    assert "on the left" in run.decisions[0].reason
    dense = Sums(bytes_of(40, 70))
    run = compile_and_run(dense, x, min_gain=1.1, regions=0)
    assert torch.equal(run.output, dense(x))


@torch.no_grad()
def test_products_that_torchao_makes_unsigned() -> None:
    torch.manual_seed(0)

    class Unsigned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Buffer(bytes_of(40, 70, density=0.3))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            t = self.w.t()
            sums = torch._int_mm((x.to(torch.int32) + 128).to(torch.uint8), t)
            return (sums - t.sum(0, keepdim=True, dtype=torch.int32) * 128).float() * scale

    model, x, scale = Unsigned(), bytes_of(9, 70), torch.rand(9, 1)
    run = compile_and_run(model, x, scale, dynamic=True, regions=1)
    for tokens in (9, 4, 0):
        x, scale = bytes_of(tokens, 70), torch.rand(tokens, 1)
        expected = (x.long() @ model.w.long().t()).float() * scale
        assert torch.equal(run.function(x, scale), expected)


class AsTorchao(nn.Module):
    """A layer as torchao writes it on CPUs: the step of a token is that of its least or greatest element, zero points are 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w, self.scale = nn.Buffer(bytes_of(outputs, inputs, density=0.2)), nn.Buffer(torch.rand(outputs) * 1e-2)

    def forward(self, x: Tensor) -> Tensor:
        zero, t = torch.zeros(len(x), 1), self.w.t()
        low, high = torch.minimum(x.amin(1, keepdim=True), zero), torch.maximum(x.amax(1, keepdim=True), zero)
        step = (torch.maximum(-low, high) / 127.5).clamp_min(1e-7)
        q = ((x * (1 / step)).round() + zero.to(torch.int8)).clamp(-128, 127).to(torch.int8)
        sums = torch._int_mm((q.to(torch.int32) + 128).to(torch.uint8), t)
        return (sums - t.sum(0, keepdim=True, dtype=torch.int32) * 128).float() * step * self.scale


@torch.no_grad()
def test_layers_as_torchao_writes_them_are_members_of_chains() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(AsTorchao(64, 96), nn.LeakyReLU(0.2), AsTorchao(96, 64)), torch.randn(40, 64)
    torch._dynamo.mark_dynamic(x, 0)
    run = compile_and_run(model, x, regions=2)
    assert all(("in a chain of 2" in d.reason) is ("bytedots" in host().instructions) for d in run.regions)
    for tokens in (40, 3, 130, 0):
        x = torch.randn(tokens, 64) + torch.linspace(-3, 3, tokens)[:, None]  # of some the least is the largest
        torch.testing.assert_close(run.function(x), model(x), rtol=1e-4, atol=1e-3)
    x = torch.randn(9, 64)
    x[3, 2], x[5] = torch.nan, 0
    found, expected = run.function(x), model(x)
    assert found[3].isnan().all()
    others = torch.arange(9) != 3
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_torchao_s_layers() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = prune_(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))).eval()
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(12, 64)
    run = compile_and_run(model, x, regions=2)
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


def test_float_weights_have_no_int8_schedules() -> None:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.copy_(pruned(64, 64))
        with pytest.raises(Exception, match="no quads schedule"):
            compile_and_run(model, torch.randn(4, 64), schedule="quads")
