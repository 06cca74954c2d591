"""Reductions and softmax over the rows of a sparse matrix, run in the emulator and assembled by NVIDIA's assembler."""

from functools import cache

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import CompileError
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.ptx import Architecture, assemble
from gossamer.sparsity.compiler import segment_ir
from tests.contracts import assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import no_generic_access, planted, run
from tests.gpu.open_products import Compiled

COUNTS = [0, 3, 0, 0, 70, 1, 33, 0, 5, 0]


@cache
def compiled(name: str, dtype: torch.dtype, capability: int = 90) -> Compiled:
    build = {"softmax": segment_ir.softmax, "softmax_backward": segment_ir.softmax_backward}.get(name)
    text = build(torch.int32, dtype, False) if build else segment_ir.reduce(torch.int32, dtype, name)
    kernels = gpu_pipelines.lower(pipelines.plan(text, "segments", gpu_pipelines.WARP_BITS))
    return Compiled(kernels, assemble(kernels.llvm_ir, Architecture(capability)))


def computed(name: str, counts: list[int], *entries: Tensor, seed: int | None = None, ptx: str | None = None) -> Tensor:
    """What the kernel of `name` makes of segments of these lengths."""
    positions = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    made = compiled(name, entries[0].dtype)
    (variant,) = (kernel.rpartition("_")[2] for kernel in made.kernels.launches)
    size = len(counts) if variant == "s8" else len(entries[0])
    out = torch.full((size,), float("nan"), dtype=entries[0].dtype)
    return run(made.kernels, ptx or made.ptx, variant, [positions, *entries, out], seed)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(sum(COUNTS))


def softmax(x: Tensor) -> Tensor:
    return torch.cat([part.double().softmax(0) for part in x.split(COUNTS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_goes_over_each_segment(x: Tensor, dtype: torch.dtype) -> None:
    assert_near(computed("softmax", COUNTS, x.to(dtype)), softmax(x.to(dtype)))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(x: Tensor, seed: int) -> None:
    assert_near(computed("softmax", COUNTS, x, seed=seed), softmax(x))


def test_softmax_has_the_gradient_of_torch(x: Tensor) -> None:
    y, grad = softmax(x).float(), torch.randn(len(x))
    pairs = zip(y.double().split(COUNTS), grad.double().split(COUNTS), strict=True)
    expected = torch.cat([(b - (a * b).sum()) * a for a, b in pairs])
    assert_near(computed("softmax_backward", COUNTS, grad, y), expected)


@pytest.mark.parametrize("kind", ["sum", "amax", "prod"])
def test_reductions_keep_nan_and_give_empty_segments_the_neutral_element(x: Tensor, kind: str) -> None:
    """A segment without entries gives the neutral element, a NaN is kept."""
    x[5] = torch.nan
    result = computed(kind, COUNTS, x)
    neutral = {"sum": 0.0, "amax": -torch.inf, "prod": 1.0}[kind]
    expected = [getattr(part.double(), kind)() if len(part) else torch.tensor(neutral) for part in x.split(COUNTS)]
    torch.testing.assert_close(result.double(), torch.stack(expected).double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_entries_of_many_blocks() -> None:
    """A segment longer than what a block has begins in one; the next blocks begin with those after it."""
    counts, x = [250, 1000, 3, 40], torch.randn(1293)
    expected = torch.cat([part.double().softmax(0) for part in x.split(counts)])
    assert_near(computed("softmax", counts, x), expected)


FAULTS = {
    "no neighbours": (r"shfl\.sync\.bfly\.b32 (\s*%r\d+)[^,]*, (%r\d+), 1, [^;]*;", r"mov.b32 \1, \2;", 0),
    "half a warp": (r"shfl\.sync\.bfly\.b32 (\s*%r\d+)[^,]*, (%r\d+), 16, [^;]*;", r"mov.b32 \1, \2;", 1),
    "shifted": (r"(st\.global[^\[]*\[%rd\d+)\]", r"\1+4]", 0),
    "another maximum": (r"max\.NaN\.f32", "min.NaN.f32", 0),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(x: Tensor, pattern: str, replacement: str, number: int) -> None:
    broken = planted(compiled("softmax", torch.float32).ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        assert_near(computed("softmax", COUNTS, 40 * x, ptx=broken), softmax(40 * x))


@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, 80), (torch.float32, 100), (torch.bfloat16, 90)])
def test_the_assembler_takes_the_kernel(dtype: torch.dtype, capability: int) -> None:
    for name in ("softmax", "amax"):
        made = compiled(name, dtype, capability)
        (usage,) = assembled(made.ptx, capability).values()
        assert usage.registers <= 64 and usage.spilled == 0
        assert no_generic_access(made.ptx)


def test_what_has_no_such_kernel() -> None:
    with pytest.raises(CompileError, match="GPUs compute with floats only"):
        compiled("sum", torch.int32)
