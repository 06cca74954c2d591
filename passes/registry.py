"""Finds passes by name and runs pipelines of them: Gossamer's and MLIR's, mixed in any order.

    run_pipeline(module, "func.func(linalg-generalize-named-ops),fuse-epilogue,cse,schedule{bits=256}")

A pass of ours is a frozen dataclass in a file with the pass's name (by_name.py); its fields are its options. It runs on the
whole module, which is verified afterwards. Any other piece of a pipeline is MLIR's own pipeline syntax.
Importing this file or listing the names imports no pass and no MLIR.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeVar

from gossamer.dialects.errors import OptionError
from gossamer.passes.framework import by_name
from gossamer.passes.framework.pass_options import build, choices, label, split

if TYPE_CHECKING:
    from torch_mlir import ir


class Pass(Protocol):
    """A pass of ours. It is also a frozen dataclass, and its name is that of its file."""

    def run(self, module: "ir.Module") -> None:
        """Rewrite the module in place. The caller has entered its context. To fail, raise or call `op.location.emit_error`."""


AnyPass = TypeVar("AnyPass", bound=type[Pass])

_PASSES: dict[str, str | type[Pass]] = {**by_name.passes()}


@dataclass(frozen=True)
class PassInstance:
    """A pass ready to run. `label` is its text in a pipeline, with its options."""

    label: str
    run: "Callable[[ir.Module], None]"


def register(cls: AnyPass) -> AnyPass:
    """Make a pass of your own known to pipelines (a decorator). OptionError if its name is taken."""
    name = by_name.name_of(cls)
    known = _PASSES.get(name)
    if known is not None and _qualified(known) != _qualified(cls):
        raise OptionError(f"there is a pass called '{name}' already: {_qualified(known)}")
    _PASSES[name] = cls
    return cls


def names() -> list[str]:
    """Return the names of our passes."""
    return list(_PASSES)


def get(name: str) -> type[Pass]:
    """Return the class of one of our passes. OptionError for an unknown name."""
    if name not in _PASSES:
        raise OptionError(f"unknown pass '{name}'{choices(name, _PASSES)}")
    entry = _PASSES[name]
    if isinstance(entry, str):
        module, _, cls = entry.partition(":")
        entry = getattr(import_module(module), cls)
    return entry


def instance(configured: Pass) -> PassInstance:
    """Return one of our passes, with its options set, as a step of a pipeline."""
    return PassInstance(label(configured), partial(_run_ours, configured))


def parse_pipeline(text: str) -> list[PassInstance]:
    """Return the passes of a text such as `a,b{option=1},func.func(c)`, also if it is inside `builtin.module(…)`.

    OptionError if a pass, an option or a value is wrong. It names the valid ones.
    """
    whole = re.fullmatch(r"\s*builtin\.module\s*\((.*)\)\s*", text, re.DOTALL)
    if whole and len(split(text, ",")) == 1:
        text = whole[1]
    return [_parse_pass(piece) for piece in split(text, ",")] if text.strip() else []


def run_pipeline(
    module: "ir.Module",
    pipeline: str | Sequence[PassInstance],
    observer: "Callable[[str, ir.Module], None] | None" = None,
) -> None:
    """Run a pipeline on a module, in place. After each pass the observer gets its label and the module.

    PassError (a CompileError) if a pass fails, with its name and diagnostics. OptionError, before any pass
    runs, if the text of the pipeline is wrong.
    """
    from gossamer.passes.framework.diagnostics import failures_raised

    for step in parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline:
        with failures_raised(step.label, module):
            step.run(module)
        if observer is not None:
            observer(step.label, module)


def _parse_pass(piece: str) -> PassInstance:
    ours = re.fullmatch(r"([\w-]+)\s*(?:\{(.*)\})?", piece, re.DOTALL)
    if ours and ours[1] in _PASSES:
        return instance(build(get(ours[1]), ours[2] or ""))
    if not piece:
        raise OptionError("there is nothing between two commas of the pipeline")
    from gossamer.passes.framework import upstream

    try:
        upstream.check(piece)
    except ValueError as error:
        raise OptionError(_explained(piece, str(error))) from None
    return PassInstance(piece, partial(upstream.run, piece))


def _run_ours(configured: Pass, module: "ir.Module") -> None:
    configured.run(module)
    module.operation.verify()


def _explained(piece: str, reason: str) -> str:
    """Return the message for a piece of a pipeline that MLIR refused: what is wrong, and what to write instead."""
    unknown = re.search(r"'([^']+)' does not refer to a registered pass", reason)
    if unknown and unknown[1] in _PASSES:
        return f"'{unknown[1]}' runs on the whole module: write it at the top level, not inside '{piece}'"
    if unknown:
        return f"unknown pass '{unknown[1]}'{choices(unknown[1], _PASSES)}, and those of MLIR"
    return f"MLIR refuses '{piece}': {' '.join(reason.split())}"


def _qualified(entry: str | type[Pass]) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
