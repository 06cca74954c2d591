"""Finds out whether code runs within the step of an optimizer, where arithmetic acts on stored values only."""

import inspect
import sys
from functools import cache

import torch
from torch.fx.traceback import get_current_meta
from torch.optim import Optimizer

from gossamer.runtime.torch_internals import traced_stack

_AROUND = Optimizer.profile_hook_step(lambda: None).__code__  # torch's wrapper of every optimizer's step, which calls its hooks


def in_step() -> bool:
    """Whether an optimizer's step is on the stack: of Python, of Dynamo's trace, or of the traced node of a graph.

    Hooks of the optimizer are not part of the step, because recipes change patterns there. Nor is a closure, which computes
    gradients.
    """
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if _is_step(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno):  # Dynamo may have made other code of it
            return True
        frame = frame.f_back  # type: ignore[assignment]
    if not torch.compiler.is_compiling():
        return False
    if any(_is_step(each.name, each.filename, each.lineno) for each in traced_stack()):
        return True
    lines = get_current_meta().get("stack_trace") or ""
    return f'"{_AROUND.co_filename}", line {_line_of_step()}, in {_AROUND.co_name}\n' in lines


def _is_step(name: str, file: str, line: int | None) -> bool:
    return name == _AROUND.co_name and file == _AROUND.co_filename and line == _line_of_step()


@cache
def _line_of_step() -> int:
    """Returns the line of torch's wrapper that calls the step itself."""
    lines, first = inspect.getsourcelines(_AROUND)
    return first + next(n for n, line in enumerate(lines) if "out = func(" in line)
