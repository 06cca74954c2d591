"""Defines the operations of message passing in a rewritten graph. If the edge list changes, it is checked and sorted again.

    gossamer::aggregate(x, leaves, numbers, weight, size, key)        [sources, *trail]  →  [size, *trail]
    gossamer::edge_products(a, b, leaves, numbers, edges, key)        [nodes, heads, features] twice  →  [edges, heads]
    gossamer::attend(leaves, numbers, targets, values, …, scale, slope, dropout, key)      attend_edges, for unsorted edges
        [sources, heads, features]  →  [targets, heads, features], and the statistics of the softmax for attend_backward
    gossamer::extreme(x, leaves, numbers, size, kind, key)            [sources, features]  →  [size, features], "max" or "min"
    gossamer::structure(leaves, numbers, size, key)                   a value that depends only on the structure

The `Computed` under `key` (computed.py) computes the edge list, or the value, from `leaves` and `numbers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.backend.graph.expressions import Expression
from gossamer.backend.report.options import Verify
from gossamer.backend.run.computed import LEAVES, Computed, compared_for, known
from gossamer.runtime.operations import Operation
from gossamer.sparsity.edges.edge_attention import NAMES
from gossamer.sparsity.edges.edge_extremes import extremes, extremes_backward
from gossamer.sparsity.edges.sorted_edges import SortedEdges


@dataclass(eq=False)
class _Edges:
    """A sorted edge list.

    weight  the weights of the edges, in their original order; None for ones
    mean    whether each target gets the mean of its edges instead of the sum
    """

    sorted: SortedEdges
    weight: Tensor | None
    mean: bool
    _values: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Returns the values of the matrix for the known weights, or ones."""
        known = self._values.get(dtype)
        if known is None:
            ones = torch.ones_like(self.sorted.coordinates, dtype=dtype)
            weight = ones if self.weight is None else self.weight.to(dtype)
            known = self._values[dtype] = self.weighted(weight, 1)
        return known

    def weighted(self, weight: Tensor, heads: int) -> Tensor:
        """Returns the values of the matrix with so many heads for weights [edges, heads]."""
        expanded = self.sorted.with_heads(heads)
        values = expanded.sorted(weight.flatten())
        return values / expanded.degrees.repeat_interleave(expanded.degrees) if self.mean else values


@dataclass(eq=False)
class EdgeList(Computed):
    """Computes edges: sources (None if each edge is its own source), targets, and weights if they are known.

    wrapping  the ends of edges whose negative nodes count from the end: "source", "target", both or none
    """

    mean: bool
    wrapping: str

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int], sources: int, targets: int) -> _Edges:
        """Returns the sorted edge list for these leaves and numbers of nodes. IndexRangeError for an edge out of bounds."""

        def make() -> _Edges:
            source, target, weight = self.values(leaves, numbers)
            target = target.flatten()
            source = torch.arange(target.numel(), device=target.device) if source is None else source.flatten()
            weight = None if weight is None else _own(weight.flatten(), leaves)
            return _Edges(SortedEdges.of(source, target, sources, targets, self.wrapping), weight, self.mean)

        found: _Edges = self.remembered(leaves, (*numbers, sources, targets), make)
        return found


@dataclass(eq=False)
class StructureValue(Computed):
    """Computes a value that depends only on the structure."""

    dtype: torch.dtype

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
        """Returns the value for these leaves. Do not write to it."""

        def make() -> Tensor:
            (value,) = self.values(leaves, numbers)
            return _own(value, leaves)

        found: Tensor = self.remembered(leaves, numbers, make)
        return found


