"""Calls that somebody may watch: for a time, what they run is put into something else. Otherwise, they cost what they cost.

with watching(wrap):            every function below is wrap(kind, name, function) meanwhile

kind         name               function
operation    region, einsum     what an operation of ours runs, called by code of Inductor's or by torch's dispatcher
kernel                          machine code
packing                         what makes or renews something that later calls find again, such as a packed weight
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
    """What calls a function that it keeps."""

    def watch(self, wrap: Wrap | None) -> None:
        """Calls what `wrap` returns from now on; with None, the function itself again."""
        ...


_Watchable = TypeVar("_Watchable", bound=Any)
_lock = threading.RLock()
_known: WeakSet[Any] = WeakSet()
_wrap: Wrap | None = None


def watchable(called: _Watchable) -> _Watchable:
    """Has `watching` reach this, as long as it lives: a `Watchable`, or a function with such an attribute."""
    with _lock:
        _known.add(called)
        if _wrap is not None:
            called.watch(_wrap)
    return called


def watched(kind: Kind, function: Function) -> Function:
    """The function, or what it is put into now. For calls that are rare."""
    return function if _wrap is None else _wrap(kind, "", function)


@contextmanager
def watching(wrap: Wrap) -> Iterator[None]:
    """Puts all functions that can be watched into something else. One block at a time."""
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
