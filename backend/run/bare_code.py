"""Inductor's code, called without the functions that AOTAutograd puts around it.

    compiled(x, weight)                          eight Python functions, 10 µs, or 20 where the caches are cold
    code.current_callable([x, weight])           the last of them

Those functions serve views, writes, duplicates and subclasses among the inputs and results. The first call shows whether a
graph needs them. If Inductor's code gets the very inputs of the call and returns its very results, it does not. Dynamo's guards
keep later calls alike.

Calls of six layers of 384 with one token took 162 µs instead of 181, or 274 instead of 299 where other work had filled the
caches (medians of 400, in turn, Emerald Rapids).
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gossamer.backend.run.lifetime import reached
from gossamer.runtime.torch_internals import CompiledFxGraph, profiler

Function = Callable[..., Sequence[Any]]


def bare(compiled: Function) -> Function:
    """Returns a shorter way to the code of a compiled graph, which has no effects.

    Call it right after compilation, under the same autocast. It returns the function itself if that calls more than one piece
    of Inductor's code. While gradients are enabled or a profiler runs, the shorter way is not taken.
    """
    around = [*reached(compiled)]
    codes = [each for each in around if isinstance(each, CompiledFxGraph)]
    differentiates = any(isinstance(each, type) and issubclass(each, torch.autograd.Function) for each in around)
    if len(codes) != 1 or differentiates or any(map(torch.is_autocast_enabled, _WITH_AUTOCAST)):
        return compiled
    code: Any = codes[0]
    direct: bool | None = None
    trying = threading.Lock()

    def call(*inputs: Any) -> Sequence[Any]:
        nonlocal direct
        if direct and not torch.is_grad_enabled() and not profiler._is_profiler_enabled:
            found: Sequence[Any] = code.current_callable([*inputs])
            return found
        if direct is None and trying.acquire(blocking=False):
            try:
                results, direct = _tried(compiled, code, inputs)
            finally:
                trying.release()
            return results
        return compiled(*inputs)

    return call


_WITH_AUTOCAST = ("cpu", "cuda")


def _tried(compiled: Function, code: Any, inputs: Sequence[Any]) -> tuple[Sequence[Any], bool | None]:
    """The results, and whether the code by itself would have given them; None if another thread has called it meanwhile."""
    calls = list[tuple[Sequence[Any], Sequence[Any]]]()
    own: Any = code.current_callable

    def watched(given: list[Any]) -> Sequence[Any]:
        before = [*given]  # the code empties the list
        found: Sequence[Any] = own(given)
        calls.append((before, found))
        return found

    code.current_callable = watched
    try:
        results = compiled(*inputs)
    finally:
        code.current_callable = own
    if len(calls) != 1:
        return results, None
    given, found = calls[0]
    return results, _same(given, inputs) and _same(found, results)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