def _own(value: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Returns the value in memory of its own, so that keeping it for a leaf does not keep the leaf alive."""
    shared = any(value.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() for leaf in leaves)
    return value.clone() if shared else value


def edge_list(expression: Expression, verify: Verify, mean: bool, wrapping: str) -> str:
    """Registers an edge list. Returns the key under which the operations find it."""
    key = f"{expression.key}-{verify}{'-mean' if mean else ''}-{wrapping}"
    EdgeList(expression.evaluate, compared_for(verify), mean, wrapping).shared(key)
    return key


def structure_value(expression: Expression, verify: Verify, dtype: torch.dtype) -> str:
    """Registers a value of the structure. Returns the key under which the operation finds it."""
    key = f"{expression.key}-{verify}-{dtype}"
    StructureValue(expression.evaluate, compared_for(verify), dtype).shared(key)
    return key


def _aggregate(x: Tensor, leaves: list[Tensor], numbers: list[int], weight: Tensor | None, size: int, key: str) -> Tensor:
    edges = known(key).current(leaves, numbers, x.shape[0], size)
    trail = x.shape[1:]
    heads = prod(weight.shape[1:]) if weight is not None else 1
    if heads == len(trail) == 1:
        return edges.sorted.times(x.contiguous(), edges.values(x.dtype) if weight is None else edges.weighted(weight, 1))
    rows = x.contiguous().view(x.shape[0], heads, prod(trail) // heads)
    values = edges.weighted(weight, heads) if weight is not None else edges.values(x.dtype)
    return edges.sorted.sums(rows, values).view(size, *trail)


def _aggregate_fake(x: Tensor, leaves: list[Tensor], numbers: list[int], weight: Any, size: int, key: str) -> Tensor:
    return x.new_empty((size, *x.shape[1:]))


def _edge_products(a: Tensor, b: Tensor, leaves: list[Tensor], numbers: list[int], edges: int, key: str) -> Tensor:
    found = known(key).current(leaves, numbers, b.shape[0], a.shape[0])
    return found.sorted.products(a.contiguous(), b.contiguous())


_OF_EDGES = ("edge", "weight")


def _attend(leaves: list[Tensor], numbers: list[int], targets: int, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *terms, key = values, *rest
    edges = known(key).current(leaves, numbers, values.shape[0], targets).sorted
    found: tuple[Tensor, Tensor] = torch.ops.gossamer.attend_edges.default(
        edges.positions, edges.coordinates, *_sorted(edges, terms)
    )
    return found


def _attend_fake(leaves: Any, numbers: Any, targets: int, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    heads, features = values.shape[1:]
    return values.new_empty((targets, heads, features)), values.new_empty((targets, 2, heads))


def _attend_backward(
    gradient: Tensor, out: Tensor, statistics: Tensor, leaves: list[Tensor], numbers: list[int], targets: int, *rest: Any
) -> list[Tensor]:
    *terms, needs, key = rest
    edges = known(key).current(leaves, numbers, terms[0].shape[0], targets).sorted
    found = torch.ops.gossamer.attend_edges_backward.default(
        gradient.contiguous(), out, statistics, edges.positions, edges.coordinates, *_sorted(edges, terms), needs
    )
    wanted = [name for name, needed in zip(NAMES, needs, strict=True) if needed]
    return [edges.unsorted(each) if name in _OF_EDGES else each for name, each in zip(wanted, found, strict=True)]


def _attend_backward_fake(
    gradient: Tensor, out: Tensor, statistics: Tensor, leaves: Any, numbers: Any, targets: int, *rest: Any
) -> list[Tensor]:
    return [term.new_empty(term.shape) for term, needed in zip(rest, rest[-2], strict=False) if needed]


def _sorted(edges: SortedEdges, terms: list[Any]) -> list[Any]:
    """Returns the terms. Those with a row for each edge are in the order of the sorted list."""
    names = (*NAMES, *[""] * (len(terms) - len(NAMES)))
    each = zip(names, terms, strict=True)
    return [edges.sorted(term) if name in _OF_EDGES and term is not None else term for name, term in each]


def _extreme(x: Tensor, leaves: list[Tensor], numbers: list[int], size: int, kind: str, key: str) -> Tensor:
    edges = known(key).current(leaves, numbers, x.shape[0], size).sorted
    found: Tensor = extremes(edges.positions, edges.coordinates, x, kind)
    return found


def _extreme_backward(
    gradient: Tensor, x: Tensor, y: Tensor, leaves: list[Tensor], numbers: list[int], kind: str, key: str
) -> Tensor:
    edges = known(key).current(leaves, numbers, x.shape[0], y.shape[0]).sorted
    pattern = edges.positions, edges.coordinates
    found: Tensor = extremes_backward(*pattern, gradient.contiguous(), x, y, kind)
    return found


def _structure(leaves: list[Tensor], numbers: list[int], size: list[int], key: str) -> Tensor:
    # A copy, because a graph may reuse the memory of its values. The fake result is contiguous.
    value: Tensor = known(key).current(leaves, numbers)
    return value.clone(memory_format=torch.contiguous_format)


def _structure_fake(leaves: list[Tensor], numbers: list[int], size: list[int], key: str) -> Tensor:
    return leaves[0].new_empty(size, dtype=known(key).dtype)


_TERMS = "Tensor values, " + "".join(f"Tensor? {name}, " for name in (*NAMES[1:], "seed"))
_ATTEND = f"{LEAVES}, SymInt targets, {_TERMS}float scale, float slope, float dropout"
aggregate = Operation(
    f"aggregate(Tensor x, {LEAVES}, Tensor? weight, SymInt size, str key) -> Tensor",
    _aggregate,
    _aggregate,
    _aggregate_fake,
).register()
edge_products = Operation(
    f"edge_products(Tensor a: T[targets heads features], Tensor b: T[sources heads features], {LEAVES}, SymInt edges, "
    "str key) -> Tensor: T[edges heads]",
    _edge_products,
    _edge_products,
).register()
attend = Operation(f"attend({_ATTEND}, str key) -> (Tensor, Tensor)", _attend, _attend, _attend_fake).register()
attend_backward = Operation(
    f"attend_backward(Tensor gradient, Tensor out, Tensor statistics, {_ATTEND}, bool[] needs, str key) -> Tensor[]",
    _attend_backward,
    _attend_backward,
    _attend_backward_fake,
).register()
extreme = Operation(
    f"extreme(Tensor x: T[sources features], {LEAVES}, SymInt size, str kind, str key) -> Tensor: T[size features]",
    _extreme,
    _extreme,
).register()
extreme_backward = Operation(
    "extreme_backward(Tensor gradient: T[size features], Tensor x: T[sources features], Tensor y: T[size features], "
    f"{LEAVES}, str kind, str key) -> Tensor: T[sources features]",
    _extreme_backward,
    _extreme_backward,
).register()
structure = Operation(
    f"structure({LEAVES}, SymInt[] size, str key) -> Tensor", _structure, _structure, _structure_fake
).register()
