"""Passes by name, their options, and pipelines that mix ours with MLIR's."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from torch_mlir import ir

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.passes import registry
from gossamer.passes.framework import by_name
from gossamer.passes.framework.by_name import name_of
from gossamer.passes.framework.context import context
from gossamer.passes.framework.diagnostics import PassError, collected
from gossamer.passes.framework.family import Family
from gossamer.passes.framework.pass_options import build, label, signature
from gossamer.passes.loops.queries import walk
from gossamer.passes.registry import get, instance, names, parse_pipeline, register, run_pipeline
from gossamer.passes.schedules.families import ALL_FAMILIES, FAMILIES

ROOT = Path(__file__).parents[2]
PASSES = ROOT / "passes"

SUMS = """
func.func @f(%a: f32) -> f32 {
  %0 = arith.addf %a, %a : f32
  %1 = arith.addf %a, %a : f32
  %2 = arith.mulf %0, %1 : f32
  return %2 : f32
}
"""


@dataclass(frozen=True)
class Mark:
    """Gives every op of one name an attribute."""

    op: str = "arith.addf"
    times: int = 1
    weight: float = 0.5
    too_deep: bool = False
    tile: tuple[int, ...] = ()

    def run(self, module: ir.Module) -> None:
        for op in walk(module, self.op):
            op.attributes["mark"] = ir.StringAttr.get(label(self))


@dataclass(frozen=True)
class Fail:
    """Fails in one of the ways in which a pass can fail."""

    how: str

    def run(self, module: ir.Module) -> None:
        WAYS[self.how](module)


def emit(module: ir.Module) -> None:
    walk(module, "arith.mulf")[0].location.emit_error("no products here")


def refuse(module: ir.Module) -> None:
    raise CompileError("no schedule for arith.mulf")


def stumble(module: ir.Module) -> None:
    raise KeyError("missing")


def misparse(module: ir.Module) -> None:
    ir.Attribute.parse("#no_dialect.attribute")


def invalidate(module: ir.Module) -> None:
    walk(module, "func.func")[0].attributes["function_type"] = ir.TypeAttr.parse("(i32) -> f32")


WAYS: dict[str, Callable[[ir.Module], None]] = {
    function.__name__: function for function in (emit, refuse, stumble, misparse, invalidate)
}


@pytest.fixture(autouse=True)
def throw_away_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    register(Mark)
    register(Fail)


@pytest.fixture
def module() -> ir.Module:
    return ir.Module.parse(SUMS, context())


def labels(pipeline: str) -> list[str]:
    return [step.label for step in parse_pipeline(pipeline)]


def options(text: str) -> Mark:
    return build(Mark, text)


# --- names


def test_a_file_named_as_its_pass_is_all_that_a_pass_needs() -> None:
    files = {file.stem.replace("_", "-"): file.read_text() for file in PASSES.rglob("*.py")}
    declared = [name for name, text in files.items() if "\n    def run(self, module: ir.Module)" in text]
    assert sorted(declared) == sorted({*names()} - {"mark", "fail"})
    assert [name_of(get(name)) for name in names()] == names()


def test_every_pass_has_lit_tests() -> None:
    folders = {folder.name for folder in (ROOT / "tests" / "lit").iterdir()}
    assert set(names()) - folders == {"mark", "fail"}


def test_every_lowering_in_a_room_of_schedules_is_a_family() -> None:
    for name, family in ALL_FAMILIES.items():
        (module,) = {get(family.lowering).__module__}
        (declared,) = (value for value in vars(import_module(module)).values() if isinstance(value, Family))
        assert declared is family and family.name == name
    assert set(by_name.CPU_SCHEDULES) == {room.name for room in PASSES.glob("weights*")}
    assert len(FAMILIES) == sum(len(list((PASSES / room).glob("lower_*.py"))) for room in by_name.CPU_SCHEDULES)
    assert by_name.schedules(*by_name.GPU_SCHEDULES).keys() == ALL_FAMILIES.keys() - FAMILIES.keys()


@pytest.mark.parametrize("schedule", sorted(FAMILIES.keys() - {"amxquads"}))
def test_a_schedule_names_the_recorded_case_that_it_wins(schedule: str) -> None:
    text = " ".join((import_module(get(FAMILIES[schedule].lowering).__module__).__doc__ or "").split())
    found = re.search(r'"([^"]*)" in (benchmarks/results/\S+\.json)', text)
    assert found is not None, 'its docstring must say what it is for: "CASE" in benchmarks/results/MACHINE/RECORD.json'
    record = json.loads((ROOT / found[2]).read_text())
    (case,) = (each for each in record["cases"] if each["name"] == found[1] and each["threads"] == 1)
    assert any(schedule in result.get("notes", {}).get("schedules", ()) for result in case["results"].values())


def test_every_pass_has_options_that_a_pipeline_can_write() -> None:
    for name in registry._PASSES.keys() - {"fail"}:
        assert labels(name) == [name]
        assert labels(signature(get(name))) == [name]


def test_listing_names_imports_neither_mlir_nor_torch() -> None:
    code = "import sys; from gossamer.passes.registry import names, by_name; names(); "
    code += "print(by_name.schedules(*by_name.CPU_SCHEDULES, *by_name.GPU_SCHEDULES), *sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'broadcast'" in result.stdout and "'gpu-vnm'" in result.stdout
    assert not {"torch_mlir", "torch", "gossamer.passes.contract.schedule"} & set(result.stdout.split())


def test_an_unknown_name_brings_up_the_ones_it_may_mean() -> None:
    with pytest.raises(OptionError, match="unknown pass 'shedule'; did you mean schedule\\? valid: "):
        get("shedule")


def test_a_name_is_registered_once() -> None:
    assert register(Mark) is Mark

    @dataclass(frozen=True)
    class Schedule:
        def run(self, module: ir.Module) -> None: ...

    with pytest.raises(OptionError, match=r"a pass called 'schedule' already: .*schedule:Schedule"):
        register(Schedule)


# --- options


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("", Mark()),
        ("op=arith.mulf times=3", Mark(op="arith.mulf", times=3)),
        ("times=-0x10 weight=1e-3", Mark(times=-16, weight=0.001)),
        ("too-deep=true", Mark(too_deep=True)),
        ("too_deep=true", Mark(too_deep=True)),
        ("tile=4x8", Mark(tile=(4, 8))),
        ("tile=[4,8]", Mark(tile=(4, 8))),
        ("tile=[4, 8] times=2", Mark(tile=(4, 8), times=2)),
        ("tile=[]", Mark()),
        ("op='two words'", Mark(op="two words")),
    ],
)
def test_options_take_the_types_of_the_fields(text: str, mark: Mark) -> None:
    assert options(text) == mark
    assert parse_pipeline(label(mark))[0].label == label(mark)


def test_the_label_has_the_options_that_differ_from_their_defaults() -> None:
    assert label(Mark()) == "mark"
    assert label(Mark(tile=(4, 8), op="two words")) == 'mark{op="two words" tile=4x8}'
    assert signature(Mark) == "mark{op=arith.addf times=1 weight=0.5 too-deep=false tile=[]}"
    assert signature(Fail) == "fail{how=?}"


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("mark{deep=1}", "no option 'deep'; did you mean too-deep\\? valid: op, tile, times, "),
        ("mark{times=x}", "option 'times' of pass 'mark' is of type int, not 'x'"),
        ("mark{too-deep=1}", "option 'too-deep' of pass 'mark' is of type bool, not '1'"),
        ("mark{tile=4xn}", "option 'tile' of pass 'mark' is of type tuple of int, not '4xn'"),
        ("mark{weight}", "option 'weight' of pass 'mark' is of type float, not ''"),
        ("fail", "pass 'fail' needs option 'how'"),
    ],
)
def test_wrong_options_are_refused_by_name(pipeline: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_pipeline(pipeline)


# --- pipelines


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ("", []),
        (" cse , mark ", ["cse", "mark"]),
        ("builtin.module(cse,mark)", ["cse", "mark"]),
        ("builtin.module(cse),builtin.module(cse)", ["builtin.module(cse)", "builtin.module(cse)"]),
        ("func.func(cse,canonicalize),mark{tile=[4,8]}", ["func.func(cse,canonicalize)", "mark{tile=4x8}"]),
        ("inline{default-pipeline=func.func(cse,cse)}", ["inline{default-pipeline=func.func(cse,cse)}"]),
        ("mark\n{ times=2\n  too-deep=false }", ["mark{times=2}"]),
    ],
)
def test_pipelines_split_at_their_top_level(pipeline: str, expected: list[str]) -> None:
    assert labels(pipeline) == expected


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("cse,,mark", "nothing between two commas"),
        ("cse{a=(1}", "'}' at column 9 of 'cse{a=\\(1}' closes nothing"),
        ("mark{times=2", "'mark{times=2' ends before a closing }"),
        ("mark)", "'\\)' at column 5 of 'mark\\)' closes nothing"),
        ("func.func(cse,mark)", "'mark' runs on the whole module: .* not inside 'func.func\\(cse,mark\\)'"),
        ("canonicalise", "unknown pass 'canonicalise'; valid: allow-approximations, .*, and those of MLIR"),
        ("canonicalize{fast=1}", "MLIR refuses 'canonicalize{fast=1}': .*no such option fast"),
    ],
)
def test_wrong_pipelines_say_what_is_wrong(pipeline: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_pipeline(pipeline)


def test_passes_of_both_kinds_see_each_others_work(module: ir.Module) -> None:
    run_pipeline(module, "mark{times=1},cse,mark{times=2 op=arith.mulf},func.func(canonicalize)")
    (total,) = walk(module, "arith.addf")
    (product,) = walk(module, "arith.mulf")
    assert str(total.attributes["mark"]) == '"mark"'
    assert str(product.attributes["mark"]) == '"mark{op=arith.mulf times=2}"'


def test_a_configured_pass_is_a_step_too(module: ir.Module) -> None:
    steps = [*parse_pipeline("cse"), instance(Mark(times=7))]
    run_pipeline(module, steps)
    assert str(walk(module, "arith.addf")[0].attributes["mark"]) == '"mark{times=7}"'
    assert [step.label for step in steps] == ["cse", "mark{times=7}"]


def test_the_observer_sees_the_module_after_each_pass(module: ir.Module) -> None:
    seen: list[tuple[str, int]] = []
    run_pipeline(module, "mark,cse", lambda step, after: seen.append((step, str(after).count("arith.addf"))))
    assert seen == [("mark", 2), ("cse", 1)]


def test_a_wrong_name_at_the_end_leaves_the_module_as_it_was(module: ir.Module) -> None:
    before = str(module)
    with pytest.raises(OptionError):
        run_pipeline(module, "cse,no-such-pass")
    assert str(module) == before


# --- failures


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("emit", "pass 'fail{how=emit}' failed\n  -:5:8: error: no products here"),
        ("refuse", "pass 'fail{how=refuse}' failed\n  error: no schedule for arith.mulf"),
        ("stumble", "pass 'fail{how=stumble}' failed\n  error: KeyError: 'missing' (test_registry.py:"),
        ("misparse", "pass 'fail{how=misparse}' failed\n  #no_dialect.attribute:1:13: error: "),
        (
            "invalidate",
            "pass 'fail{how=invalidate}' leaves IR that does not verify\n  -:2:1: error: 'func.func' op type",
        ),
    ],
)
def test_a_failing_pass_of_ours_is_a_compile_error(module: ir.Module, how: str, message: str) -> None:
    seen: list[str] = []
    with pytest.raises(CompileError) as caught:
        run_pipeline(module, f"cse,fail{{how={how}}},mark", lambda step, _: seen.append(step))
    assert str(caught.value).startswith(message)
    assert seen == ["cse"]


def test_a_failing_pass_of_mlir_is_a_compile_error() -> None:
    text = """
    module attributes {transform.with_named_sequence} {
      transform.named_sequence @__transform_main(%root: !transform.any_op {transform.readonly}) {
        %f = transform.structured.match ops{["func.func"]} in %root : (!transform.any_op) -> !transform.any_op
        transform.debug.emit_remark_at %f, "found" : !transform.any_op
        %t, %l = transform.structured.tile_using_for %f tile_sizes [4]
          : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
        transform.yield
      }
      func.func @f() { return }
    }"""
    mlir = context()
    with collected(mlir) as others, pytest.raises(PassError) as caught:
        run_pipeline(ir.Module.parse(text, mlir), "transform-interpreter,cse")
    (error,) = caught.value.diagnostics
    assert caught.value.label == "transform-interpreter"
    assert (error.severity, error.line, error.column) == ("error", 6, 18)
    assert "TilingInterface" in error.message
    assert [(note.line, note.message) for note in error.notes] == [(10, "target op")]
    assert [(remark.severity, remark.message) for remark in others] == [("remark", "found")]


def test_long_notes_are_cut_in_the_message_and_whole_in_the_data() -> None:
    body = "\n".join(f"  %{i + 1} = arith.addf %{i}, %{i} : f32" for i in range(40))
    text = f"func.func @f(%a: f32) -> f32 {{\n  %0 = arith.addf %a, %a : f32\n{body}\n  return %40 : f32\n}}"
    with pytest.raises(PassError) as caught:
        run_pipeline(ir.Module.parse(text, context()), "fail{how=invalidate}")
    assert str(caught.value).count("\n") < 15 and "more lines)" in str(caught.value)
    assert caught.value.diagnostics[0].notes[0].message.count("arith.addf") == 41


def test_nothing_is_printed_when_a_pass_fails(module: ir.Module, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileError):
        run_pipeline(module, "fail{how=emit}")
    assert capfd.readouterr() == ("", "")


# --- contexts


def test_contexts_are_independent_and_made_from_any_thread() -> None:
    def compiled(_: int) -> str:
        mlir = context()
        assert mlir.is_dialect_loaded("kernel")
        module = ir.Module.parse(SUMS, mlir)
        run_pipeline(module, "mark,cse")
        return str(module)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(compiled, range(16)))) == 1


def test_modules_alive_at_exit_do_no_harm() -> None:
    code = """
from torch_mlir import ir
from gossamer.passes.framework.context import context
from gossamer.passes.registry import run_pipeline
module = ir.Module.parse("func.func @f() { return }", context())
run_pipeline(module, "cse")
raise SystemExit(7)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (7, "")
