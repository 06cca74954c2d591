"""Kernels against f64 and against each other: shapes, types, epilogues, threads, memory bounds, and what they share."""

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from threading import Barrier

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime import region_kernel
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import host
from gossamer.sparsity.kernels import compile_kernel
from gossamer.sparsity.kernels.compile_kernel import compile_region
from tests.contracts import EPILOGUES, STEPS, Region, assert_near


def able(region: Region, schedule: str) -> bool:
    """Whether this machine has the instructions that the schedule is made of."""
    target = host()
    matrix = Matrix(region.m, region.k, 1, region.element, target.vector_bits, block=(4, 4), features=target.instructions)
    return schedule not in ("lookup", "planes", "bitmap") or FAMILIES[schedule].storage(matrix) is not None


ALL = ("kblock", "gather", "lookup", "planes", "bitmap", "broadcast", "block", "blockvec", "rowpairs", "reference")
SCHEDULES = tuple(schedule for schedule in ALL if able(Region(16, 16), schedule))
BLOCKS = {"block": (4, 2), "blockvec": (4, 4)}
"""What schedules for blocks are told of weights, whether it is so or not."""


@pytest.fixture(autouse=True)
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the cache on disk, and with the number of threads restored."""
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
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


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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


@pytest.mark.parametrize("schedule", ["kblock", "block", "blockvec", "rowpairs"])
def test_threads_share_the_rows_and_the_tiles_of_more_than_a_little_work(schedule: str) -> None:
    for threads, tokens in ((2, 5), (2, 70), (3, 200)):
        torch.set_num_threads(threads)
        check(Region(390, 300, epilogue=("bias",)), schedule, tokens, density=0.8)


def test_more_rows_and_columns_than_stay_in_a_cache() -> None:
    for schedule in ("block", "rowpairs"):
        check(Region(1100, 900), schedule, 70, density=0.05)


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


# What is shared


def test_regions_that_differ_in_their_hints_share_a_kernel() -> None:
    one = compile_region(Region(40, 79, density=0.1, tokens=1).text(), schedule="kblock")
    other = compile_region(Region(40, 79, density=0.15, tokens=128).text(), schedule="kblock")
    assert one is other


def test_a_density_that_wants_another_format_is_another_kernel() -> None:
    """So many columns that no first-level cache holds all of their x."""
    sparse, denser = (compile_region(Region(800, 3000, density=d).text(), schedule="kblock") for d in (0.05, 0.5))
    assert sparse.formats[1] != denser.formats[1]
    assert sparse.key != denser.key


def test_the_key_tells_apart_what_the_code_depends_on() -> None:
    regions = [Region(24, 40), Region(24, 41), Region(25, 40), Region(24, 40, "f64"), Region(24, 40, epilogue=("bias",))]
    keys = {compile_region(r.text(), schedule=s).key for r in regions for s in ("gather", "reference")}
    assert len(keys) == 2 * len(regions)


def test_regions_that_say_the_same_in_other_words_share_a_kernel() -> None:
    text = Region(24, 40, epilogue=("bias",)).text()
    renamed = text.replace("%y0", "%result").replace("#CSR", "#weight")
    assert renamed != text
    assert compile_region(text, schedule="gather") is compile_region(renamed, schedule="gather")


def test_code_comes_from_the_disk_in_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    region = Region(23, 45, epilogue=("bias", "relu"))
    for process in range(2):
        monkeypatch.setattr(compile_kernel, "_by_contract", {})
        monkeypatch.setattr(region_kernel, "_by_key", {})
        compiled.cache_clear()
        if process:
            monkeypatch.setattr(compile_kernel, "_machine_code", lambda *_: pytest.fail("compiled again"))
        check(region, "gather", 3)


def test_the_source_of_the_compiler_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Region(22, 45).text()
    before = compile_region(text, schedule="gather").key
    monkeypatch.setattr(compile_kernel, "compiler", lambda: "another compiler")
    monkeypatch.setattr(compile_kernel, "_by_contract", {})
    assert compile_region(text, schedule="gather").key != before


# Threads


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"reference"}))
def test_threads_call_one_kernel_at_once(schedule: str) -> None:
    region = suited(Region(97, 101, epilogue=("bias", "residual")), schedule)
    kernel = compile_region(region.text(), schedule=schedule)
    work = [region.operands(tokens) for tokens in (3, 65, 130, 20)]
    expected = [run(kernel, *operands, region.m) for operands in work]
    start = Barrier(len(work))

    def repeat(i: int) -> bool:
        torch.set_num_threads(1 + i % 2)
        start.wait()
        return all(torch.equal(run(kernel, *work[i], region.m), expected[i]) for _ in range(40))

    with ThreadPoolExecutor(len(work)) as threads:
        assert all(threads.map(repeat, range(len(work))))


def test_threads_compile_at_once() -> None:
    regions = [Region(21 + i // 2, 30, epilogue=("bias", "gelu")) for i in range(6)]
    start = Barrier(len(regions))

    def compiled(region: Region) -> RegionKernel:
        start.wait()
        return compile_region(region.text(), schedule="gather")

    with ThreadPoolExecutor(len(regions)) as threads:
        found = list(threads.map(compiled, regions))
    assert [found[i] is found[i + 1] for i in range(5)] == [True, False, True, False, True]
    for region, kernel in zip(regions, found, strict=True):
        x, w, extras = region.operands(4)
        assert_near(run(kernel, x, w, extras, region.m), region.reference(x, w, extras))


# What is refused, and what is done instead


def before_the_product(text: str) -> str:
    """A region that doubles x first, which is no epilogue."""
    double = """%x2 = linalg.generic {
        indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>],
        iterator_types = ["parallel", "parallel"]} ins(%x : tensor<?x40xf32>) outs(%x : tensor<?x40xf32>) {
      ^bb0(%a: f32, %o: f32):
        %double = arith.addf %a, %a : f32
        linalg.yield %double : f32
      } -> tensor<?x40xf32>
      %sums = linalg.matmul ins(%x2,"""
    return text.replace("%sums = linalg.matmul ins(%x,", double)


def turned_residual(text: str) -> str:
    """A region whose residual is stored as [m, T]."""
    text = text.replace("%e0: tensor<?x24xf32>", "%e0: tensor<24x?xf32>").replace(
        ", %e0 : tensor<?x24xf32>, tensor<?x24xf32>", ", %e0 : tensor<?x24xf32>, tensor<24x?xf32>"
    )
    same = "affine_map<(d0, d1) -> (d0, d1)>"
    return text.replace(f"[{same}, {same}, {same}]", f"[{same}, affine_map<(d0, d1) -> (d1, d0)>, {same}]")


@pytest.mark.parametrize(
    ("change", "reason"),
    [(before_the_product, "no schedule for linalg.generic"), (turned_residual, "which is not in order")],
)
def test_what_has_no_schedule_goes_to_the_reference(change: Callable[[str], str], reason: str) -> None:
    region = Region(24, 40, epilogue=("residual",))
    text = change(region.text())
    for schedule in ("kblock", "gather"):
        with pytest.raises(CompileError, match=reason):
            compile_region(text, schedule=schedule)
    kernel = compile_region(text)
    assert kernel.schedule == "reference"
    x, w, extras = region.operands(30)
    expected = region.reference(2 * x if change is before_the_product else x, w, extras)
    given = [extras[0].t().contiguous()] if change is turned_residual else extras
    assert_near(run(kernel, x, w, given, region.m), expected)


def test_auto_is_kblock_where_that_works() -> None:
    text = Region(24, 40).text()
    assert compile_region(text).schedule == "kblock"
    assert compile_region(text) is compile_region(text, schedule="kblock")


def test_an_unknown_schedule() -> None:
    with pytest.raises(OptionError, match=r"unknown schedule 'kblok', there are auto, amx, .*, kblock, .*, reference"):
        compile_region(Region(24, 40).text(), schedule="kblok")


def test_text_that_is_no_contract() -> None:
    with pytest.raises(CompileError, match=r"the contract IR does not parse"):
        compile_region("func.func @region(%x: tensor<4xf32)")


def test_a_region_without_a_sparse_operand_has_no_kernel_of_ours() -> None:
    text = Region(24, 40).text().replace(", #CSR>", ">")
    with pytest.raises(CompileError, match=r"no schedule for linalg.generic"):
        compile_region(text, schedule="kblock")


def test_the_observer_sees_every_stage_in_order() -> None:
    stages: list[tuple[str, str, str]] = []
    compile_region(Region(24, 40).text(), schedule="kblock", observer=lambda *stage: stages.append(stage))
    names = [name for name, _, _ in stages]
    ours = ["propagate-encodings", "fuse-epilogue", "choose-format", "schedule", "expose-storage", "lower-kblock"]
    assert [n for n in names if n in ours] == ours
    assert names[-3:] == ["lower-to-llvm", "llvm", "assembly"]
    assert [suffix for _, suffix, _ in stages[-3:]] == ["mlir", "ll", "s"]
    texts = dict(zip(names, (text for _, _, text in stages), strict=True))
    assert '"kernel.contract"' in texts["fuse-epilogue"]
    assert '"kernel.spmm"' in texts["schedule"]
    assert "define void @entry(" in texts["llvm"]
