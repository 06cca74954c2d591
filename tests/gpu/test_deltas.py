"""The product with one to eight tokens that streams a weight of 16 bits, run in the emulator and assembled by NVIDIA."""

import re

import pytest
import torch

from gossamer.backend.devices.cuda_cost import EXPECTED, Roofline
from gossamer.dialects.errors import CompileError
from gossamer.dialects.gpu_packings import Deltas
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import GPU_FAMILIES
from gossamer.runtime.packing import pack
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.contracts import Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-deltas"
VARIANTS = ("t8", "t4", "t2", "t1")
HALF, TENTH = 0.5, 0.1  # densities for which distances take 4 bits and 8


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("density", [HALF, TENTH])
@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_with_an_epilogue(element: str, density: float, variant: str) -> None:
    region = Region(40, 700, element, ("bias", "gelu"), density=density)
    x, w, extras = region.operands(3, density)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 1, 1), (3, 33, 2), (33, 129, 5), (17, 602, 9)])
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    region = Region(m, k, "f16", ("residual",), density=HALF)
    x, w, extras = region.operands(tokens)
    kernels = compiled(region, SCHEDULE)
    for variant in kernels.launches:
        assert_near(emulate(kernels, variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("tokens", range(1, 9))
def test_all_numbers_of_tokens_that_it_is_for(tokens: int) -> None:
    region = Region(20, 300, "bf16", density=HALF)
    x, w, extras = region.operands(tokens, HALF)
    variant = next(f"t{count}" for count in (1, 2, 4, 8) if count >= tokens)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


def test_the_reference_schedule_computes_the_same() -> None:
    region = Region(20, 300, "bf16", ("bias",), density=HALF)
    x, w, extras = region.operands(2, HALF)
    reference = compile_region(region.text(), schedule="reference")
    (stored,) = (format for format in reference.formats if format is not None)
    expected = torch.empty(2, region.m, dtype=region.dtype)
    reference([x, pack(w, stored), *extras], expected)
    assert_near(emulate(compiled(region, SCHEDULE), "t2", x, w, extras), expected.double())


def test_a_weight_that_is_stored_transposed() -> None:
    region = Region(33, 129, "f16", ("bias",), transposed=True, density=HALF)
    x, w, extras = region.operands(3)
    assert_near(emulate(compiled(region, SCHEDULE), "t4", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density: float) -> None:
    region = Region(9, 300, "f16", density=HALF)
    x, w, extras = region.operands(3, density)
    assert_near(emulate(compiled(region, SCHEDULE), "t4", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("hint", [HALF, TENTH])
def test_gaps_that_no_distance_crosses_and_rows_of_all_lengths(hint: float) -> None:
    region = Region(37, 900, "f16", density=hint)
    x, w, extras = region.operands(2, 0.3)
    w[::3] = 0  # empty rows
    w[1, 1:899] = 0
    w[2, 16], w[2, :16], w[2, 17:] = 1, 0, 0
    w[4] = 1  # a full row
    assert_near(emulate(compiled(region, SCHEDULE), "t2", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("hint", [HALF, TENTH])
@pytest.mark.parametrize("far", [torch.inf, -torch.inf, torch.nan])
def test_infinity_and_nan_reach_the_results_that_depend_on_them_only(far: float, hint: float) -> None:
    """Neither the zeros that cross gaps nor those at the ends of rows meet it."""
    region = Region(6, 700, "f16", density=hint)
    x, w, extras = region.operands(2, 0.01)
    x[0, 0], x[0, 15], x[0, 255], x[0, 699] = far, far, far, far
    w[:, [0, 15, 255, 699]] = 0
    w[3, 15] = 1
    result = emulate(compiled(region, SCHEDULE), "t2", x, w, extras)
    assert (~result.isfinite()).nonzero().tolist() == [[0, 3]]
    assert torch.equal(result[0, 3], torch.tensor(far).half()) or far != far


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    region = Region(20, 700, "f16", ("bias",), density=HALF)
    x, w, extras = region.operands(2, HALF)
    assert_near(emulate(compiled(region, SCHEDULE), "t2", x, w, extras, seed=seed), region.reference(x, w, extras))


FAULTS = {
    "barrier after x": (r"bar\.sync\s+0;", "", 0),
    "barrier before the sums": (r"bar\.sync\s+0;", "", 1),
    "the distance of another entry": (r"dp4a\.u32\.u32([^;]*), %r\d+;", r"dp4a.u32.u32\1, 0;", 5),
    "values of other lanes": (r"(ld\.global\.nc\.v4\.b32[^\[]*\[%rd\d+)\+512\]", r"\1+496]", 0),
    "a stored zero met": (r"selp\.b64 (\s*%rd\d+), \d+, (%rd\d+), %p\d+;", r"mov.b64 \1, \2;", 15),
    "one lane of two": (r"shfl\.sync\.bfly\.b32 (\s*%r\d+), (%r\d+)[^;]*;", r"mov.b32 \1, 0;", 0),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Region(20, 700, "f16", density=HALF)
    x, w, extras = region.operands(1, HALF)
    w[:, 400:], w[:, 399], w[:, 698] = 0, 1, 1
    x[0, 414:690:15] = torch.inf  # where zeros cross the gap
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number, kernels.ptx.index("region_t1("))
    with pytest.raises((Fault, AssertionError)):
        result = emulate(kernels, "t1", x, w, extras, ptx=broken, seed=0)
        assert_near(result, region.reference(x[:, x[0].isfinite()], w[:, x[0].isfinite()], extras))


@pytest.mark.parametrize(("element", "capability"), [("bf16", 80), ("bf16", 90), ("bf16", 100), ("f16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    kernels = compiled(Region(4096, 4096, element, ("bias", "gelu"), density=HALF), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 64 and kernel.spilled == 0 for kernel in usage.values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())
    assert no_generic_access(kernels.ptx)


def test_one_token_takes_a_dozen_instructions_a_nonzero_and_reads_16_bytes_at_once() -> None:
    ptx = compiled(Region(4096, 4096, "f16", density=HALF), SCHEDULE).ptx
    loop = max(re.findall(r"\$L__BB\d+_\d+:\n((?:\t[^$\n]*\n)+)\t@%p\d+ bra", ptx[ptx.index("region_t1(") :]), key=len)
    assert loop.count("\n") <= 12 * Deltas.ENTRIES
    assert loop.count("dp4a.u32.u32") == loop.count("fma.rn.f32") == loop.count("ld.shared.b16") == Deltas.ENTRIES
    assert loop.count("ld.global.nc.v4.b32") == 2 and loop.count("ld.global") == 3


def test_a_long_row_of_x_takes_fewer_tokens_at_once() -> None:
    launches = compiled(Region(16, 11008, "f16", density=HALF), SCHEDULE).launches
    assert set(launches) == {"t4", "t2", "t1"}


@pytest.mark.parametrize(("density", "most"), [(0.5, 2.6), (0.2, 2.75), (0.1, 3.25)])
def test_bytes_of_a_nonzero(density: float, most: float) -> None:
    """Dense, they are 4, 10 and 20."""
    matrix = Matrix(512, 4096, 1, "f16", gpu_pipelines.WARP_BITS, density)
    family = GPU_FAMILIES[SCHEDULE]
    stored = family.stores(matrix)
    assert isinstance(stored, Deltas)
    w = torch.randn(512, 4096).half() * (torch.rand(512, 4096) < density)
    nonzeros = int(torch.count_nonzero(w))
    found = sum(array.nbytes for array in pack(w, stored).components) / nonzeros
    assert found <= most
    assert family.read(matrix) / matrix.nonzeros == pytest.approx(found, rel=0.08)


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize(("density", "gain"), [(0.5, 1.2), (0.2, 2.5)])
def test_the_model_takes_it_for_decoding(density: float, gain: float, tokens: int) -> None:
    """On a GPU with the figures of an H100, of which nothing was measured."""
    model = Roofline.with_peaks((9, 0), 132 * 1755.0, 3.35e6, EXPECTED)
    for rows, columns in ((11008, 4096), (4096, 11008)):
        matrix = Matrix(rows, columns, 1, "f16", gpu_pipelines.WARP_BITS, density)
        assert model.predict(matrix, tokens, False).schedule == SCHEDULE
        assert model.dense_us(matrix, tokens, False) > gain * model.sparse_us(SCHEDULE, matrix, tokens)
        assert model.predict(matrix, 16, False).schedule != SCHEDULE


def test_the_packing_says_where_each_nonzero_lies() -> None:
    w = torch.zeros(17, 40)
    w[1, 3], w[1, 5], w[1, 39] = 1, 2, 3
    w[16, 0] = 4
    packed = pack(w, Deltas(1, 4))
    rows, positions, starts, deltas, values = packed.components
    assert rows.tolist() == [1, 16, 0, *range(2, 16), *[17] * 15], "by length"
    assert positions.tolist() == [0, 1, 2], "a step each"
    assert values[:8].tolist() == [1, 2, 0, 0, 3, 0, 0, 0], "34 columns apart: two zeros between"
    assert deltas[:1].view(torch.uint8).tolist() == [3 | 4 << 4, 2, 15, 15]
    assert starts.view(2, 8, 32)[0, 7, :2].tolist() == [0, 39], "the last warp has the step, the second lane goes on"
    assert torch.equal(packed.unpack(), w)


@pytest.mark.parametrize("region", [Region(32, 32, "f32"), Region(32, 60_000, "bf16")])
def test_what_has_no_such_kernel(region: Region) -> None:
    with pytest.raises(CompileError, match="no gpu-deltas schedule"):
        pipelines.plan(region.text(), SCHEDULE, gpu_pipelines.WARP_BITS)
