"""Passes by name, and pipelines of them: ours and MLIR's, mixed in any order.

    run_pipeline(module, "func.func(linalg-generalize-named-ops),fuse-epilogue,cse,schedule{bits=256}")

A pass of ours is a frozen dataclass whose fields are its options, in a file named as the pass (by_name.py). It runs on the
whole module, which is verified afterwards. Whatever is not the name of one is a piece of MLIR's own pipeline syntax.
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
    """What a pass of ours looks like, next to being a frozen dataclass with a name like its file's."""

    def run(self, module: "ir.Module") -> None:
        """Rewrite the module in place, its context entered; to fail, raise or `op.location.emit_error`."""


AnyPass = TypeVar("AnyPass", bound=type[Pass])

_PASSES: dict[str, str | type[Pass]] = {**by_name.passes()}


@dataclass(frozen=True)
class PassInstance:
    """A pass ready to run; `label` is how a pipeline writes it, options included."""

    label: str
    run: "Callable[[ir.Module], None]"


def register(cls: AnyPass) -> AnyPass:
    """Decorator that makes a pass of your own known to pipelines; OptionError if its name is taken."""
    name = by_name.name_of(cls)
    known = _PASSES.get(name)
    if known is not None and _qualified(known) != _qualified(cls):
        raise OptionError(f"there is a pass called '{name}' already: {_qualified(known)}")
    _PASSES[name] = cls
    return cls


def names() -> list[str]:
    """The names of our passes."""
    return list(_PASSES)


def get(name: str) -> type[Pass]:
    """The class of one of our passes; OptionError for an unknown name."""
    if name not in _PASSES:
        raise OptionError(f"unknown pass '{name}'{choices(name, _PASSES)}")
    entry = _PASSES[name]
    if isinstance(entry, str):
        module, _, cls = entry.partition(":")
        entry = getattr(import_module(module), cls)
    return entry


def instance(configured: Pass) -> PassInstance:
    """One of our passes, options set, as part of a pipeline."""
    return PassInstance(label(configured), partial(_run_ours, configured))


def parse_pipeline(text: str) -> list[PassInstance]:
    """The passes of `a,b{option=1},func.func(c)`, with or without `builtin.module(…)` around.

    OptionError names a pass, an option or a value that is wrong, and the valid ones.
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
    """Run a pipeline on a module, in place; after each pass the observer gets its label and the module.

    PassError (a CompileError) if a pass fails, with its name and diagnostics; OptionError, before anything
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
    """What is wrong with a piece of a pipeline that MLIR refused, and what to write instead."""
    unknown = re.search(r"'([^']+)' does not refer to a registered pass", reason)
    if unknown and unknown[1] in _PASSES:
        return f"'{unknown[1]}' runs on the whole module: write it at the top level, not inside '{piece}'"
    if unknown:
        return f"unknown pass '{unknown[1]}'{choices(unknown[1], _PASSES)}, and those of MLIR"
    return f"MLIR refuses '{piece}': {' '.join(reason.split())}"


def _qualified(entry: str | type[Pass]) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
