"""Kernels against f64 and against each other: shapes, types, epilogues, threads and memory bounds."""

import ctypes
import mmap
import resource
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.dialects.errors import CompileError
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import host
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.contracts import EPILOGUES, STEPS, Region, assert_near


def able(region: Region, schedule: str) -> bool:
    """Whether this machine has the instructions that the schedule is made of."""
    target = host()
    matrix = Matrix(region.m, region.k, 1, region.element, target.vector_bits, block=(4, 4), features=target.instructions)
    return schedule not in ("lookup", "planes") or FAMILIES[schedule].storage(matrix) is not None


ALL = ("lookup", "planes", "broadcast", "block", "blockvec", "rowpairs", "reference")
SCHEDULES = tuple(schedule for schedule in ALL if able(Region(16, 16), schedule))
BLOCKS = {"block": (4, 2), "blockvec": (4, 4)}
"""What schedules for blocks are told of weights, whether it is so or not."""


@pytest.fixture(autouse=True)
def on_its_own() -> Iterator[None]:
    """With the number of threads restored."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def run(kernel: RegionKernel, x: Tensor, w: Tensor, extras: list[Tensor], m: int) -> Tensor:
    """Call a kernel on a packed w; the output starts as NaN, so that what is not written shows."""
    out = torch.full((x.shape[0], m), torch.nan, dtype=x.dtype)
    packed = kernel.formats[1]
    assert packed is not None
    kernel([x, pack(w, packed), *extras], out)
    return out


def suited(region: Region, schedule: str) -> Region:
    """The region with the hints that the schedule needs."""
    return replace(region, block=BLOCKS[schedule]) if schedule in BLOCKS and region.block is None else region


def check(region: Region, schedule: str, tokens: int, density: float = 0.3) -> None:
    if not able(region, schedule):
        pytest.skip(f"this machine has no instructions for the {schedule} schedule in {region.element}")
    region = suited(region, schedule)
    x, w, extras = region.operands(tokens, density)
    kernel = compiled(region.text(), schedule)
    assert kernel.schedule == schedule
    assert_near(run(kernel, x, w, extras, region.m), region.reference(x, w, extras))


@lru_cache(8)
def compiled(text: str, schedule: str) -> RegionKernel:
    """Kept: nobody else keeps a kernel for the next number of tokens."""
    return compile_region(text, schedule=schedule)


SHAPES = {
    **dict.fromkeys([Region(1, 1), Region(16, 16), Region(97, 101)], (1, 2, 15, 16, 17, 33, 64, 65, 127, 200)),
    **dict.fromkeys([Region(1, 200), Region(199, 1), Region(17, 31)], (1, 31, 64, 81)),
    Region(40, 79, "f64", ("relu_backward",)): (1, 16, 50, 129),
    **dict.fromkeys([Region(40, 79, element, ("bias", "gelu", "residual")) for element in ("f16", "bf16")], (1, 16, 50, 129)),
    Region(33, 400): (1, 17, 63, 100),  # several blocks of columns
    Region(1100, 40): (3, 70),  # more rows than a panel holds
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("region", SHAPES, ids=lambda region: f"{region.m}x{region.k} {region.element}")
def test_any_shape_density_and_number_of_threads(region: Region, schedule: str) -> None:
    for count, t in enumerate(SHAPES[region]):
        torch.set_num_threads(1 + count % 2)
        check(region, schedule, t, density=(0.3, 0.05, 1.0, 0.0)[count % 4])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=" ".join)
def test_each_epilogue(epilogue: tuple[str, ...], schedule: str) -> None:
    for tokens in (0, 1, 19, 70):
        check(Region(27, 40, epilogue=epilogue), schedule, tokens)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_two_results(element: str, schedule: str) -> None:
    """What comes after the bias, and the bias by itself."""
    region = suited(Region(27, 40, element, ("bias", "gelu", "residual")), schedule)
    if not able(region, schedule):
        pytest.skip(f"this machine has no instructions for the {schedule} schedule in {element}")
    y = f"tensor<?x27x{element}>"
    text = (
        region.text()
        .replace(f"-> {y} {{\n", f"-> ({y}, {y}) {{\n", 1)
        .replace(f"return %y2 : {y}", f"return %y2, %y0 : {y}, {y}")
    )
    kernel = compiled(text, schedule)
    packed = kernel.formats[1]
    assert kernel.schedule == schedule and packed is not None
    for tokens in (1, 19, 70):
        x, w, extras = region.operands(tokens)
        outs = [torch.full((tokens, 27), torch.nan, dtype=x.dtype) for _ in range(2)]
        kernel([x, pack(w, packed), *extras], outs)
        assert_near(outs[0], region.reference(x, w, extras))
        assert_near(outs[1], replace(region, epilogue=("bias",)).reference(x, w, extras))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_stored_as_k_by_m(schedule: str) -> None:
    for tokens in (1, 40):
        check(Region(27, 210, "bf16", ("bias", "silu"), transposed=True), schedule, tokens)


@settings(max_examples=20, derandomize=True)
@given(
    region=st.builds(
        Region,
        m=st.integers(1, 80),
        k=st.integers(1, 220),
        element=st.sampled_from(["f32", "f64", "f16", "bf16"]),
        epilogue=st.lists(st.sampled_from(sorted(set(STEPS) - {"relu_backward"})), max_size=3, unique=True).map(tuple),
        transposed=st.booleans(),
    ),
    tokens=st.integers(1, 150),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    schedule=st.sampled_from(SCHEDULES),
)
def test_regions_at_random(region: Region, tokens: int, density: float, schedule: str) -> None:
    """The schedules agree with f64, whatever the region."""
    if able(region, schedule):
        check(region, schedule, tokens, density)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinity_and_nan_reach_the_results_that_use_them_and_no_others(value: float, schedule: str) -> None:
    """A schedule uses what it stores: the nonzeros, the zeros of its blocks, those that fill up a row of a pair."""
    region = suited(Region(33, 50), schedule)
    x, w, _ = region.operands(20)
    w[1] = w[12:16] = w[:, 40:] = 0  # a row whose neighbour has nonzeros, a row of blocks, columns
    w[0, 49] = 1
    x[7, 11] = x[19, 49] = value
    kernel = compile_region(region.text(), schedule=schedule)
    y = run(kernel, x, w, [], region.m)
    needed = w != 0
    stored = needed.clone()
    if schedule in BLOCKS:
        rows, columns = BLOCKS[schedule]
        cut = (
            torch.nn.functional.pad(needed, (0, -50 % columns, 0, -33 % rows))
            .unflatten(0, (-1, rows))
            .unflatten(2, (-1, columns))
        )
        stored = cut.any(3, keepdim=True).any(1, keepdim=True).expand_as(cut).flatten(2).flatten(0, 1)[:33, :50]
    if schedule == "rowpairs":
        stored[1, 49] = stored[1, 11] = True
    touched = ~torch.isfinite(y)
    assert not touched[:7].any() and not touched[8:19].any()
    for token, column in ((7, 11), (19, 49)):
        assert needed[:, column].any() and not stored[:, column].all()
        assert (needed[:, column] <= touched[token]).all() and (touched[token] <= stored[:, column]).all()
    clean = torch.where(torch.isfinite(x), x, 0)
    assert_near(y[~touched], region.reference(clean, w, [])[~touched])


def test_the_schedules_agree_to_the_last_bit_where_sums_are_exact() -> None:
    region = Region(50, 300)
    x, w, _ = region.operands(45)
    results = [run(compile_region(suited(region, s).text(), schedule=s), x, w, [], region.m) for s in SCHEDULES]
    assert all(torch.equal(r, results[0]) for r in results)


def test_the_reference_frees_what_it_allocates() -> None:
    region = Region(512, 40, "bf16", ("bias", "gelu"))
    kernel = compile_region(region.text(), schedule="reference")
    x, w, extras = region.operands(200)
    assert kernel.formats[1] is not None
    operands: list[Tensor | Packed] = [x, pack(w, kernel.formats[1]), *extras]
    out = torch.empty(200, 512, dtype=region.dtype)
    kernel(operands, out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        kernel(operands, out)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; the sums alone take 400 a call


# Blocks


BLOCKED = [
    *(Region(97, 101, block=block) for block in ((1, 1), (1, 40), (16, 1), (3, 5), (32, 32), (7, 11))),
    *(Region(64, 96, block=block) for block in ((16, 16), (1, 16))),
    Region(70, 140, "f32", ("bias",), transposed=True, block=(2, 8)),
    Region(40, 70, "f64", ("bias",), block=(8, 2)),
]


@pytest.mark.parametrize("region", BLOCKED, ids=lambda r: f"{r.m}x{r.k} {r.element} {r.block[0]}x{r.block[1]}")
def test_blocks_of_any_size(region: Region) -> None:
    """Sizes that are multiples of the block's and sizes that are not."""
    for tokens in (1, 5, 70):
        check(region, "block", tokens)
        if fits_vectors(region):
            check(region, "blockvec", tokens)


