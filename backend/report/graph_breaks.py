"""Graph breaks: why Dynamo split a model, for the report, and a warning where a torch.sparse tensor was the cause.

Dynamo cannot trace torch.sparse tensors. It breaks the graph there, silently, and what the user wanted compiled runs as
before. Where a line would let it through, the report says which: Dynamo reads its settings before it calls a backend, so
that the backend cannot change them.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from gossamer.runtime.torch_internals import (
    InstructionTranslator,
    cached_backends,
    callback_handler,
    counters,
    external_utils,
    get_compilation_metrics,
    graph_break_reasons,
)

_ADVICE = (
    "torch.compile cannot trace torch.sparse tensors, so Dynamo broke the graph{where} and that part runs uncompiled. "
    "gossamer.prepare(model) turns what the model holds, and what it is called with, into gossamer.SparseTensor, which can "
    "be traced. gossamer.explain(model, *inputs) lists all graph breaks."
)

_REMEDIES = {
    "does not support RNN, GRU, or LSTM": "torch._dynamo.config.allow_rnn = True",
    "shape depends on input Tensor data": "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    "torch/ao/pruning": "model = gossamer.prepare(model)",
    "sparse tensor": "model = gossamer.prepare(model)",
}
"""The line to write before compiling, for what a reason says."""

_AROUND_MODELS = ("set_runtime_stats_and_log", "_inside_ddp_forward")
"""Where DistributedDataParallel itself breaks the graph, before it calls the model."""

_warned = False
_known_breaks = 0


@contextmanager
def collect_breaks() -> Iterator[list[str]]:
    """Collects the graph breaks of what is compiled in the block, each with the user's line, when the block ends.

    Torch's counters are then what they were before, and so is what the warning about torch.sparse tensors goes by.
    """
    global _known_breaks
    found: list[str] = []
    counted, known = {name: Counter(counts) for name, counts in counters.items()}, _known_breaks
    reasons, frames = list(graph_break_reasons), list(get_compilation_metrics())
    try:
        yield found
    finally:
        new = [r for r in graph_break_reasons if not any(r is old for old in reasons)]
        new = [r for r in new if not any(part in r.reason for part in _AROUND_MODELS)]
        places = [r.user_stack[-1] if r.user_stack else None for r in new]
        lines = [_line(r.reason, p and p.filename, p and p.lineno) for r, p in zip(new, places, strict=True)]
        # A frame that breaks at its first instruction leaves no reason, only a failed compilation.
        failed = [f for f in get_compilation_metrics() if f.fail_type and not any(f is old for old in frames)]
        lines += [_line(f.fail_reason, f.fail_user_frame_filename, f.fail_user_frame_lineno) for f in failed]
        found += dict.fromkeys(lines)
        for name in list(counters):
            counters[name].clear()
            counters[name].update(counted.get(name, {}))
        _known_breaks = known


def is_whole(graph: fx.GraphModule, function: Any) -> bool:
    """Whether a graph that Dynamo has just traced is all that a call of a function or module does.

    Where nobody can tell, such as for modules whose hooks run beside the graph, the answer is False.
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
    """What Dynamo knows of the frame that it is compiling; None if it is compiling none."""
    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def watch_for_sparse(backend: object) -> None:
    """Warns once when a compilation for `backend` ends with a graph break at a torch.sparse tensor."""

    def check(_: Any) -> None:
        global _known_breaks, _warned
        before, _known_breaks = _known_breaks, _sparse_breaks()
        if _known_breaks > before and not _warned and _is_in_use(backend):
            _warned = True
            warnings.warn(_ADVICE.format(where=_last_sparse_place()), stacklevel=2)

    check.__qualname__ = watch_for_sparse.__qualname__
    if not any(getattr(c, "__qualname__", "") == check.__qualname__ for c in callback_handler.end_callbacks):
        callback_handler.register_end_callback(check)


def _sparse_breaks() -> int:
    return sum(
        count
        for kind in ("graph_break", "unimplemented")
        for reason, count in counters[kind].items()
        if "sparse tensor" in reason.lower()
    )


def _last_sparse_place() -> str:
    for reason in reversed(graph_break_reasons):
        if "sparse tensor" in reason.reason.lower() and reason.user_stack:
            return f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}"
    return ""


def _is_in_use(backend: object) -> bool:
    """Whether torch.compile was called for this backend since Dynamo was last reset."""
    return any(getattr(cached, "compiler_fn", None) is backend for cached in cached_backends.values())


def _line(reason: str | None, filename: str | None, number: int | None) -> str:
    lines = [line.strip() for line in (reason or "unknown reason").strip().splitlines()]
    why = next((": " + line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    remedy = next((f" Write {line} before." for part, line in _REMEDIES.items() if part.lower() in (reason or "").lower()), "")
    return f"{filename}:{number}: {lines[0]}{why}{remedy}" if filename else f"{lines[0]}{why}{remedy}"
