"""Copies MLIR's diagnostics into plain data, and raises them as `PassError` when a pass fails.

MLIR's own objects live no longer than the callback that receives them. A `Diagnostic` can be kept,
printed and compared.
"""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch_mlir import ir

from gossamer.dialects.errors import CompileError, GossamerError

# Finds the first file position in any location, also in a fused or named one.
_PLACE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_LINES = 12  # most lines of one diagnostic in the message of an exception: a note may quote a whole function


@dataclass(frozen=True)
class Diagnostic:
    """A diagnostic. `severity` is "error", "warning", "remark" or "note". `line` and `column` count from 1; 0 is unknown."""

    severity: str
    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    notes: tuple["Diagnostic", ...] = ()

    @classmethod
    def read(cls, source: "ir.Diagnostic | ir.DiagnosticInfo") -> "Diagnostic":
        """Copies a diagnostic that MLIR passes to a handler or attaches to an MLIRError."""
        place = _PLACE.search(str(source.location))
        file, line, column = place.groups() if place else ("", 0, 0)
        notes = tuple(cls.read(note) for note in source.notes)
        return cls(source.severity.name.lower(), source.message, file, int(line), int(column), notes)

    @property
    def where(self) -> str:
        """`file:line:column`, without the parts that are not known."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def __str__(self) -> str:
        head = f"{self.where}: {self.severity}: {self.message}".removeprefix(": ")
        return "\n".join([head, *map(str, self.notes)])


class PassError(CompileError):
    """A pass failed. `label` is the text of the pass in a pipeline, `headline` the first line of the message."""

    def __init__(self, label: str, diagnostics: list[Diagnostic], failure: str = "failed") -> None:
        self.label = label
        self.diagnostics = diagnostics
        self.headline = f"pass '{label}' {failure}"
        details = [line for diagnostic in diagnostics for line in _shortened(str(diagnostic))]
        super().__init__("\n  ".join([self.headline, *details]))


@contextmanager
def collected(context: ir.Context, *severities: str) -> Iterator[list[Diagnostic]]:
    """Collects the diagnostics of these severities (all, if none is named) that the `with` block emits.

    Others go to the next outer handler. Errors that the bindings raise as MLIRError are not collected: the exception has them.
    """
    found: list[Diagnostic] = []

    def handle(emitted: ir.Diagnostic) -> bool:
        diagnostic = Diagnostic.read(emitted)
        mine = not severities or diagnostic.severity in severities
        if mine:
            found.append(diagnostic)
        return mine

    handler = context.attach_diagnostic_handler(handle)
    try:
        yield found
    finally:
        handler.detach()


@contextmanager
def failures_raised(label: str, module: ir.Module) -> Iterator[None]:
    """Enters a module's context to run a pass, and turns each failure inside into a PassError.

    A pass fails by raising or by emitting an error (`op.location.emit_error`). Ops that it creates without a
    location get the module's.
    """
    with module.context, module.operation.location, collected(module.context, "error") as errors:
        try:
            yield
        except PassError:
            raise
        except ir.MLIRError as error:
            errors += map(Diagnostic.read, error.error_diagnostics)
            invalid = str(error).startswith("Verification failed")
            failure = "leaves IR that does not verify" if invalid else "failed"
            raise PassError(label, errors or [Diagnostic("error", "no reason given")], failure) from error
        except Exception as error:
            raise PassError(label, [*errors, Diagnostic("error", _sentence(error))]) from error
    if errors:
        raise PassError(label, errors)


def _sentence(error: Exception) -> str:
    """Returns the message of an exception. If it is not a GossamerError, it is a bug, so the message has its place."""
    if isinstance(error, GossamerError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _shortened(text: str) -> list[str]:
    lines = text.splitlines()
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"… ({len(lines) - _LINES} more lines)"]
