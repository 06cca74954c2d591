"""gossamer-opt called from Python, and the comments that announce diagnostics; tests/lit has the rest."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.dialects.errors import OptionError
from gossamer.passes.framework.diagnostics import Diagnostic
from gossamer.passes.framework.expectations import expectations, mismatches
from gossamer.passes.opt import main

BAD = "func.func @f(%a: f32) -> i32 {\n  return %a : f32\n}\n"
GOOD = "func.func @f() {\n  return\n}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.mlir"
    path.write_text(GOOD)
    return path


def test_the_tool_starts_without_torch() -> None:
    code = "import sys; import gossamer.passes.opt; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch_mlir" in result.stdout.split() and "torch" not in result.stdout.split()


@pytest.mark.parametrize(
    ("text", "arguments", "status"),
    [
        (GOOD, ["-p", "cse"], 0),
        (BAD, ["-p", "cse"], 1),
        ("", [], 0),
        (f"{GOOD}// -----\n{BAD}// -----\n{GOOD}", ["--split-input-file"], 1),
        (GOOD, ["-p", "no-such-pass"], 2),
        (GOOD, ["--verify-diagnostics"], 0),
        (BAD, ["--verify-diagnostics"], 1),
        (f"// expected-error @+2 {{{{return operand}}}}\n{BAD}", ["--verify-diagnostics"], 0),
        (f"// expected-error @+2 return operand\n{BAD}", ["--verify-diagnostics"], 2),
    ],
)
def test_exit_status(text: str, arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(arguments) == status


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.mlir"]) == 2
    assert "No such file or directory: 'nowhere.mlir'" in capsys.readouterr().err


def test_a_file_that_is_not_text_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b"ML\xefR")  # the start of MLIR's binary form
    assert main([str(file)]) == 2
    assert f"{file} is not text" in capsys.readouterr().err


def test_no_output_is_written_if_a_pass_fails(file: Path, tmp_path: Path) -> None:
    file.write_text(BAD)
    assert main([str(file), "-o", str(tmp_path / "out.mlir")]) == 1
    assert not (tmp_path / "out.mlir").exists()


def test_the_output_is_the_input_of_the_next_run(file: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.mlir", tmp_path / "2.mlir"
    assert main([str(file), "-p", "canonicalize", "-o", str(first)]) == 0
    assert main([str(first), "-p", "canonicalize", "-o", str(second)]) == 0
    assert first.read_text() == second.read_text() == "module {\n  func.func @f() {\n    return\n  }\n}\n"


def test_times_add_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "-p", "canonicalize,cse,canonicalize", "--time-passes"]) == 0
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [row[-1] for row in rows] == ["canonicalize", "cse", "canonicalize", "total"]
    *times, total = [float(row[0]) for row in rows]
    assert sum(times) == pytest.approx(total, abs=0.002)


def test_a_diagnostic_without_a_place_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD))
    assert main(["-p", "transform-interpreter"]) == 1
    assert capsys.readouterr().err.startswith("<stdin>")


# --- expectations


@pytest.mark.parametrize(
    ("text", "severity", "line"),
    [
        ("op // expected-error {{x}}", "error", 10),
        ("// expected-warning @+1 {{x}}\nop", "warning", 11),
        ("op\nop\n// expected-remark @-2 {{x}}", "remark", 10),
        ("op\n// expected-note@+3 {{x}}", "note", 14),
        ("// expected-error @below {{x}}\n// expected-note @below {{y}}\nop", "error", 12),
        ("op\n// expected-note @above {{y}}\n// expected-error @above {{x}}", "error", 10),
        ("// expected-error @unknown {{x}}", "error", 0),
    ],
)
def test_where_a_diagnostic_is_expected(text: str, severity: str, line: int) -> None:
    found = next(e for e in expectations(text, first_line=10) if e.text == "x")
    assert (found.severity, found.line) == (severity, line)


def test_the_text_is_taken_as_it_stands() -> None:
    (found,) = expectations("// expected-error @+1 {{'a.b' op {{1}} (.*)}}  ")
    assert found.text == "'a.b' op {{1}} (.*)"


@pytest.mark.parametrize("line", ["expected-error {x}", "expected-error @over {{x}}", "expected-note {{x}} y"])
def test_a_garbled_comment_is_refused(line: str) -> None:
    with pytest.raises(OptionError, match="line 8: cannot read '// expected"):
        expectations(f"op\n// {line}", first_line=7)


def test_each_expectation_takes_one_diagnostic() -> None:
    twice = [Diagnostic("error", "no good at all", "-", 3, 5)] * 2
    wanted = expectations("// expected-error @+2 {{good}}\n// expected-error @+1 {{at all}}\nop")
    assert mismatches(wanted, twice) == []
    (unexpected,) = mismatches(wanted[:1], twice)
    assert str(unexpected) == "-:3:5: error: unexpected error: no good at all"
    (missing,) = mismatches(wanted, twice[:1])
    assert str(missing) == "-:2:1: error: expected error 'at all' did not come"


def test_notes_are_expected_except_the_one_with_the_operation() -> None:
    operation = Diagnostic("note", "see current operation: op", "-", 1, 1)
    notes = (operation, Diagnostic("note", "first use", "-", 2, 1))
    error = Diagnostic("error", "bad", "-", 1, 1, notes)
    wanted = expectations("op // expected-error {{bad}}\nop // expected-note {{first}}")
    assert mismatches(wanted, [error]) == []
    assert [m.message for m in mismatches(wanted[:1], [error])] == ["unexpected note: first use"]


def test_the_severity_counts() -> None:
    wanted = expectations("op // expected-warning {{bad}}")
    assert mismatches(wanted, [Diagnostic("warning", "bad", "-", 1, 1)]) == []
    assert len(mismatches(wanted, [Diagnostic("error", "bad", "-", 1, 1)])) == 2


def test_a_place_in_another_file_is_no_place() -> None:
    wanted = expectations("// expected-error @unknown {{bad}}")
    assert mismatches(wanted, [Diagnostic("error", "bad", "model.py", 1, 1)]) == []
    assert len(mismatches(expectations("op // expected-error {{bad}}"), [Diagnostic("error", "bad")])) == 2


@pytest.mark.parametrize(
    "command", [["-m", "gossamer.passes.opt", "--list-passes"], ["-m", "gossamer"], ["-m", "benchmarks", "--list"]]
)
def test_a_command_whose_reader_has_ended_ends_quietly(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")
