"""Where our operations are defined. A graph keeps them as they are: opaque to its compilers, compiled by ours."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from gossamer.runtime.modules.when_loaded import when_loaded
from gossamer.runtime.torch_internals import UNTRACED, FrameAction, FrameExecStrategy, off, set_code_exec_strategy

LIBRARY = torch.library.Library("gossamer", "FRAGMENT")

KERNELS: dict[str, Callable[..., Any]] = {}
"""What each operation runs for CPU tensors: for who calls it where no dispatcher is needed."""

REMEMBER_FLOATS: set[str] = set()
"""The operations that remember what they have made of floating-point operands, too, by their counts of writes."""

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""What torch may expect of them. What they are given may be packed, or brought into another form, at its first use, and may
have changed since the last: no CUDA graph takes that."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNTRACED = None if off(UNTRACED) else FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
_BELOW = None if off(UNTRACED) else FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)


def untraced(function: _Function) -> _Function:
    """Has Dynamo trace neither a Python function nor what it calls, where it runs after a graph break.

    As `torch.compiler.disable` does, which adds 2 µs to every call.
    """
    if _UNTRACED is None:
        return torch.compiler.disable(function)
    python: Any = function.func if isinstance(function, partial) else function
    set_code_exec_strategy(python.__code__, _UNTRACED)
    return function


def traced_below(function: _Function) -> _Function:
    """Has Dynamo start no graph at a Python function, but in what it calls. Within a graph it is traced as any other.

    `torch.compiler.disable(recursive=False)` would end a graph here, and forbid torch.export.
    """
    if _BELOW is None:
        return torch.compiler.disable(function, recursive=False)
    python: Any = function
    set_code_exec_strategy(python.__code__, _BELOW)
    return function


def one_node(function: _Function) -> _Function:
    """Has a call of a function be one node of Dynamo's graph, which AOTAutograd looks into: torch.compiler.allow_in_graph."""
    when_loaded("torch._dynamo", partial(torch.compiler.allow_in_graph, function))
    return function


def constant(function: _Function) -> _Function:
    """Has Dynamo take a function's result as a constant: torch.compiler.assume_constant_result."""
    when_loaded("torch._dynamo", partial(torch.compiler.assume_constant_result, function))
    return function


def implement(name: str, kernel: Callable[..., Any], remembers_floats: bool = False) -> None:
    """Has the operation gossamer::name run this for CPU tensors."""
    LIBRARY.impl(name, untraced(kernel), "CPU")
    KERNELS[name] = kernel
    if remembers_floats:
        REMEMBER_FLOATS.add(name)


def defined_in(name: str) -> str:
    """The module that defines what an operation runs for CPU tensors, and with it the operation."""
    kernel: Any = KERNELS[name]
    module: str = (kernel.func if isinstance(kernel, partial) else kernel).__module__
    return module
