"""The K-blocked product on GPUs, run in the emulator and assembled by NVIDIA's assembler."""

import pytest
import torch

from gossamer.dialects.errors import CompileError
from gossamer.passes import gpu_pipelines, pipelines
from tests.contracts import STEPS, Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-kblock"
VARIANTS = ("t128", "t64", "t32")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("element", ["f32", "bf16", "f16"])
def test_a_layer_with_bias_and_relu(element: str, variant: str) -> None:
    region = Region(40, 144, element, ("bias", "relu"))
    x, w, extras = region.operands(33)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("m", "k", "tokens"),
    [(1, 1, 1), (7, 3, 2), (33, 129, 31), (65, 130, 65), (130, 40, 129)],
)
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    region = Region(m, k, "f32", ("residual",))
    x, w, extras = region.operands(tokens)
    kernels = compiled(region, SCHEDULE)
    for variant in VARIANTS:
        assert_near(emulate(kernels, variant, x, w, extras), region.reference(x, w, extras))


def test_a_weight_that_is_stored_transposed() -> None:
    region = Region(40, 136, "f32", ("bias",), transposed=True)
    x, w, extras = region.operands(5)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("epilogue", STEPS)
def test_every_epilogue_is_that_of_the_reference(epilogue: str) -> None:
    region = Region(12, 40, "f32", ("bias", epilogue))
    x, w, extras = region.operands(5)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density: float) -> None:
    """A full weight has more nonzeros in a warp's rows than its part of shared memory holds."""
    region = Region(20, 160, "f32")
    x, w, extras = region.operands(3, density)
    for variant in VARIANTS:
        assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


def test_infinity_and_nan_reach_the_results_that_depend_on_them_only() -> None:
    region = Region(9, 40, "f32")
    x, w, extras = region.operands(4)
    x[0, 0], x[1, 39] = torch.inf, torch.nan
    w[0], w[:, 0], w[:, 39] = 0, 0, 0
    w[3, 0], w[5, 39] = 1, 1
    result = emulate(compiled(region, SCHEDULE), "t32", x, w, extras)
    assert torch.isinf(result).nonzero().tolist() == [[0, 3]]
    assert torch.isnan(result).nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps(seed: int) -> None:
    region = Region(20, 132, "bf16", ("bias",))
    x, w, extras = region.operands(20)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras, seed=seed), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("pattern", "replacement", "number"),
    [
        (r"bar\.sync\s+0;", "", 0),
        (r"bar\.sync\s+0;", "", 1),
        (r"bar\.warp\.sync\s+-1;", "", 0),
        (r"bar\.warp\.sync\s+-1;", "", 1),
        (r"(st\.shared\.v2\.b32\s+\[%rd\d+)(\+\d+)?\]", r"\1+4]", 0),
        (r"(ld\.global\.nc\.v4\.b32[^\[]*\[%rd\d+)\]", r"\1+16]", 0),
        (r"min\.u64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
        (r"fma\.rn\.f32 (\s*%r\d+), [^;]*;", r"mov.b32 \1, 0;", 0),
    ],
    ids=[
        "first barrier",
        "second barrier",
        "first warp barrier",
        "second warp barrier",
        "misaligned",
        "shifted",
        "unclamped",
        "lost",
    ],
)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Region(20, 260, "f32")
    x, w, extras = region.operands(20, 0.9)
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        assert_near(emulate(kernels, "t32", x, w, extras, ptx=broken), region.reference(x, w, extras))


@pytest.mark.parametrize(("element", "capability"), [("f32", 80), ("f32", 90), ("f32", 100), ("bf16", 80), ("f16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    kernels = compiled(Region(768, 768, element, ("bias", "gelu")), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    for kernel in usage.values():
        assert kernel.registers <= 128 and kernel.spilled <= 48
    for launch in kernels.launches.values():
        assert launch.shared <= 99 * 1024  # of every architecture since Turing, the least that a block can have


def test_memory_is_read_and_written_16_bytes_at_once() -> None:
    ptx = compiled(Region(768, 768, "f32", ("bias", "gelu")), SCHEDULE).ptx
    widest = ptx[: ptx.rindex("region_t64(")]
    assert "ld.global.nc.v4.b32" in widest and "st.global.v4.b32" in widest and "ld.shared.v4.b32" in widest
    assert no_generic_access(ptx)


def test_what_has_no_such_kernel() -> None:
    with pytest.raises(CompileError, match="no gpu-kblock schedule"):
        pipelines.plan(Region(8, 8, "f64").text(), SCHEDULE, gpu_pipelines.WARP_BITS)


def test_instructions_of_blackwell_compute_the_same() -> None:
    """For sm_100, LLVM pairs up multiply-adds of f32."""
    region = Region(20, 132, "f32", ("bias", "gelu"))
    x, w, extras = region.operands(33)
    kernels = compiled(region, SCHEDULE, 100)
    assert "fma.rn.f32x2" in kernels.ptx
    assert_near(emulate(kernels, "t64", x, w, extras), region.reference(x, w, extras))
