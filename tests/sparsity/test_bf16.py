"""The schedules for bf16 against f64: dot products of pairs on AVX512-BF16, and AMX's tiles, run by vectors in their place."""

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import Packing, Pairs, Panels, Vnni, VnniMap
from gossamer.passes import pipelines
from gossamer.runtime import jit, region_kernel
from gossamer.runtime.packing import pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import Target, host
from gossamer.sparsity.compiler import compile_kernel
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.amx_emulator import emulated
from tests.contracts import EPILOGUES, Region, assert_near
from tests.sparsity.test_kernels import Guarded

Block = tuple[int, int] | None
optimize = jit.optimize


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, the blocks that it is for, how it stores the weight, and what this machine must have to run it: vectors of
    512 bits, or also others."""

    blocks: tuple[Block, ...]
    stored: type[Packing]
    needs: frozenset[str] = frozenset()
    bits: frozenset[int] = frozenset({512})

    @property
    def runs(self) -> bool:
        return self.needs <= host().instructions and host().vector_bits in self.bits


CASES = {
    "bf16dot": Case(((64, 64), (16, 4), (32, 2)), Vnni, frozenset({"bf16dots"})),
    "pairs": Case((None,), Pairs, frozenset({"bf16dots"}), frozenset({128, 512})),
    "expand": Case((None,), VnniMap, frozenset({"bf16dots", "avx512vbmi2"})),
    "amx": Case(((64, 64), (16, 32)), Vnni),
    "amxcolumns": Case(((32, 1), (16, 2), (32, 32)), Panels),
    "amxexpand": Case((None,), VnniMap, frozenset({"avx512vbmi2"})),
}
SCHEDULES = [
    pytest.param(name, marks=pytest.mark.skipif(not case.runs, reason=f"needs {set(case.needs)}, {set(case.bits)} bits"))
    for name, case in CASES.items()
]


@pytest.fixture(autouse=True)
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the cache on disk, with AMX emulated, and with the number of threads restored."""
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    monkeypatch.setattr(jit, "optimize", lambda text, target: optimize(emulated(text) if "x86_amx" in text else text, target))
    monkeypatch.setattr(compile_kernel, "_by_contract", {})
    monkeypatch.setattr(region_kernel, "_by_key", {})
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def target(schedule: str) -> Target:
    """This machine, with AMX where that is emulated."""
    if not schedule.startswith("amx"):
        return host()
    features = [f for f in host().features.split(",") if not f[1:].startswith("amx")]
    return dataclasses.replace(host(), features=",".join([*features, "+amx-tile", "+amx-bf16"]))


def contract(region: Region, block: Block) -> str:
    """The contract IR of a region whose weight has blocks."""
    return dataclasses.replace(region, block=block).text()


def compiled(region: Region, schedule: str, block: Block) -> RegionKernel:
    kernel = compile_region(contract(region, block), schedule=schedule, target=target(schedule))
    assert kernel.schedule == schedule
    assert isinstance(kernel.formats[1], CASES[schedule].stored)
    return kernel


