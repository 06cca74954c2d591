"""Calls Inductor's code without the functions that AOTAutograd puts around it.

    compiled(x, weight)                          eight Python functions, 10 µs, or 20 µs if the caches are cold
    code.current_callable([x, weight])           the innermost of them

Those functions handle views, writes, duplicates and subclasses among the inputs and results. The first call shows whether a
graph needs them. It does not if Inductor's code gets the inputs of the call themselves, and the call returns the results of
that code themselves. Dynamo's guards make sure that this holds for later calls.

Calls of six layers of 384 with one token took 162 µs instead of 181. If other work had filled the caches, they took 274 µs
instead of 299 (medians of 400, in turn, Emerald Rapids).
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gossamer.backend.run.lifetime import reached
from gossamer.runtime.torch_internals import CompiledFxGraph, profiler

Function = Callable[..., Sequence[Any]]


def bare(compiled: Function) -> Function:
    """Returns a function that calls the code of a compiled graph more directly. The graph must have no effects.

    Call `bare` right after compilation, under the same autocast state. Returns the function itself if that calls more than
    one piece of Inductor's code. While gradients are enabled or a profiler runs, calls go through all functions.
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
    """Returns the results, and whether the code alone would return them, or None if another thread called it meanwhile."""
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
