"""Compiles a graph of modules in eval mode while gradients are enabled. Most users of such a graph never ask for gradients.

version     compiled                                  used for
inference   at once, without gradients                forward passes
training    at the first backward, with gradients     backward passes
plain       not at all, as Dynamo made it             gradients of gradients
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from gossamer.backend.compile_module import Compiler
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.kept_graph import KeptGraph, copied
from gossamer.backend.graph.modes import takes_gradients
from gossamer.backend.owners.owners import Owners
from gossamer.backend.purity import Impure
from gossamer.backend.run.parameter_edges import Ways
from gossamer.backend.run.recomputed import Recomputed
from gossamer.runtime.remembered import on_cpu
from gossamer.runtime.torch_internals import TensorifyScalarRestartAnalysis, set_grad_enabled


def compile_eval(module: fx.GraphModule, inputs: Inputs, compiler: Compiler, owners: Owners) -> Recomputed | None:
    """Returns the compiled function of a graph of modules in eval mode.

    Returns None if the graph must not be computed twice, or needs gradients in its forward pass.
    Call it while Dynamo compiles the frame of `module`.
    """
    if takes_gradients(module):
        return None
    once = copied(module)
    for node in once.graph.find_nodes(op="call_function", target=set_grad_enabled):
        once.graph.erase_node(node)  # Dynamo makes no such node if gradients are off
    try:
        with torch.no_grad():
            inference = compiler.compile(once, inputs.values, pure=True)
    except Impure:
        return None
    results = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in _results(module.graph)]
    tensors = [(place, result) for place, result in enumerate(results) if isinstance(result, torch.Tensor)]
    places = [place for place, value in enumerate(inputs.values) if isinstance(value, torch.Tensor)]
    states = [(kind, *_autocast_state(kind)) for kind in _device_types(inputs)]
    context = partial(_as_then, states, torch.get_default_dtype())
    kept = KeptGraph(module, sorted(inputs.statics))
    return Recomputed(
        inference=inference,
        training=_Training(kept, compiler, context),
        plain=kept.module.forward,
        constant=[place for place, result in tensors if not result.requires_grad],
        static=sorted(inputs.statics),
        moving=[place for place in places if place not in inputs.statics],
        numbers=[place for place in range(len(inputs.values)) if place not in places],
        context=context,
        ways=Ways(owners.of_calls()),
    )


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A compiled function, and a predicate: whether it was compiled for these inputs."""

    function: Callable[..., Any]
    takes: Callable[[Sequence[Any]], bool] = lambda _: True


class _Training:
    """A module's function with gradients, compiled at the first call.

    By then, Dynamo's guards of the frame are complete. If this compilation restricts open sizes further, each call checks the
    new restrictions, and the uncompiled module computes other sizes. If torch cannot leave a float symbolic, the function is
    compiled for each value of the floats, for as many values as Dynamo would.
    """

    def __init__(self, kept: KeptGraph, compiler: Compiler, context: Callable[[], Any]) -> None:
        self._kept, self._compiler, self._context = kept, compiler, context
        self._compiled, self._fixed = dict[tuple[float, ...], _Compiled](), list[int]()
        self._lock = threading.Lock()

    @torch.compiler.disable
    def __call__(self, *inputs: Any) -> Any:
        compiled = self._compiled.get(self._floats(inputs))
        if compiled is None and len(self._compiled) < _MOST:
            with self._lock:
                compiled = self._compiled.get(self._floats(inputs))  # another thread may have compiled it meanwhile
                if compiled is None:
                    compiled = self._compile_or_warn(inputs)
                    self._compiled[self._floats(inputs)] = compiled
        if compiled is None or not compiled.takes(inputs):
            return self._kept.module.forward(*inputs)
        return compiled.function(*inputs)

    def _floats(self, inputs: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(inputs[n]) for n in self._fixed)

    def _compile_or_warn(self, inputs: Sequence[Any]) -> _Compiled:
        for _ in range(_TRIES):
            try:
                return self._compile(inputs)
            except TensorifyScalarRestartAnalysis as restart:
                problem: Exception = restart
                self._fixed = self._kept.floats
            except Exception as other:
                problem = other
                break
        if self._compiler.options.strict:
            raise problem
        warnings.warn(
            f"gossamer: the gradients of a model in eval mode could not be compiled ({type(problem).__name__}: "
            f"{problem}). They run uncompiled.",
            stacklevel=2,
        )
        return _Compiled(self._kept.module.forward)

    def _compile(self, inputs: Sequence[Any]) -> _Compiled:
        shapes = self._kept.shapes
        known = len(shapes.guards) if shapes is not None else 0
        module, traced = self._kept.again(inputs, dict(zip(self._fixed, self._floats(inputs), strict=True)))
        with self._kept.at_work(), self._context(), torch.enable_grad():
            compiled = self._compiler.compile(module, traced)
        if shapes is not None and len(shapes.guards) > known:
            code = shapes.produce_guards_expression(traced, guards=shapes.guards[known:])
            if code is not None:
                return _Compiled(compiled, partial(shapes.evaluate_guards_expression, code))
        return _Compiled(compiled)


_MOST = 8
"""The largest number of values of floats for which gradients are compiled. Dynamo's own limit is the same."""

_TRIES = 3
"""Attempts to compile. torch restarts once to fix a float, and once more for a float that the graph no longer uses."""


def _results(graph: fx.Graph) -> Sequence[Any]:
    found: Any = graph.output_node().args[0]
    return found


def _device_types(inputs: Inputs) -> set[str]:
    return {value.device.type for value in inputs.values if isinstance(value, torch.Tensor)} - {"meta"}


def _autocast_state(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextmanager
def _as_then(states: Sequence[tuple[str, bool, torch.dtype]], dtype: torch.dtype) -> Iterator[None]:
    """Sets the autocast state and the default dtype in which the forward pass ran. Dynamo writes other devices than the CPU
    into graphs, so that no default device is needed."""
    now = torch.get_default_dtype()
    try:
        if now is not dtype:
            torch.set_default_dtype(dtype)
        with on_cpu(), _autocast(states):
            yield
    finally:
        if now is not dtype:
            torch.set_default_dtype(now)


@contextmanager
def _autocast(states: Sequence[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """Sets this autocast state."""
    if not states:
        yield
        return
    (kind, enabled, dtype), *others = states
    with torch.autocast(kind, dtype=dtype, enabled=enabled), _autocast(others):
        yield
