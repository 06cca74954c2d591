"""Lets profilers watch calls: for a time, it replaces the functions that are called. Unwatched calls take no longer.

with watching(wrap):            replaces each function below by wrap(kind, name, function)

kind         name               function
operation    region, einsum     computes an operation of ours; Inductor's code or torch's dispatcher calls it
kernel                          machine code
packing                         makes or renews something that later calls find again, such as a packed weight
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakSet

Kind = Literal["operation", "kernel", "packing"]
Function = Callable[..., Any]
Wrap = Callable[[Kind, str, Function], Function]


class Watchable(Protocol):
    """An object that keeps a function and calls it."""

    def watch(self, wrap: Wrap | None) -> None:
        """Makes the object call the result of `wrap` from now on; with None, the function itself again."""
        ...


_Watchable = TypeVar("_Watchable", bound=Any)
_lock = threading.RLock()
_known: WeakSet[Any] = WeakSet()
_wrap: Wrap | None = None


def watchable(called: _Watchable) -> _Watchable:
    """Registers an object for `watching`, as long as it lives: a `Watchable`, or a function with an attribute `watch`."""
    with _lock:
        _known.add(called)
        if _wrap is not None:
            called.watch(_wrap)
    return called


def watched(kind: Kind, function: Function) -> Function:
    """Returns the function, or the function that replaces it now. For rare calls, which need no registration."""
    return function if _wrap is None else _wrap(kind, "", function)


@contextmanager
def watching(wrap: Wrap) -> Iterator[None]:
    """Replaces all functions that can be watched while the block runs. Only one block can run at a time."""
    with _lock:
        _set(wrap)
        try:
            yield
        finally:
            _set(None)


def _set(wrap: Wrap | None) -> None:
    global _wrap
    _wrap = wrap
    for called in list(_known):
        called.watch(wrap)
