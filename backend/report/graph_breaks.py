"""Collects graph breaks for the report, and warns about them: the lines at which Dynamo split a model.

Dynamo breaks a graph silently. The line runs uncompiled, and no chain crosses it. If Dynamo cannot continue after the line (in
a loop, in a `with`), the whole function runs uncompiled, including its sparse layers. If a setting avoids the break, the
warning and the report name it. The backend cannot change that setting, because Dynamo reads it before it calls a backend.
"""

import ast
import linecache
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from traceback import FrameSummary
from typing import Any

from torch import fx, nn

from gossamer.backend.report.compilation import callbacks_may_raise, compilation_in_progress
from gossamer.runtime.torch_internals import (
    InstructionTranslator,
    Unsupported,
    callback_handler,
    counters,
    external_utils,
    get_compilation_metrics,
    graph_break_reasons,
)

_SPARSE = (
    "torch.compile cannot trace torch.sparse tensors, so Dynamo broke the graph at {where} and that part runs uncompiled. "
    "gossamer.prepare(model) turns what the model holds, and what it is called with, into gossamer.SparseTensor, which can "
    "be traced."
)
_SPLIT = (
    "torch.compile broke the graph at {where} ({why}). That line runs uncompiled; the layers before and after it are compiled "
    "separately.{remedy}"
)
_FAILED = (
    "torch.compile gave up {what} at {where} ({why}). It runs uncompiled, and layers of torch.nn that it calls are "
    "dense.{remedy}"
)
_MORE = " gossamer.explain(model, *inputs) lists all graph breaks. With fullgraph=True those that remain are errors."

_REMEDIES = {
    "does not support RNN, GRU, or LSTM": "torch._dynamo.config.allow_rnn = True",
    "shape depends on input Tensor data": "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    "capture_scalar_outputs": "torch._dynamo.config.capture_scalar_outputs = True",
    "torch/ao/pruning": "model = gossamer.prepare(model)",
    "sparse tensor": "model = gossamer.prepare(model)",
}
"""For a part of Dynamo's reason: the line that the user should write before compiling."""

_IN_WHOLE_GRAPHS = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")
"""Settings that Dynamo turns on by itself under fullgraph=True."""

_OF_VALUES = ("data-dependent", "capture_scalar_outputs", "tolist", "shape depends on input tensor data")
"""Parts of the reasons for code that depends on the values of a tensor."""

_OVER_ALL = (
    " If this is a loop over the experts that are hit, write `for e in range(experts)` without `.tolist()` and `if`, and "
    "torch._dynamo.config.capture_dynamic_output_shape_ops = True before you compile: it becomes one operation."
)

_MIXED = " Write model.base_model.model.compile(backend=...) instead: peft adds hooks before each call, outside of that model."
"""Advice for calls of peft's models with `adapter_names`."""

_OURS = tuple(os.path.join(folder, "") for folder in getattr(find_spec("gossamer.sparsity"), "submodule_search_locations", ()))
"""The folders of Gossamer's code that Dynamo traces."""

_known: Any = None  # the last reason at the end of the latest compilation
_told = set[tuple[str, int | None, str]]()  # files, lines and messages of earlier warnings

_AROUND_MODELS = ("set_runtime_stats_and_log", "_inside_ddp_forward")
"""Functions in which DistributedDataParallel itself breaks the graph, before it calls the model."""


@contextmanager
def collect_breaks() -> Iterator[list[str]]:
    """Collects the graph breaks of compilations in the block, each with the user's line.

    Fills the list, and restores torch's counters, when the block ends.
    """
    found: list[str] = []
    counted = {name: Counter(counts) for name, counts in counters.items()}
    reasons, frames = list(graph_break_reasons), list(get_compilation_metrics())
    try:
        yield found
    finally:
        new = [r for r in graph_break_reasons if not any(r is old for old in reasons)]
        new = [r for r in new if not any(part in r.reason for part in _AROUND_MODELS)]
        places = [_of_user(r.user_stack) for r in new]
        lines = [_line(r.reason, p and p.filename, p and p.lineno) for r, p in zip(new, places, strict=True)]
        # A frame that breaks at its first instruction leaves no reason, only a failed compilation.
        failed = [f for f in get_compilation_metrics() if f.fail_type and not any(f is old for old in frames)]
        lines += [_line(f.fail_reason, f.fail_user_frame_filename, f.fail_user_frame_lineno) for f in failed]
        found += dict.fromkeys(lines)
        for name in list(counters):
            counters[name].clear()
            counters[name].update(counted.get(name, {}))


