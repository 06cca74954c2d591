"""gossamer-opt: reads MLIR, runs a pipeline of Gossamer's and MLIR's passes on it, and prints the result.

    gossamer-opt region.mlir -p 'fuse-epilogue,choose-format,schedule'
    gossamer-opt - -p 'canonicalize,func.func(linalg-generalize-named-ops)' --print-between-passes

Exit status: 0 for success, 1 if a diagnostic was an error (printed as file:line:column with the line), 2 for a wrong
command line.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from torch_mlir import ir

from gossamer.dialects.command_line import ends_with_its_reader
from gossamer.dialects.errors import OptionError
from gossamer.passes import registry
from gossamer.passes.framework.context import context
from gossamer.passes.framework.diagnostics import Diagnostic, PassError, collected
from gossamer.passes.framework.expectations import expectations, mismatches
from gossamer.passes.framework.pass_options import signature

_SEPARATOR = "// -----\n"


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool with these arguments (default: those of the command line). Returns the exit status."""
    options = _parser().parse_args(argv)
    if options.list_passes:
        print(*map(_described, registry.names()), sep="\n")
        return 0
    try:
        return _process(options)
    except BrokenPipeError:
        raise
    except (OptionError, OSError) as error:
        print(f"gossamer-opt: {error}", file=sys.stderr)
        return 2


def _process(options: argparse.Namespace) -> int:
    pipeline = registry.parse_pipeline(options.pipeline)
    name = "<stdin>" if options.input == "-" else options.input
    text = _read(options.input, name)
    watch = _Watch(options.print_between_passes)
    results, status = [], 0
    for first_line, section in _sections(text) if options.split_input_file else [(1, text)]:
        result, diagnostics, failure = _run(section, first_line, pipeline, watch)
        if options.verify_diagnostics:
            diagnostics, failure = mismatches(expectations(section, first_line), diagnostics), ""
        for diagnostic in diagnostics:
            print(_excerpted(diagnostic, name, text.splitlines()), file=sys.stderr)
            status |= diagnostic.severity == "error"
        if failure:
            print(f"gossamer-opt: {failure}", file=sys.stderr)
        if result:
            results.append(result)
    if options.time_passes:
        print(watch.table(), file=sys.stderr)
    _write(_SEPARATOR.join(results), options.output)
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gossamer-opt", description="Run compiler passes on MLIR text, print the result.")

    def flag(name: str, help: str) -> None:
        parser.add_argument(name, action="store_true", help=help)

    parser.add_argument("input", nargs="?", default="-", metavar="FILE", help="MLIR text; - (default): standard input")
    parser.add_argument("-p", "--pipeline", default="", help="passes, ours and MLIR's: 'a,b{option=1},func.func(c)'")
    parser.add_argument("-o", "--output", default="-", metavar="OUT", help="result; - (default): standard output")
    flag("--print-between-passes", "print the module after each pass, to standard error")
    flag("--time-passes", "print the time that each pass took, to standard error")
    flag("--split-input-file", "treat the parts between lines '// -----' one by one")
    flag("--verify-diagnostics", "compare the diagnostics with '// expected-error {{…}}' comments")
    flag("--list-passes", "print our passes with their options and stop")
    return parser


def _described(name: str) -> str:
    """Returns a pass with its options, and the first line of its file's docstring."""
    cls = registry.get(name)
    doc = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""
    return f"{signature(cls)}\n    {doc.partition(chr(10))[0].removeprefix(f'{name}: ')}"


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """Yields the parts of a file, each after the number of its first line."""
    line = 1
    for section in re.split(r"^// -----[ \t]*\n", text, flags=re.MULTILINE):
        yield line, section
        line += section.count("\n") + 1


def _run(
    text: str, first_line: int, pipeline: Sequence[registry.PassInstance], watch: "_Watch"
) -> tuple[str, list[Diagnostic], str]:
    """Returns the text of the module after the pipeline (empty if a pass failed), the diagnostics, and which pass failed."""
    mlir = context()
    failure = ""
    with collected(mlir) as diagnostics:
        try:
            module = ir.Module.parse("\n" * (first_line - 1) + text, mlir)
            watch.start()
            registry.run_pipeline(module, pipeline, watch)
            return str(module), diagnostics, failure
        except ir.MLIRError as error:
            diagnostics += map(Diagnostic.read, error.error_diagnostics)
        except PassError as error:
            diagnostics += error.diagnostics
            failure = error.headline
    return "", diagnostics, failure


class _Watch:
    """Observes a pipeline: records the time of each pass and, if `show`, prints the module after it."""

    def __init__(self, show: bool) -> None:
        self.show = show
        self.times: list[tuple[str, float]] = []

    def start(self) -> None:
        self.since = perf_counter()

    def __call__(self, label: str, module: ir.Module) -> None:
        self.times.append((label, perf_counter() - self.since))
        if self.show:
            print(f"// -----// IR after {label} //----- //\n{module}", file=sys.stderr)
        self.start()

    def table(self) -> str:
        total = sum(seconds for _, seconds in self.times)
        rows = [*self.times, ("total", total)]
        return "\n".join(f"{1e3 * time:9.3f} ms {time / (total or 1):6.1%}  {label}" for label, time in rows)


def _excerpted(diagnostic: Diagnostic, name: str, lines: Sequence[str]) -> str:
    """Formats a diagnostic as compilers print it: place, message, the line of the input with a caret, then notes."""
    parts, shown = [], (0, 0)
    for part in (diagnostic, *diagnostic.notes):
        ours = part.file in ("", "-")
        parts.append(str(replace(part, file=name if ours else part.file, notes=())))
        place = (part.line, part.column)
        if ours and 1 <= part.line <= len(lines) and place != shown:
            parts += [lines[part.line - 1], " " * (part.column - 1) + "^"]
            shown = place
    return "\n".join(parts)


def _read(path: str, name: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{name} is not text (byte {error.start}); only MLIR's textual form is read") from None


def _write(text: str, output: str) -> None:
    if output == "-":
        sys.stdout.write(text)
    elif text:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
