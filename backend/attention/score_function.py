"""Takes FlexAttention's score_mod apart, into steps of the kernel and functions of places.

A place is batch b, head h, query q and key k. flex_attention.py calls this.

tanh((score + slope[h] * (q - k)) / 20) * 20    →    "add", 0.05, "tanh", 20.0 and added(b, h, q, k, slope)
where(q >= k, score, -inf)                      →    no step, and sees(b, h, q, k)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.expressions import is_pure
from gossamer.backend.graph.nodes import COPIES, arguments, depending, fixed_size
from gossamer.backend.graph.patterns import Hole, Number, Rule, apply, is_rounding, number_of, tanh, where
from gossamer.backend.graph.refused import Refused
from gossamer.dialects.attention import ADD, TANH, Step
from gossamer.runtime.torch_internals import OpOverload

aten = torch.ops.aten

_NUMBERS = {
    aten.scalar_tensor.default, aten.full.default, aten.full_like.default, aten.new_full.default, aten.new_ones.default,
    aten.new_zeros.default, aten.ones_like.default, aten.zeros_like.default, aten._to_copy.default,
    aten.floor_divide.default, aten.lift_fresh_copy.default,
}  # fmt: skip
"""Operations, besides pointwise ones, that make numbers of numbers."""
_SMALL = 4096  # the most elements of a constant tensor in a function


@dataclass(frozen=True)
class ScoreFunction:
    """A score_mod. `added` and `sees` take batch, head, query and key as tensors without dimensions, and then buffers.

    steps  the steps from the scaled product to the score
    added  the value that the step "add" adds; None if there is no such step
    sees   whether score_mod leaves a key visible; None if it hides none
    hides  whether adding minus infinity hides a key. It does not if tanh follows
    """

    steps: tuple[Step, ...]
    added: fx.GraphModule | None
    sees: fx.GraphModule | None
    hides: bool


@dataclass(frozen=True)
class _Steps:
    """The operations on the score so far: steps, added values with signs, and conditions that show (True) or hide keys."""

    steps: tuple[Step, ...] = ()
    terms: tuple[tuple[Any, float], ...] = ()
    conditions: tuple[tuple[Any, bool], ...] = ()

    def then(self, step: Step) -> "_Steps":
        if self.conditions:
            raise Refused("its score_mod goes on after it has hidden keys")
        return replace(self, steps=(*self.steps, step))

    def added(self, value: Any, sign: float = 1.0) -> "_Steps":
        if ADD in self.steps and self.steps[-1] != ADD:
            raise Refused("its score_mod adds twice, before and after a function of the score")
        steps = self.steps if ADD in self.steps else (*self.steps, ADD)
        return replace(self, steps=steps, terms=(*self.terms, (value, sign)))

    def chosen(self, condition: Any, other: Any, shown: bool) -> "_Steps":
        if number_of(other) != -inf:
            raise Refused("its score_mod chooses between scores")
        return replace(self, conditions=(*self.conditions, (condition, shown)))


score, value, number, condition = Hole("score"), Hole("value"), Number("number"), Hole("condition")

_STEPS = [
    Rule(tanh(score), lambda to, **_: to.then(TANH)),
    Rule(-score, lambda to, **_: to.then(-1.0)),
    Rule(score * number, lambda to, number, **_: to.then(number)),
    Rule(score / number, lambda to, number, **_: to.then(1 / number) if number else None),
    Rule(score + value, lambda to, value, **_: to.added(value)),
    Rule(score - value, lambda to, value, **_: to.added(value, -1.0)),
    Rule(value - score, lambda to, value, **_: to.then(-1.0).added(value)),
    Rule(where(condition, score, value), lambda to, condition, value, **_: to.chosen(condition, value, True)),
    Rule(where(condition, value, score), lambda to, condition, value, **_: to.chosen(condition, value, False)),
]
"""The operations on a score that the kernel can compute."""


def score_function(module: fx.GraphModule) -> ScoreFunction:
    """Takes apart a function of (score, batch, head, query, key, buffers...). Raises Refused."""
    graph = module.graph
    given, *places = [node for node in graph.nodes if node.op == "placeholder"]
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    of_score, at, found = depending(graph, [given]), given, _Steps()
    while at is not result:
        user = next(iter(at.users), None)
        if user is None or len(at.users) != 1 or [a for a in user.args if a in of_score] != [at]:
            raise Refused("its score_mod uses the score several times")
        step = found if user.target in COPIES or is_rounding(user) else apply(_STEPS, user, found, score=at)
        if step is None:
            raise Refused(f"its score_mod uses {user.target}")
        at, found = user, step
    if result not in of_score:
        raise Refused("its score_mod does not use the score")
    terms, conditions, steps = found.terms, found.conditions, _folded(found.steps)
    hides = TANH not in steps[steps.index(ADD) :] if ADD in steps else True
    added = _module(module, places, lambda graph, copy: _sum(graph, copy, terms)) if terms else None
    sees = _module(module, places, lambda graph, copy: _all(graph, copy, conditions)) if conditions else None
    return ScoreFunction(steps, added, sees, hides)


def _folded(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Returns the steps with successive factors multiplied, and without factors of 1."""
    found: list[Step] = []
    for step in steps:
        before = found[-1] if found else None
        if isinstance(step, float) and isinstance(before, float):
            found[-1] = step * before
        else:
            found.append(step)
    return tuple(step for step in found if step != 1.0)


