"""Computes an attention mask for some queries at a time. So its tiles are found without an array of queries x keys.

le(abs(sub(unsqueeze(%i, 1), %i)), 64)   →   le(abs(sub(unsqueeze(%i, 1)[1024:2048], %i)), 64), and so on
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.graph.expressions import evaluated
from gossamer.backend.graph.nodes import COPIES, SPREADS, arguments, function_of
from gossamer.runtime.torch_internals import FakeTensorMode
from gossamer.sparsity.attention.tile_table import LARGE, Strips

aten = torch.ops.aten

_CONVERTS = COPIES | {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


class _Whole(Exception):
    """A value can be computed only for all queries together."""


def strips(evaluate: fx.GraphModule, leaves: Sequence[Tensor] = (), numbers: Sequence[int] = ()) -> Strips | None:
    """Returns the mask that an expression computes, [batch or 1, heads or 1, queries, keys], in strips.

    Returns None if the mask has fewer than LARGE elements, or if it cannot be computed for some queries alone."""
    values: list[Any] = [*leaves, *numbers]
    try:
        known = _traced(evaluate.graph, values)
    except (RuntimeError, TypeError):  # for example, if a size depends on values
        return None
    (mask,) = next(node for node in evaluate.graph.nodes if node.op == "output").args[0]
    shape = tuple(known[mask].shape)
    source = mask
    while source.target in SPREADS:
        source = source.args[0]
    if len(shape) not in (2, 4) or source.op == "placeholder" or min(prod(shape), known[source].numel()) < LARGE:
        return None
    given = dict(zip((node for node in evaluate.graph.nodes if node.op == "placeholder"), values, strict=True))
    rows = _Rows({node: tuple(value.shape) for node, value in known.items() if isinstance(value, Tensor)}, given, shape[-2])

    def strip(begin: int, end: int) -> Tensor:
        found = evaluated(partial(rows.of, mask, begin, end), ())
        return found if found.dim() == 4 else found[None, None]

    try:
        strip(0, 1)
    except _Whole:
        return None
    return Strips((1, 1, *shape)[-4:], strip)


def _traced(graph: fx.Graph, values: Sequence[Tensor | int]) -> dict[fx.Node, Any]:
    """Returns fake values of all nodes."""
    mode, known = FakeTensorMode(), dict[fx.Node, Any]()
    given = iter(values)
    with torch.no_grad(), mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                value = next(given)
                known[node] = mode.from_tensor(value) if isinstance(value, Tensor) else value
            elif node.op == "call_function":
                known[node] = _applied(node, known.__getitem__)
    return known


def _applied(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    return function_of(node)(*args, **kwargs)


class _Rows:
    """Computes values of an expression for some queries. Queries are the last dimension but one.

    shapes   the shapes of its tensors
    whole    the values that are known for all queries: at first, only the leaves
    queries  the number of all queries
    """

    def __init__(self, shapes: dict[fx.Node, tuple[int, ...]], whole: dict[fx.Node, Any], queries: int) -> None:
        self._shapes, self._whole, self._queries = shapes, whole, queries

    def of(self, node: fx.Node, begin: int, end: int) -> Tensor:
        """Returns a node's value for queries [begin, end). Raises _Whole if that needs other queries, too."""
        shape = self._shapes[node]
        if len(shape) < 2 or shape[-2] != self._queries:
            raise _Whole
        if node in self._whole or prod(shape) < LARGE:
            found: Tensor = self._all(node)
            return found.narrow(-2, begin, end - begin)
        of_strip = (*shape[:-2], end - begin, shape[-1])

        def spread(given: Any) -> Any:
            """Returns the strip of an argument that is broadcast to the shape of the result."""
            if not isinstance(given, fx.Node) or given not in self._shapes:
                return self._all(given) if isinstance(given, fx.Node) else given
            own = self._shapes[given]
            return self.of(given, begin, end) if len(own) > 1 and own[-2] == self._queries else self._all(given)

        target: Any = node.target
        if target in _CONVERTS or torch.Tag.pointwise in target.tags:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), spread)
            result: Tensor = target(*args, **kwargs)
            return result.expand(of_strip)
        if target is aten.expand.default:
            return spread(node.args[0]).expand(of_strip)
        if target in SPREADS and self._shapes[arguments(node)[0]][-2:] == shape[-2:]:
            return spread(node.args[0]).reshape(of_strip)
        if target is aten.index.Tensor and len(arguments(node)[1]) == len(self._shapes[arguments(node)[0]]):
            places: Any = [spread(each) for each in arguments(node)[1]]
            if all(place is not None for place in places):
                return target(self._all(node.args[0]), places).expand(of_strip)
        if target is aten.full.default:
            return target(of_strip, *node.args[1:], **node.kwargs)
        raise _Whole

    def _all(self, node: Any) -> Any:
        """Returns a node's value for all queries. Raises _Whole if it is as large as a mask."""
        if node not in self._whole:
            if prod(self._shapes.get(node, ())) >= LARGE:
                raise _Whole
            self._whole[node] = _applied(node, self._all)
        return self._whole[node]