def is_whole(graph: fx.GraphModule, function: Any) -> bool:
    """Whether a graph that Dynamo has just traced does everything that a call of a function or module does.

    Returns False if that is not certain, for example for modules whose hooks run outside of the graph.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    frame = compiled_frame()
    if frame is None or getattr(reason, "graph_break", True):
        return False
    if frame.f_code.co_filename == getattr(external_utils, "__file__", None):  # torch's own frame around a call
        return frame.f_locals.get("fn") is function
    if isinstance(function, nn.Module):
        if any(getattr(function, name) for name in _HOOKS):
            return False
        function = function.forward
    return frame.f_code is getattr(getattr(function, "__func__", function), "__code__", None)


def compiled_frame() -> Any:
    """Returns Dynamo's translator of the frame that it is compiling, or None if it is compiling none."""
    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def watch_graph_breaks(backend: object) -> None:
    """Registers a callback that warns once about each line at which a compilation for `backend` breaks the graph."""

    def check(_: Any) -> None:
        global _known
        new, _known = _reasons_after(_known), graph_break_reasons[-1] if graph_break_reasons else None
        compilation = compilation_in_progress()
        if compilation is None or compilation.backend is not backend:
            return
        failure = sys.exc_info()[1]
        with callbacks_may_raise():  # warnings may be errors
            for reason in new:
                _tell(reason.reason, reason.user_stack, _SPLIT)
            if isinstance(failure, Unsupported) and not compilation.full_graph:
                name = re.sub("torch_dynamo_resume_in_(.*)_at_\\d+", r"the rest of \1", compilation.function)
                _tell(str(failure), getattr(failure, "real_stack", None) or [], _FAILED.replace("{what}", name))

    check.__qualname__ = watch_graph_breaks.__qualname__
    if not any(getattr(c, "__qualname__", "") == check.__qualname__ for c in callback_handler.end_callbacks):
        callback_handler.register_end_callback(check)


def _reasons_after(last: Any) -> list[Any]:
    """Returns Dynamo's reasons after the reason `last`, or all of them if Dynamo was reset since."""
    reasons = list(graph_break_reasons)
    at = next((i for i in reversed(range(len(reasons))) if reasons[i] is last), -1)
    return reasons[at + 1 :]


def _tell(reason: str, stack: list[FrameSummary], message: str) -> None:
    """Warns at the user's line. Does not warn about breaks that the user asked for, nor twice about one line."""
    line = _of_user(stack)
    place = (line.filename, line.lineno) if line else ("", None)
    if (*place, message) in _told or "_dynamo.graph_break()" in reason:
        return
    _told.add((*place, message))
    where = f"{place[0]}:{place[1]}" if line else "a line that Dynamo does not name"
    what = _SPARSE if "sparse tensor" in reason.lower() else message
    why, remedy = _first_line(reason) + _explanation(reason).rstrip("."), _remedy(reason, *place, stack)
    text = what.format(where=where, why=why, remedy=remedy) + _MORE
    warnings.warn_explicit(text, UserWarning, place[0] or "torch.compile", place[1] or 1)


def _of_user(stack: Sequence[FrameSummary] | None) -> FrameSummary | None:
    """Returns the innermost line outside of Gossamer's code, which appears, for example, in products of a SparseTensor."""
    theirs = [line for line in stack or () if not line.filename.startswith(_OURS)]
    return next(iter(reversed(theirs or stack or ())), None)


def _line(reason: str | None, filename: str | None, number: int | None) -> str:
    what = f"{_first_line(reason)}{_explanation(reason)}{_remedy(reason, filename, number)}"
    return f"{filename}:{number}: {what}" if filename else what


def _first_line(reason: str | None) -> str:
    return (reason or "unknown reason").strip().splitlines()[0].strip()


def _explanation(reason: str | None) -> str:
    lines = (line.strip() for line in (reason or "").splitlines())
    return next((": " + line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")


def _remedy(reason: str | None, filename: str | None, number: int | None, stack: Sequence[FrameSummary] = ()) -> str:
    low = (reason or "").lower()
    if any(os.path.join("peft", "peft_model.py") in each for each in (filename or "", *(line.filename for line in stack))):
        return _MIXED
    if any(part in low for part in _OF_VALUES) and _is_about_experts(filename, number):
        return _OVER_ALL
    line = next((line for part, line in _REMEDIES.items() if part.lower() in low), None)
    if line is None:
        return ""
    implied = ", or compile with fullgraph=True, which includes it" if any(each in line for each in _IN_WHOLE_GRAPHS) else ""
    return f" Write {line} before you compile{implied}."


def _is_about_experts(filename: str | None, number: int | None) -> bool:
    """Whether the innermost function around a line names experts."""
    lines = linecache.getlines(filename or "")
    try:
        defined = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return False
    around = [each for each in defined if each.lineno <= (number or 0) <= (each.end_lineno or 0)]
    innermost = max(around, key=lambda each: each.lineno, default=None)
    return innermost is not None and "expert" in "".join(lines[innermost.lineno - 1 : innermost.end_lineno]).lower()
