"""Which kernel a region gets: what regions share, in threads and from the disk, what is refused, and what is done instead."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import llvmlite.binding as llvm
import pytest
import torch

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.passes import pipelines
from gossamer.passes.framework.origins import StageText
from gossamer.runtime import jit, region_kernel
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import host
from gossamer.sparsity.compiler import compile_kernel
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.contracts import Region, assert_near
from tests.sparsity.test_kernels import SCHEDULES, check, compiled, on_its_own, run, suited

__all__ = ["on_its_own"]  # a fixture for each test


# What is shared


def test_regions_that_differ_in_their_hints_share_a_kernel() -> None:
    one = compile_region(Region(40, 79, density=0.1, tokens=1).text(), schedule="broadcast")
    other = compile_region(Region(40, 79, density=0.15, tokens=128).text(), schedule="broadcast")
    assert one is other


def test_a_density_that_wants_another_format_is_another_kernel() -> None:
    """So many columns that no first-level cache holds all of their x."""
    sparse, denser = (compile_region(Region(800, 3000, density=d).text(), schedule="broadcast") for d in (0.05, 0.5))
    assert sparse.formats[1] != denser.formats[1]
    assert sparse.key != denser.key


def test_the_key_tells_apart_what_the_code_depends_on() -> None:
    regions = [Region(24, 40), Region(24, 41), Region(25, 40), Region(24, 40, "f64"), Region(24, 40, epilogue=("bias",))]
    keys = {compile_region(r.text(), schedule=s).key for r in regions for s in ("rowpairs", "reference")}
    assert len(keys) == 2 * len(regions)


def test_regions_that_say_the_same_in_other_words_share_a_kernel() -> None:
    text = Region(24, 40, epilogue=("bias",)).text()
    renamed = text.replace("%y0", "%result").replace("#CSR", "#weight")
    assert renamed != text
    assert compile_region(text, schedule="rowpairs") is compile_region(renamed, schedule="rowpairs")


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
        check(region, "rowpairs", 3)


def test_the_source_of_the_compiler_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Region(22, 45).text()
    before = compile_region(text, schedule="rowpairs").key
    monkeypatch.setattr(compile_kernel, "compiler", lambda: "another compiler")
    monkeypatch.setattr(compile_kernel, "_by_contract", {})
    assert compile_region(text, schedule="rowpairs").key != before


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
        return compile_region(region.text(), schedule="rowpairs")

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
    for schedule in ("broadcast", "rowpairs"):
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
    assert compile_region(text).schedule == "broadcast"
    assert compile_region(text) is compile_region(text, schedule="broadcast")


def test_an_unknown_schedule() -> None:
    with pytest.raises(OptionError, match=r"unknown schedule 'brodcast', there are auto, amx, .*, broadcast, .*, reference"):
        compile_region(Region(24, 40).text(), schedule="brodcast")


def test_text_that_is_no_contract() -> None:
    with pytest.raises(CompileError, match=r"the contract IR does not parse"):
        compile_region("func.func @region(%x: tensor<4xf32)")


def test_a_region_without_a_sparse_operand_has_no_kernel_of_ours() -> None:
    text = Region(24, 40).text().replace(", #CSR>", ">")
    with pytest.raises(CompileError, match="cannot compile the region"):
        compile_region(text, schedule="broadcast")


def test_the_observer_sees_every_stage_in_order() -> None:
    stages: list[tuple[str, str, str]] = []
    compile_region(Region(24, 40).text(), schedule="broadcast", observer=lambda *stage: stages.append(stage))
    names = [name for name, _, _ in stages]
    ours = ["propagate-encodings", "fuse-epilogue", "choose-format", "schedule", "expose-storage", "lower-broadcast"]
    assert [n for n in names if n in ours] == ours
    assert names[-3:] == ["lower-to-llvm", "llvm", "assembly"]
    assert [suffix for _, suffix, _ in stages[-3:]] == ["mlir", "ll", "s"]
    texts = dict(zip(names, (text for _, _, text in stages), strict=True))
    assert '"kernel.contract"' in texts["fuse-epilogue"]
    assert '"kernel.spmm"' in texts["schedule"]
    assert "define void @entry(" in texts["llvm"]


def instructions(assembly: str) -> list[str]:
    """The instructions and labels of assembly, without directives and comments."""
    return [line for line in assembly.split("\n") if re.match(r"\t[a-z]|\.LBB|\w+:", line)]


def test_an_observer_sees_the_code_without_its_line_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM optimises once, with line numbers. They change no instruction, and the texts do not show them."""
    text, target, seen, optimized = Region(24, 40, epilogue=("bias",)).text(), host(), dict[str, str](), list[str]()
    optimize = jit.optimize
    monkeypatch.setattr(jit, "optimize", lambda ir, target: optimized.append(ir) or optimize(ir, target))
    compile_region(text, schedule="broadcast", observer=lambda stage, _, text: seen.update({stage: text}))
    assert len(optimized) == 1 and "!dbg" in optimized[0]
    can = target.instructions, first_level_bytes(), target.gathers
    lowered = pipelines.lower(pipelines.plan(text, "broadcast", target.vector_bits, None, *can), target.rounds_to_bf16)
    plain = optimize(lowered.llvm_ir, target)
    assert instructions(seen["assembly"]) == instructions(jit.assembly(plain, target, comments=True))
    assert "!DI" not in seen["llvm"] and "!dbg" not in seen["llvm"]
    assert str(llvm.parse_assembly(seen["llvm"])).count("\n  ") == str(plain).count("\n  ")
    for stage in ("llvm", "assembly"):
        shown = seen[stage]
        assert isinstance(shown, StageText) and any(shown.origins), stage
