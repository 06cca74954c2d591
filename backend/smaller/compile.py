"""Compiles a smaller graph in place of one of Dynamo's, if there is one. The entry point of this room.

gm(x, w1, b1, w2, b2)    →    gm'(x, smaller_0, smaller_1, smaller_2, smaller_3), called with rows and columns of w1 and w2

plan.py finds the smaller graph: analysis.py finds the channels that are needed, worth.py predicts whether leaving out the
others pays, and build.py writes the graph. call.py calls it, and computes its inputs again when weights change.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.kept_graph import KeptGraph, module_of
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import collect, record
from gossamer.backend.run.computed import compared_for
from gossamer.backend.smaller.call import SmallerCall, Variant
from gossamer.backend.smaller.plan import Plan, plan
from gossamer.runtime.torch_internals import detect_fake_mode

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Planner = Callable[[fx.Graph, Mapping[int, str], Sequence[Any], Options], Plan | None]
"""Finds a graph with the same results. Some of its inputs are computed from static inputs; see `plan`."""


def compile_smaller(
    module: fx.GraphModule, values: Sequence[Any], options: Options, compile_: Compile, planner: Planner = plan
) -> Callable[..., Any]:
    """Compiles a smaller graph with the same results, or else the whole graph, with `compile_`. Returns the callable.

    values   the inputs, as Dynamo passes them with the module
    planner  finds the smaller graph
    """
    inputs = Inputs.of(module, values)
    statics = {n: static.name for n, static in inputs.statics.items() if static.tensor is inputs.values[n]}
    found = planner(module.graph, statics, inputs.values, options)
    if found is None:
        return compile_(module, values)
    source = _Source(module, [*statics], compile_)

    with collect() as others:
        first = source.compiled(found, values, values)
    sparse = {decision.name for decision in others.decisions if decision.sparse}
    record([decision for decision in found.decisions if decision.name not in sparse], [], {}, graphs=0)

    def another(args: Sequence[Any]) -> Variant | None:
        with source.at_work():
            found = planner(source.graph, statics, args, options)
            return None if found is None else source.compiled(found, args, source.fakes(args))

    def whole(args: Sequence[Any]) -> Callable[..., Any]:
        with source.at_work():
            return source.whole(args)

    call = SmallerCall(first, another, whole, compared_for(options.verify))
    return lambda *args: call(args)


class _Source:
    """Keeps one of Dynamo's graphs, to compile it again when weights have changed.

    statics  the indices of its static inputs
    """

    def __init__(self, module: fx.GraphModule, statics: Sequence[int], compile_: Compile) -> None:
        self._compile, self._kept = compile_, KeptGraph(module, statics)

    @property
    def graph(self) -> fx.Graph:
        """Dynamo's graph."""
        return self._kept.module.graph

    def at_work(self) -> AbstractContextManager[None]:
        """Returns the context in which a call may compile another graph."""
        return self._kept.at_work()

    def fakes(self, args: Sequence[Any]) -> list[Any]:
        """Returns fake inputs with the sizes that the graph takes, some of them dynamic."""
        return self._kept.again(args)[1]

    def whole(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the whole graph."""
        return self._compile(*self._kept.again(args))

    def compiled(self, found: Plan, args: Sequence[Any], values: Sequence[Any]) -> Variant:
        """Compiles a smaller graph for these `values` of the inputs."""
        smaller = found.smaller
        module = module_of(smaller.graph, self._kept.module)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._kept.note(
            [None if n not in smaller.taken else placeholders[smaller.taken.index(n)] for n in range(len(args))], args
        )
        mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
        given = [values[n] for n in smaller.taken]
        old = self.graph.find_nodes(op="placeholder")
        for node, n in zip(placeholders, smaller.taken, strict=False):
            node._dynamo_source = old[n]._dynamo_source
        for node, (value, _, leaf) in zip(placeholders[len(given) :], smaller.inputs, strict=True):
            value = value.detach().requires_grad_(value.requires_grad)  # a leaf, because torch may ask for its gradient
            fake = mode.from_tensor(value, static_shapes=True) if mode is not None else value
            source = leaf.meta["grapharg"].source if leaf is not None and "grapharg" in leaf.meta else None
            node.meta = {"example_value": fake, "grapharg": SimpleNamespace(source=source, example=value.detach())}
            node._dynamo_source = None
            given.append(fake)
        trained = frozenset(n for n in smaller.leaves if args[n].requires_grad) if torch.is_grad_enabled() else frozenset()
        compiled = self._compile(module, given)
        return Variant(compiled, smaller.taken, smaller.leaves, smaller.recipe, trained)
