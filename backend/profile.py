"""`gossamer.profile` compiles a model as `backend="sparse"` would, calls it, and reports where the time goes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.dense import check_mode
from gossamer.backend.entry import compile_dynamo_graph, sparse
from gossamer.backend.example_call import of_torch, tensor_names, uncompile, uncompiled, with_gradients
from gossamer.backend.graph_passes import check_disabled
from gossamer.backend.profiling.clock import Clock, Round
from gossamer.backend.profiling.measured import Profile, of_rounds
from gossamer.backend.profiling.moved import Moved, moved
from gossamer.backend.profiling.trace import guards_us, traced
from gossamer.backend.report.graph_breaks import watch_graph_breaks
from gossamer.backend.report.options import Options
from gossamer.backend.unchanged import unchanged
from gossamer.dialects.errors import ArgumentError, OptionError
from gossamer.runtime.watching.calls import watching
from gossamer.runtime.watching.names import name_tensors

_WARM = 4  # calls before the timed ones; by then, weights that change at every call have settled (see weight_states.py)


def profile(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backward: bool = False,
    calls: int = 20,
    **kwargs: Any,
) -> Profile:
    """Compiles `model(*inputs, **kwargs)`, calls it, and returns where the time goes. `print` shows it as a table.

    model                             a module or a function, compiled or not
    inputs                            example inputs
    options, mode, fullgraph, dynamic as for torch.compile(model, backend="sparse")
    backward                          whether a backward pass follows each call, with gradients of 1 for all results
    calls                             the number of timed calls. Times are medians, in microseconds

    `Profile.save_trace` writes a trace of one call for chrome://tracing or Perfetto, in which arrows lead from the modules to
    the kernel calls. `Report.save(path, profile=...)` shows the profile on the page of a report.

    The model, its gradients and the inputs do not change. Meanwhile a copy of the parameters is in memory. Dynamo is reset
    before and after, so compiled functions are compiled again at their next call.

    Raises OptionError for an unknown option or mode, or if `calls` is not positive. Raises ArgumentError for `backward` without
    gradients. With `fullgraph`, raises torch's error if the graph breaks.
    """
    torchs, ours = of_torch(options)
    parsed = Options.parse(ours)
    check_mode(mode)
    check_disabled(parsed.disable)
    if calls < 1:
        raise OptionError(f"profile: calls is {calls}, but at least 1 call must be timed")
    function, clock = uncompiled(model), Clock()
    torch.compiler.reset()
    try:
        with unchanged(function, inputs, kwargs) as held:
            held.copy_parameters()
            uncompile(held.modules)
            names = tensor_names(function)
            name_tensors((each, names[id(each)]) for each in held.tensors if id(each) in names)
            backend = _Backend(clock, parsed, mode)
            compiled = torch.compile(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=torchs)
            call = _Call(clock, compiled, inputs, kwargs, _leaves(held.tensors) if backward else None)
            return _measured(call, calls)
    finally:
        torch.compiler.reset()
        watch_graph_breaks(sparse)


@dataclass
class _Call:
    """A call of a compiled model with a clock. With `leaves`, a backward pass computes their gradients after the call."""

    clock: Clock
    compiled: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Tensor] | None
    tangents: list[Tensor] = field(default_factory=list)

    def __call__(self) -> Round:
        """Runs one call, and returns its times."""
        found = self.clock.round = Round()
        found.start = perf_counter_ns()
        result = self.compiled(*self.inputs, **self.kwargs)
        found.forward = found.end = perf_counter_ns()
        if self.leaves is not None:
            self._backward(result)
            found.end = perf_counter_ns()
        return found

    def _backward(self, result: Any) -> None:
        results = with_gradients(result)
        if not results:
            raise ArgumentError("profile: backward=True, but no result of the call has gradients. Is torch.no_grad() active?")
        self.tangents = self.tangents or [torch.ones_like(each) for each in results]
        torch.autograd.grad(results, self.leaves or (), self.tangents, allow_unused=True)


def _measured(call: _Call, count: int) -> Profile:
    clock, seen = call.clock, list[Moved]()
    call()
    with watching(clock.wrap):
        clock.seen = lambda operation, given, result: seen.append(moved(operation, given, result))
        operations = [each.operation for each in call().calls]
        clock.seen = None
        for _ in range(_WARM):
            call()
    plain, watched = list[Round](), list[Round]()
    for _ in range(count):  # in turns, so that other work on the machine disturbs both alike
        plain.append(call())
        with watching(clock.wrap):
            watched.append(call())
    events = traced(call, {each.label for each in seen})
    us = median(each.forward - each.start for each in plain) / 1e3
    backward_us = median(each.end - each.forward for each in plain) / 1e3
    return of_rounds(us, backward_us, watched, seen, operations, guards_us(events), events)


@dataclass(repr=False)
class _Backend:
    """The backend, with a clock around each graph."""

    clock: Clock
    options: Options
    mode: str | None

    __name__ = "sparse"
    compiler_fn = staticmethod(sparse)  # the backend inside; torch's own wrappers of backends have this attribute

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return self.clock.graph(compile_dynamo_graph(gm, example_inputs, self.mode, self.options))


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    found = [each for each in tensors if each.is_leaf and each.requires_grad]
    if not found:
        raise ArgumentError("profile: backward=True, but no parameter and no input requires gradients")
    return found
