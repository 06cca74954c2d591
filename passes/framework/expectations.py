"""Reads the comments of a test file that list the diagnostics it must cause, in the syntax of MLIR's own tools.

    %0 = arith.addf %a, %b : f64   // expected-error {{part of the message}}
    // expected-warning @+1 {{…}}     one line below; @-2: two lines above
    // expected-note @below {{…}}     at the next line that is no such comment; @above: at the previous one
    // expected-remark @unknown {{…}} without a place in the file

Every error, warning, remark and note must be expected, except MLIR's note that prints the current operation.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gossamer.dialects.errors import OptionError
from gossamer.passes.framework.diagnostics import Diagnostic

_MARK = re.compile(r"expected-(error|warning|remark|note)\b")
_EXPECTATION = re.compile(_MARK.pattern + r" *(?:@([+-]\d+|above|below|unknown))? *\{\{(.*)\}\}\s*$")


@dataclass(frozen=True)
class Expectation:
    """A diagnostic that must come at `line` (0: no place) with `text` in it. Its comment is at line `origin`."""

    severity: str
    text: str
    line: int
    origin: int

    def meets(self, diagnostic: Diagnostic) -> bool:
        """Whether this diagnostic is the expected one."""
        line = diagnostic.line if diagnostic.file == "-" else 0
        return (self.severity, self.line) == (diagnostic.severity, line) and self.text in diagnostic.message


def expectations(text: str, first_line: int = 1) -> list[Expectation]:
    """Returns the expectations in a part of a file that starts at `first_line`. OptionError if one cannot be read."""
    lines = text.splitlines()
    plain = [i for i, line in enumerate(lines) if not _MARK.search(line)]
    found = []
    for i, line in enumerate(lines):
        if not _MARK.search(line):
            continue
        match = _EXPECTATION.search(line)
        if match is None:
            advice = "write // expected-error @+1 {{part of the message}}"
            raise OptionError(f"line {first_line + i}: cannot read '{line.strip()}': {advice}")
        severity, place, message = match.groups()
        if place == "below":
            target = min((p for p in plain if p > i), default=len(lines))
        elif place == "above":
            target = max((p for p in plain if p < i), default=-1)
        else:
            target = i + (int(place) if place and place != "unknown" else 0)
        at = 0 if place == "unknown" else first_line + target
        found.append(Expectation(severity, message, at, first_line + i))
    return found


def mismatches(expected: Iterable[Expectation], emitted: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns one error for each diagnostic that was not expected and each expectation that was not met."""
    missing = list(expected)
    problems = []
    for diagnostic in _flat(emitted):
        met = next((expectation for expectation in missing if expectation.meets(diagnostic)), None)
        if met is not None:
            missing.remove(met)
        else:
            message = f"unexpected {diagnostic.severity}: {diagnostic.message}"
            problems.append(Diagnostic("error", message, diagnostic.file, diagnostic.line, diagnostic.column))
    for expectation in missing:
        message = f"expected {expectation.severity} '{expectation.text}' did not come"
        problems.append(Diagnostic("error", message, "-", expectation.origin, 1))
    return problems


def _flat(emitted: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    for diagnostic in emitted:
        if not diagnostic.message.startswith("see current operation"):
            yield diagnostic
        yield from _flat(diagnostic.notes)
