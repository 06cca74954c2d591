"""Keeps regions, edge lists and structure values alive as long as the compiled code that calls them.

The code of a graph has only the keys of its regions, edge lists and structure values; the tables that it finds them in hold
them by weak references. Their owners are

    the function for Dynamo     held by the cache entry of a frame until that dies or torch._dynamo.reset() is called
    its autograd.Function       held by the `grad_fn` of results too: their gradients may be asked for when the function is gone
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import isfunction, ismethod
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from gossamer.runtime.torch_internals import innermost_fn

T = TypeVar("T")

_kept: ContextVar[list[object] | None] = ContextVar("kept", default=None)
_forever: list[object] = []
"""What belongs to code that cannot own anything."""


@contextmanager
def kept() -> Iterator[None]:
    """In here, all that is shared stays known: a graph that is being rewritten calls it, and has no owner yet."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


def share(table: WeakValueDictionary[str, T], key: str, value: T) -> T:
    """The value that a table has under a key, or this one, as long as somebody keeps it."""
    shared = table.setdefault(key, value)
    keep = _kept.get()
    if keep is not None:
        keep.append(shared)
    return shared


def keep_with(compiled: Callable[..., Any], values: Iterable[object]) -> None:
    """Has compiled code own values."""
    if owned := list(values):
        try:
            # Dynamo takes the function out of the wrapper that it is returned in.
            for owner in (innermost_fn(compiled), *_autograd_functions(compiled)):
                owner._gossamer_owns = owned
        except (AttributeError, TypeError):
            _forever.append(owned)


def _autograd_functions(compiled: Callable[..., Any]) -> list[type[torch.autograd.Function]]:
    """Those that compiled code calls."""
    found = (each for each in reached(compiled) if isinstance(each, type) and issubclass(each, torch.autograd.Function))
    return [each for each in found if each is not torch.autograd.Function]


def reached(compiled: Callable[..., Any]) -> Iterator[object]:
    """What compiled code may call: AOTAutograd has put functions around it."""
    seen: set[int] = set()
    pending: list[object] = [compiled]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if ismethod(each):
            pending.append(each.__self__)
        elif isfunction(each):
            pending += [content for cell in each.__closure__ or () for content in _contents(cell)]
        elif callable(inner := getattr(each, "compiled_fn", None)):
            pending.append(inner)


def _contents(cell: Any) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty yet
        return []