def _sum(graph: fx.Graph, copy: Any, terms: Sequence[tuple[Any, float]]) -> Any:
    total: Any = 0.0
    for term, sign in terms:
        total = graph.call_function(torch.add, (total, graph.call_function(torch.mul, (copy(term), sign))))
    return graph.call_function(torch.as_tensor, (total,))


def _all(graph: fx.Graph, copy: Any, conditions: Sequence[tuple[Any, bool]]) -> Any:
    total: Any = True
    for condition, positive in conditions:
        value = copy(condition)
        total = graph.call_function(
            torch.bitwise_and, (value if positive else graph.call_function(torch.logical_not, (value,)), total)
        )
    return total


def function_of_places(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a mask_mod as a function of (batch, head, query, key, buffers...) that takes arrays, too. Raises Refused."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    (result,) = next(node for node in module.graph.nodes if node.op == "output").args
    return _module(module, places, lambda graph, copy: copy(result))


def with_constants(function: fx.GraphModule, first: int, given: Sequence[Any]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Returns the function with all `given` arguments that are numbers put in, and the other given arguments.

    `given` are its arguments from index `first` on.
    """
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    arguments = [node for node in function.graph.nodes if node.op == "placeholder"]
    for node, value in zip(arguments, [None] * first + list(given), strict=True):
        number = fixed_size(value) if isinstance(value, fx.Node) else value
        copies[node] = number
        if number is None:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    graph.output(graph.graph_copy(function.graph, copies))
    return fx.GraphModule(function, graph), [x for x in given if isinstance(x, fx.Node) and fixed_size(x) is None]


def _copied(node: fx.Node, of_places: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns what a node calls, and its arguments. Raises Refused.

    A node that depends on places must make a number of numbers, because it is later called with arrays of any shape.
    """
    if of_places and node.target is aten.index.Tensor:
        indices: list[Any] = []
        buffer: Any = node
        while isinstance(buffer, fx.Node) and buffer.target is aten.index.Tensor:
            buffer, before = arguments(buffer)
            indices = [*before, *indices]
        if buffer.meta["val"].dim() == len(indices) and None not in indices:
            return node.target, (buffer, indices), {}
    elif of_places and is_pure(node):
        value = node.meta["val"]
        pointwise = not isinstance(node.target, OpOverload) or torch.Tag.pointwise in node.target.tags
        if (pointwise or node.target in _NUMBERS) and not (isinstance(value, torch.Tensor) and value.dim()):
            return node.target, node.args, dict(node.kwargs)
    elif not of_places and is_pure(node):
        return node.target, node.args, dict(node.kwargs)
    elif node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target))
        if isinstance(value, torch.Tensor) and value.numel() <= _SMALL and value.device.type == "cpu":
            return torch.tensor, (value.tolist(),), {"dtype": value.dtype}
    raise Refused(f"its functions use {node.op} {node.target}")


def _module(module: fx.GraphModule, places: Sequence[fx.Node], result: Any) -> fx.GraphModule:
    """Returns a function of places and buffers. `result(graph, copy)` makes its result from copies of nodes without a score."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in places}
    of_places = depending(module.graph, places[:4])

    def copy(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node not in copies:
            target, args, kwargs = _copied(node, node in of_places)
            copies[node] = graph.call_function(target, *fx.map_arg((args, kwargs), copy))
        return copies[node]

    graph.output(result(graph, copy))
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)
