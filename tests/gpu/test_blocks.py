"""The product of block CSR on tensor cores, run in the emulator and assembled by NVIDIA's assembler."""

import re

import pytest
import torch

from gossamer.dialects.errors import CompileError
from gossamer.passes import gpu_pipelines, pipelines
from tests.contracts import Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.int8_region import Int8Region
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-blocks"
VARIANTS = ("t128", "t32")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128), (64, 16)])
def test_blocks_of_every_size(block: tuple[int, int], variant: str) -> None:
    region = Region(2 * block[0], 3 * block[1], "bf16", ("bias",), block=block)
    x, w, extras = region.operands(20, 0.6)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128), (64, 16)])
def test_integers_are_summed_exactly(block: tuple[int, int], variant: str) -> None:
    region = Int8Region(2 * block[0], 3 * block[1], block=block)
    x, w, extras = region.operands(20, 0.6)
    assert torch.equal(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("region", "tokens"),
    [
        (Int8Region(1, 16, bare=True, block=(16, 16)), 1),
        (Int8Region(33, 144, "bf16", block=(32, 32)), 31),
        (Int8Region(70, 400, "f16", block=(32, 32), transposed=True), 129),
    ],
)
def test_integers_of_shapes_that_fit_no_block(region: Int8Region, tokens: int) -> None:
    x, w, extras = region.operands(tokens, 0.7)
    for seed, variant in enumerate(VARIANTS):
        result = emulate(compiled(region, SCHEDULE), variant, x, w, extras, seed=seed)
        assert torch.equal(result.view(tokens, region.m), region.reference(x, w, extras))


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 8, 1), (33, 72, 31), (70, 200, 129)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_that_fit_no_block(m: int, k: int, tokens: int, variant: str) -> None:
    region = Region(m, k, "f16", ("bias", "residual", "relu"), block=(32, 32))
    x, w, extras = region.operands(tokens, 0.7)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


def test_a_weight_that_is_stored_transposed() -> None:
    region = Region(48, 64, "bf16", transposed=True, block=(16, 32))
    x, w, extras = region.operands(9, 0.5)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density: float) -> None:
    region = Region(64, 256, "bf16", block=(32, 32))
    x, w, extras = region.operands(5, density)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras), region.reference(x, w, extras))


def test_infinity_stays_out_of_blocks_that_are_not_stored() -> None:
    region = Region(64, 96, "bf16", block=(32, 32))
    x, w, extras = region.operands(4, 1.0)
    w[:, :32] = 0
    w[:32, 64:] = 0
    x[0, 3], x[1, 95] = torch.inf, torch.nan
    result = emulate(compiled(region, SCHEDULE), "t32", x, w, extras)
    assert result[0].isfinite().all() and result[1, :32].isfinite().all() and result[1, 32:].isnan().all()


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    region = Region(32, 256, "bf16", ("bias",), block=(32, 32))
    x, w, extras = region.operands(20, 1.0)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras, seed=seed), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("pattern", "replacement", "number"),
    [
        (r"bar\.sync\s+0;", "", 0),
        (r"cp\.async\.wait_group\s+1;", "", 0),
        (r"cp\.async\.wait_group\s+1;", "cp.async.wait_group 2;", 0),
        (r"(cp\.async\.cg[^\[]*\[%rd\d+)([^\]]*\])", r"\1+8]", 0),
        (r"(ldmatrix[^\[]*\[%rd\d+)[^\]]*\]", r"\1+16]", 1),
        (r"xor\.b64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
        (r"(ldmatrix\.sync\.aligned\.m8n8\.x4)", r"\1.trans", 0),
        (r"(, \[%rd\d+[^\]]*\], 16), %r\d+;", r"\1;", -8),  # of the last panel, the first rows of x
        (r"setp\.(lt|ge|gt|le)\.u64", r"setp.ne.u64", -1),
    ],
    ids=[
        "no barrier",
        "no wait",
        "short wait",
        "misaligned",
        "shifted",
        "not swizzled",
        "transposed",
        "not cleared",
        "unbounded",
    ],
)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Region(40, 264, "bf16", block=(32, 32))
    x, w, extras = region.operands(20, 1.0)
    x[0, -8], w[:, -8] = torch.inf, 1  # what lies beyond K must not reach the zeros that fill up the last block
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        check(emulate(kernels, "t32", x, w, extras, ptx=broken), region.reference(x, w, extras))
    check(emulate(kernels, "t32", x, w, extras), region.reference(x, w, extras))


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isinf(result[0]).all() and torch.isinf(expected[0]).all()
    assert_near(result[1:], expected[1:])


@pytest.mark.parametrize(("size", "capability"), [(64, 80), (16, 90), (32, 90), (64, 90), (128, 90), (64, 100)])
def test_the_assembler_takes_the_kernel(size: int, capability: int) -> None:
    kernels = compiled(Region(768, 768, "bf16", ("bias", "gelu"), block=(size, size)), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 200 and kernel.spilled <= 16 for kernel in usage.values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())


@pytest.mark.parametrize(("size", "capability"), [(64, 80), (16, 90), (64, 90), (128, 90), (64, 100)])
def test_the_assembler_takes_the_kernel_of_integers(size: int, capability: int) -> None:
    kernels = compiled(Int8Region(768, 768, block=(size, size)), SCHEDULE, capability)
    assert all(kernel.registers <= 200 and kernel.spilled <= 16 for kernel in assembled(kernels.ptx, capability).values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())
    assert "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32" in kernels.ptx and "f32.bf16" not in kernels.ptx
    assert no_generic_access(kernels.ptx)


@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_a_warp_multiplies_by_tensor_cores_and_copies_16_bytes_at_once(element: str) -> None:
    ptx = compiled(Region(768, 768, element, ("bias", "gelu"), block=(64, 64)), SCHEDULE).ptx
    widest = ptx[: ptx.rindex("region_t32(")]
    assert widest.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32") == 4 * 4 * 4
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", widest)) == 4 * (4 + 2)
    assert "cp.async.cg.shared.global" in widest and "st.global.v4.b32" in widest
    assert no_generic_access(ptx)


@pytest.mark.parametrize(
    "region",
    [
        Region(32, 32, "f32", block=(32, 32)),
        Region(32, 32, "bf16"),
        Region(32, 36, "bf16", block=(32, 32)),
        Int8Region(32, 40, block=(32, 32)),
    ],
)
def test_what_has_no_such_kernel(region: Region | Int8Region) -> None:
    with pytest.raises(CompileError, match="no gpu-blocks schedule"):
        pipelines.plan(region.text(), SCHEDULE, gpu_pipelines.WARP_BITS)