def in_blocks(w: Tensor, region: Region, block: Block, density: float) -> Tensor:
    """The weight with some of its blocks."""
    if block is None:
        return w
    (r, c), m, k = block, region.m, region.k
    kept = torch.rand(-(-m // r), -(-k // c)) < density
    mask = kept.repeat_interleave(r, 0)[:m].repeat_interleave(c, 1)[:, :k]
    return w * (mask.t() if region.transposed else mask)


def check(kernel: RegionKernel, region: Region, block: Block, tokens: int, density: float) -> None:
    x, w, extras = region.operands(tokens, 1.0 if block else density)
    w = in_blocks(w, region, block, density)
    out = torch.full((tokens, region.m), torch.nan, dtype=region.dtype)
    assert kernel.formats[1] is not None
    kernel([x, pack(w, kernel.formats[1]), *extras], out)
    assert_near(out, region.reference(x, w, extras))


SHAPES = {
    Region(64, 96, "bf16"): (1, 2, 3, 7, 12, 16, 17, 31, 32, 33, 64, 100, 130, 300),
    Region(70, 101, "bf16", ("bias", "gelu")): (1, 5, 15, 18, 40, 63, 65, 131),
    Region(45, 1100, "bf16", ("bias",), transposed=True): (1, 13, 129),
    Region(1100, 40, "bf16"): (3, 70),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("region", SHAPES, ids=lambda region: f"{region.m}x{region.k}")
def test_any_shape_density_and_number_of_threads(region: Region, schedule: str) -> None:
    for block in CASES[schedule].blocks:
        kernel = compiled(region, schedule, block)
        for count, tokens in enumerate(SHAPES[region]):
            torch.set_num_threads(1 + count % 2)
            check(kernel, region, block, tokens, (0.5, 0.1, 1.0, 0.0)[count % 4])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=" ".join)
def test_each_epilogue(epilogue: tuple[str, ...], schedule: str) -> None:
    region, block = Region(40, 70, "bf16", epilogue), CASES[schedule].blocks[0]
    kernel = compiled(region, schedule, block)
    for tokens in (1, 19, 70):
        check(kernel, region, block, tokens, 0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_touched_outside_of_the_tensors(schedule: str) -> None:
    """A read or a write past the end of any operand or of the output would end this process."""
    for region in (Region(35, 51, "bf16", ("bias", "residual", "token_scale")), Region(48, 64, "bf16", ("bias",))):
        block = CASES[schedule].blocks[0]
        kernel = compiled(region, schedule, block)
        assert kernel.formats[1] is not None
        for tokens in (1, 3, 18, 33, 70):
            x, w, extras = region.operands(tokens, 0.5)
            packed = pack(w, kernel.formats[1])
            given = (x, *packed.components, *extras, torch.empty(tokens, region.m, dtype=region.dtype))
            parts = [Guarded(t) for t in given]
            count = len(packed.components)
            inside = dataclasses.replace(packed, components=tuple(p.tensor for p in parts[1 : 1 + count]))
            kernel([parts[0].tensor, inside, *(p.tensor for p in parts[1 + count : -1])], parts[-1].tensor)
            assert_near(parts[-1].tensor, region.reference(x, w, extras))
            assert all(p.untouched() for p in parts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinity_and_nan_reach_the_results_that_use_them(value: float, schedule: str) -> None:
    """What a block holds counts as used, zero or not; what it is filled up with, beyond K or the last token, does not."""
    region, block = Region(96, 50, "bf16"), CASES[schedule].blocks[0] and (32, 32)
    kernel = compiled(region, schedule, block)
    assert kernel.formats[1] is not None
    x, w, _ = region.operands(20)
    w[32:64] = w[:32, 32:] = 0
    x[7, 11] = x[19, 49] = value
    y = torch.full((20, 96), torch.nan, dtype=region.dtype)
    kernel([x, pack(w, kernel.formats[1])], y)
    used = w != 0 if schedule == "pairs" else torch.ones(96, 50, dtype=torch.bool)  # "expand": as in a dense product
    if block is not None:
        used[32:64] = used[:32, 32:] = False
    touched = torch.zeros(20, 96, dtype=torch.bool)
    touched[7], touched[19] = used[:, 11], used[:, 49]
    torch.testing.assert_close(~torch.isfinite(y), touched)


# What is emitted


def assembly(region: Region, schedule: str, block: Block) -> str:
    named = Target.named("amx")
    planned = pipelines.plan(contract(region, block), schedule, named.vector_bits, features=named.instructions)
    module = optimize(pipelines.lower(planned, named.rounds_to_bf16).llvm_ir, named)
    return jit.assembly(module, named)


def function(text: str, name: str) -> list[str]:
    return text.split(f"\n{name}:")[1].split(".Lfunc_end")[0].split("\n")


@pytest.mark.parametrize(("block", "products", "loads"), [((32, 32), 4, 4), ((16, 32), 4, 5)])
def test_amx_multiplies_tiles_and_configures_them_once(block: Block, products: int, loads: int) -> None:
    text = assembly(Region(256, 256, "bf16", ("bias", "gelu")), "amx", block)
    tokens = 32 if block[0] == 32 else 64
    lines = function(text, f"region_tile{tokens}")
    counts = {name: sum(name in line for line in lines) for name in ("tdpbf16ps", "tileloadd", "tilestored", "ldtilecfg")}
    assert counts["ldtilecfg"] == 1
    assert counts["tilestored"] == 4
    assert counts["tdpbf16ps"] % products == 0
    assert counts["tileloadd"] * products == counts["tdpbf16ps"] * loads  # nothing else: no tile is spilled
    assert len(set(re.findall(r"%tmm\d", "\n".join(lines)))) <= 8


def test_dot_products_keep_their_sums_in_registers() -> None:
    text = assembly(Region(256, 256, "bf16", ("bias",)), "bf16dot", (32, 32))
    lines = function(text, "region_tile12")
    first, *_, last = (i for i, line in enumerate(lines) if "vdpbf16ps" in line)
    loop = lines[first:last]
    assert sum("vdpbf16ps" in line for line in loop) % 24 == 23
    assert not [line for line in loop if re.search(r"vmov\w+\s+%zmm\d+, .*\(", line)]


def test_pairs_are_interleaved_by_one_shuffle_for_each_product() -> None:
    text = assembly(Region(256, 256, "bf16", ("bias",)), "pairs", None)
    lines = function(text, "region_tile64")
    counts = {name: sum(name in line for line in lines) for name in ("vdpbf16ps", "vpunpcklwd", "vpunpckhwd")}
    assert counts["vdpbf16ps"] > 0
    assert 2 * counts["vpunpcklwd"] == 2 * counts["vpunpckhwd"] == counts["vdpbf16ps"]


def test_amx_expands_and_gathers_into_tiles() -> None:
    expanding = function(assembly(Region(128, 256, "bf16", ("bias",)), "amxexpand", None), "region_tile32")
    gathering = function(assembly(Region(128, 256, "bf16", ("bias",)), "amxcolumns", (32, 1)), "region_tile32")
    for lines, instruction in ((expanding, "vpexpandw"), (gathering, "vpunpcklwd")):
        counts = {name: sum(name in line for line in lines) for name in ("tdpbf16ps", "tileloadd", "tilestored", "ldtilecfg")}
        assert counts == {"tdpbf16ps": 4, "tileloadd": 4, "tilestored": 4, "ldtilecfg": 1}
        assert sum(instruction in line for line in lines) >= 16


@pytest.mark.parametrize("schedule", CASES)
def test_a_machine_without_the_instructions_is_refused(schedule: str) -> None:
    with pytest.raises(CompileError, match=f"no {schedule} schedule"):
        compile_region(contract(Region(64, 64, "bf16"), (32, 32)), schedule=schedule, target=Target.named("avx512"))


@pytest.mark.parametrize("schedule", CASES)
def test_other_types_are_refused(schedule: str) -> None:
    with pytest.raises(CompileError, match=f"no {schedule} schedule"):
        compile_region(contract(Region(64, 64, "f16"), (32, 32)), schedule=schedule, target=Target.named("amx"))


@pytest.mark.parametrize(
    ("schedule", "block"), [("bf16dot", (8, 8)), ("bf16dot", (16, 1)), ("bf16dot", None), ("amx", (32, 16))]
)
def test_blocks_that_do_not_fill_vectors_or_tiles_are_refused(schedule: str, block: Block) -> None:
    with pytest.raises(CompileError, match=f"no {schedule} schedule"):
        compile_region(contract(Region(64, 64, "bf16"), block), schedule=schedule, target=Target.named("amx"))
