"""The product of int8 that loads a sparse weight and multiplies a dense one, run in the emulator and assembled by NVIDIA."""

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import CompileError
from gossamer.dialects.gpu_packings import QuadFragments
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.packing import Packed, pack
from tests.contracts import Region
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.int8_region import Int8Region
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-quads"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


def check(region: Int8Region, variant: str, tokens: int, density: float = 0.3, seed: int | None = None) -> None:
    x, w, extras = region.operands(tokens, density)
    result = emulate(compiled(region, SCHEDULE), variant, x, w, extras, seed=seed)
    assert torch.equal(result.view(tokens, region.m), region.reference(x, w, extras))


@pytest.mark.parametrize(("element", "variant"), [("f32", "t16"), ("bf16", "t16"), ("f16", "t8")])
def test_a_layer_with_an_epilogue(element: str, variant: str) -> None:
    """More panels along K than warps, so that each has several."""
    check(Int8Region(40, 1744, element), variant, 11)


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 1, 1), (3, 35, 2), (33, 70, 9), (34, 1092, 17), (65, 520, 16)])
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    """Rows of x begin at any byte, every second, fourth or eighth."""
    for variant in ("t16", "t8"):
        check(Int8Region(m, k, bare=True), variant, tokens)


def test_a_weight_that_is_stored_transposed() -> None:
    check(Int8Region(48, 144, transposed=True), "t8", 3)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density: float) -> None:
    check(Int8Region(33, 208), "t8", 3, density)


def test_the_largest_sums_fit() -> None:
    region = Int8Region(2, 40_000, bare=True)
    for weight, value in ((-128, -128), (127, -128)):
        w, x = (torch.full((2, region.k), number, dtype=torch.int8) for number in (weight, value))
        assert emulate(compiled(region, SCHEDULE), "t8", x, w, []).tolist() == [[float(region.k * weight * value)] * 2] * 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("k", [656, 655])
def test_any_order_of_warps(seed: int, k: int) -> None:
    check(Int8Region(20, k), "t8", 5, seed=seed)


FAULTS = {
    "no wait": (r"cp\.async\.wait_group\s+2;", "", 0),
    "no warp barrier after the wait": (r"bar\.warp\.sync\s+-1;", "", 0),
    "no warp barrier before a slot is filled again": (r"bar\.warp\.sync\s+-1;", "", 1),
    "first barrier": (r"bar\.sync\s+0;", "", 0),
    "second barrier": (r"bar\.sync\s+0;", "", 1),
    "not swizzled": (r"xor\.b64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
    "the lane's own bit counted": (r"popc\.b32 (\s*%r\d+), %r\d+;", r"mov.b32 \1, 1;", 3),
    "other masks": (r"(ld\.shared\.v4\.b32[^\[]*\[%rd\d+\+\d+)\]", r"\g<1>0]", 0),
    "shifted": (r"(ldmatrix[^\[]*\[%rd\d+)[^\]]*\]", r"\1+64]", 0),
    "zeros that are none": (r"selp\.b32 (\s*%r\d+), 0, (%r\d+), %p\d+;", r"mov.b32 \1, \2;", 2),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Int8Region(20, 2192)
    x, w, extras = region.operands(5, 0.2)
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number, kernels.ptx.index("region_t8("))
    with pytest.raises((Fault, AssertionError)):
        result = emulate(kernels, "t8", x, w, extras, ptx=broken, seed=0)
        assert torch.equal(result, region.reference(x, w, extras))


@pytest.mark.parametrize(("element", "capability"), [("f32", 80), ("f32", 90), ("f32", 100), ("bf16", 90), ("f16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    kernels = compiled(Int8Region(4096, 4096, element), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 80 and kernel.spilled == 0 for kernel in usage.values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())
    assert kernels.ptx.count(".minnctapersm 3") == 2, "for 3 blocks of a multiprocessor at once"
    assert kernels.ptx.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32") == 4 * (2 + 1)
    assert kernels.ptx.count("popc.b32") == 2 * 4 * 4 and "cp.async.cg.shared.global" in kernels.ptx
    assert no_generic_access(kernels.ptx)


@pytest.mark.parametrize("k", [4095, 4094, 4092, 4088])
def test_rows_of_any_length_assemble(k: int) -> None:
    kernels = compiled(Int8Region(4096, k), SCHEDULE)
    assert all(kernel.spilled == 0 for kernel in assembled(kernels.ptx, 90).values())
    assert ("cp.async.ca.shared.global" in kernels.ptx) is (k % 4 == 0)


def test_the_packing_says_where_each_nonzero_lies() -> None:
    w = torch.zeros(33, 66, dtype=torch.int8)
    w[0, 1], w[0, 60], w[7, 12], w[9, 18] = 1, 2, 3, 4
    w[32, 65] = 5
    packed = pack(w, QuadFragments(1))
    positions, masks, offsets, values = packed.components
    assert positions.tolist() == [0, 1, 1, 1, 2], "in pieces of 4 quads, panel by panel"
    assert {number: mask & 0xFFFFFFFF for number, mask in enumerate(masks.tolist()) if mask} == {
        0: 1 | 1 << 31,
        3: 1 << 4,
        6: 1 << 3,
        48: 1,
    }
    assert offsets[:8].tolist() == [0, 2, 2, 2, 3, 3, 3, 4]
    assert values.view(-1, 4).tolist()[:4] == [[0, 1, 0, 0], [3, 0, 0, 0], [0, 0, 4, 0], [2, 0, 0, 0]]
    assert values.view(-1, 4).tolist()[4:] == [[0, 5, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    assert torch.equal(packed.unpack(), w)


def test_new_values_in_the_same_quads() -> None:
    w = torch.randint(1, 128, (40, 70), dtype=torch.int8) * (torch.rand(40, 70) < 0.2)
    packed = pack(w, QuadFragments(1)).compact()
    assert_refreshes(packed, w.roll(1, 0), False)
    assert_refreshes(packed, -w, True)
    within = w.view(40, 35, 2).flip(2).reshape(40, 70)  # moves nothing out of its quad
    assert_refreshes(packed, within, True)


def assert_refreshes(packed: Packed, new: Tensor, fits: bool) -> None:
    assert packed.refresh(new) is fits
    assert torch.equal(packed.unpack(), new) is fits


def test_floats_have_no_such_kernel() -> None:
    with pytest.raises(CompileError, match="no gpu-quads schedule"):
        pipelines.plan(Region(32, 64, "bf16").text(), SCHEDULE, gpu_pipelines.WARP_BITS)
    with pytest.raises(CompileError, match="no gpu-expand schedule"):
        pipelines.plan(Int8Region(32, 64).text(), "gpu-expand", gpu_pipelines.WARP_BITS)
