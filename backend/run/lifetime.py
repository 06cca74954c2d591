"""Keeps regions, edge lists and structure values alive as long as the compiled code that calls them.

The code of a graph has only their keys. It finds the objects in tables, which hold them by weak references. Their owners are:

    the function for Dynamo     the cache entry of a frame holds it until the frame dies or torch._dynamo.reset() is called
    its autograd.Function       the `grad_fn` of results holds it, too, because backward may run after the function is gone
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
"""The objects of code that cannot own anything."""


@contextmanager
def kept() -> Iterator[None]:
    """In this context, all shared objects stay alive. Use it while a graph is rewritten, because its code is no owner yet."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


def share(table: WeakValueDictionary[str, T], key: str, value: T) -> T:
    """Puts a value into a table, unless the table has one under this key. Returns the value in the table, which stays there
    as long as somebody keeps it."""
    shared = table.setdefault(key, value)
    keep = _kept.get()
    if keep is not None:
        keep.append(shared)
    return shared


def keep_with(compiled: Callable[..., Any], values: Iterable[object]) -> None:
    """Makes compiled code the owner of values."""
    if owned := list(values):
        try:
            # Dynamo unwraps the function that a backend returns, and drops the wrapper.
            for owner in (innermost_fn(compiled), *_autograd_functions(compiled)):
                owner._gossamer_owns = owned
        except (AttributeError, TypeError):
            _forever.append(owned)


def _autograd_functions(compiled: Callable[..., Any]) -> list[type[torch.autograd.Function]]:
    """Returns the autograd.Functions that compiled code calls."""
    found = (each for each in reached(compiled) if isinstance(each, type) and issubclass(each, torch.autograd.Function))
    return [each for each in found if each is not torch.autograd.Function]


def reached(compiled: Callable[..., Any]) -> Iterator[object]:
    """Yields the objects that compiled code may call, through the functions that AOTAutograd puts around it."""
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
    except ValueError:  # the cell is empty
        return []
