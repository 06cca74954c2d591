"""The product that loads a sparse weight and multiplies a dense one, run in the emulator and assembled by NVIDIA."""

import pytest
import torch

from gossamer.dialects.errors import CompileError
from gossamer.dialects.gpu_packings import Fragments
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.packing import pack
from tests.contracts import Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-expand"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("element", "variant"), [("bf16", "t16"), ("f16", "t8")])
def test_a_layer_with_an_epilogue(element: str, variant: str) -> None:
    """More panels along K than warps, so that each has several."""
    region = Region(40, 872, element, ("bias", "relu"))
    x, w, extras = region.operands(11)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 8, 1), (63, 72, 17), (34, 136, 8)])
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    region = Region(m, k, "bf16", ("residual",))
    x, w, extras = region.operands(tokens, 0.8)
    kernels = compiled(region, SCHEDULE)
    for variant in kernels.launches:
        assert_near(emulate(kernels, variant, x, w, extras), region.reference(x, w, extras))


def test_a_weight_that_is_stored_transposed() -> None:
    region = Region(48, 64, "bf16", transposed=True)
    x, w, extras = region.operands(3)
    assert_near(emulate(compiled(region, SCHEDULE), "t8", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density: float) -> None:
    region = Region(33, 96, "bf16")
    x, w, extras = region.operands(3, density)
    assert_near(emulate(compiled(region, SCHEDULE), "t8", x, w, extras), region.reference(x, w, extras))


def test_infinity_is_multiplied_as_in_the_dense_product() -> None:
    region = Region(33, 72, "bf16")
    x, w, extras = region.operands(3)
    x[1, 71], w[:, 71], w[7, 71] = torch.inf, 0, 1
    result = emulate(compiled(region, SCHEDULE), "t8", x, w, extras)
    assert torch.isinf(result).nonzero().tolist() == [[1, 7]]
    assert torch.isnan(result[1]).sum() == 32 and result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    region = Region(20, 328, "bf16", ("bias",))
    x, w, extras = region.operands(5)
    assert_near(emulate(compiled(region, SCHEDULE), "t8", x, w, extras, seed=seed), region.reference(x, w, extras))


FAULTS = {
    "no wait": (r"cp\.async\.wait_group\s+2;", "", 0),
    "no warp barrier after the wait": (r"bar\.warp\.sync\s+-1;", "", 0),
    "no warp barrier before a slot is filled again": (r"bar\.warp\.sync\s+-1;", "", 1),
    "first barrier": (r"bar\.sync\s+0;", "", 0),
    "second barrier": (r"bar\.sync\s+0;", "", 1),
    "not swizzled": (r"xor\.b64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
    "the lane's own bits counted": (r"popc\.b32 (\s*%r\d+), %r\d+;", r"mov.b32 \1, 1;", 3),
    "other masks": (r"(ld\.shared\.v4\.b32[^\[]*\[%rd\d+\+\d+)\]", r"\g<1>0]", 0),
    "shifted": (r"(ldmatrix[^\[]*\[%rd\d+)[^\]]*\]", r"\1+64]", 0),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Region(20, 1096, "bf16")
    x, w, extras = region.operands(5, 0.6)
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number, kernels.ptx.index("region_t8("))
    with pytest.raises((Fault, AssertionError)):
        result = emulate(kernels, "t8", x, w, extras, ptx=broken, seed=0)
        assert_near(result, region.reference(x, w, extras))


@pytest.mark.parametrize(("element", "capability"), [("bf16", 80), ("bf16", 90), ("bf16", 100), ("f16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    kernels = compiled(Region(4096, 4096, element, ("bias", "gelu")), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 80 and kernel.spilled == 0 for kernel in usage.values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())
    assert kernels.ptx.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32") == 4 * (2 + 1)
    assert kernels.ptx.count("popc.b32") == 2 * 4 * 4 and "cp.async.cg.shared.global" in kernels.ptx
    assert no_generic_access(kernels.ptx)


def test_the_packing_says_where_each_nonzero_lies() -> None:
    w = torch.zeros(33, 8)
    w[0, 0], w[0, 7], w[4, 1], w[9, 2] = 1, 2, 3, 4
    w[32, 5] = 5
    packed = pack(w, Fragments(1))
    positions, masks, offsets, values = packed.components
    assert positions.tolist() == [0, 1, 2], "in pieces of 8 values"
    assert masks[:8].tolist() == [0b1000_0001, 0b100_0000_0000, 0, 0, 0b10, 0, 0, 0], "upper and lower left, of both halves"
    assert offsets[:8].tolist() == [0, 2, 3, 3, 3, 4, 4, 4] and masks[32:34].tolist() == [0b10_0000, 0]
    assert values.tolist() == [1, 2, 4, 3, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]
    assert torch.equal(packed.unpack(), w)


@pytest.mark.parametrize("region", [Region(32, 32, "f32"), Region(32, 36, "bf16")])
def test_what_has_no_such_kernel(region: Region) -> None:
    with pytest.raises(CompileError, match="no gpu-expand schedule"):
        pipelines.plan(region.text(), SCHEDULE, gpu_pipelines.WARP_BITS)