@pytest.mark.parametrize("schedule", ["broadcast", "block", "blockvec", "rowpairs"])
def test_threads_share_the_rows_and_the_tiles_of_more_than_a_little_work(schedule: str) -> None:
    for threads, tokens in ((2, 5), (2, 70), (3, 200)):
        torch.set_num_threads(threads)
        check(Region(390, 300, epilogue=("bias",)), schedule, tokens, density=0.8)


def test_more_rows_and_columns_than_stay_in_a_cache() -> None:
    for schedule in ("block", "rowpairs"):
        check(Region(1100, 900), schedule, 70, density=0.05)


@pytest.mark.skipif(host().vector_bits == 128, reason="they fill vectors of 128 bits")
@pytest.mark.parametrize("block", [(2, 2), (4, 1), (3, 3)])
def test_blocks_that_do_not_fill_vectors(block: tuple[int, int]) -> None:
    assert not fits_vectors(Region(32, 32, block=block))


def fits_vectors(region: Region) -> bool:
    """Whether the schedule "blockvec" takes the region's blocks."""
    try:
        compile_region(region.text(), schedule="blockvec")
    except CompileError as error:
        assert "no blockvec schedule" in str(error)
        return False
    return True


# Bounds of memory


class Guarded:
    """Memory that ends where a page begins that nobody may touch, and begins with a page that nobody may touch."""

    def __init__(self, like: Tensor) -> None:
        page, size = mmap.PAGESIZE, like.numel() * like.element_size()
        inner = -(-max(size, 1) // page) * page
        self._map = mmap.mmap(-1, inner + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (start, start + page + inner):
            assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), page, 0) == 0
        flat = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=page + inner - size)
        self.tensor = flat.view(like.shape)
        self.tensor.copy_(like)
        self._before = torch.frombuffer(self._map, dtype=torch.uint8, count=inner - size, offset=page) if size < inner else None
        if self._before is not None:
            self._before.fill_(0xA5)

    def untouched(self) -> bool:
        """Whether nothing was written between the first page and the tensor."""
        return self._before is None or bool((self._before == 0xA5).all())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_touched_outside_of_the_tensors(schedule: str) -> None:
    """A read or a write past the end of any operand or of the output would end this process."""
    region = suited(Region(35, 51, "f32", ("bias", "residual", "token_scale")), schedule)
    kernel = compile_region(region.text(), schedule=schedule)
    format_ = kernel.formats[1]
    assert format_ is not None
    for tokens in (1, 3, 18, 70):
        x, w, extras = region.operands(tokens)
        packed = pack(w, format_)
        parts = [Guarded(t) for t in (x, *packed.components, *extras, torch.empty(tokens, region.m, dtype=region.dtype))]
        inside = Packed(
            packed.format, packed.shape, tuple(p.tensor for p in parts[1 : 1 + len(packed.components)]), packed.source
        )
        operands: list[Tensor | Packed] = [parts[0].tensor, inside, *(p.tensor for p in parts[1 + len(packed.components) : -1])]
        kernel(operands, parts[-1].tensor)
        assert_near(parts[-1].tensor, region.reference(x, w, extras))
        assert all(p.untouched() for p in parts)
