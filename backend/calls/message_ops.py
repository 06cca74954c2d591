"""What message passing becomes in the rewritten graph. The edge list is sorted when it is new, and checked then.

    gossamer::aggregate(x, leaves, numbers, weight, size, key)        [sources, *trail]  →  [size, *trail]
    gossamer::edge_products(a, b, leaves, numbers, edges, key)        [nodes, heads, features] twice  →  [edges, heads]
    gossamer::attend(values, …, leaves, numbers, targets, scale, slope, dropout, key)      attend_edges, with edges as they come
        [sources, heads, features]  →  [targets, heads, features], and what attend_backward needs of the softmax
    gossamer::extreme(x, leaves, numbers, size, kind, key)            [sources, features]  →  [size, features], "max" or "min"
    gossamer::structure(leaves, numbers, size, key)                   a value that depends on the structure alone

`leaves` and `numbers` are what the edge list is computed from, `key` is the hash under which this process knows how.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from gossamer.backend.graph.expressions import Expression, evaluated
from gossamer.backend.report.options import Verify
from gossamer.dialects.errors import CompileError
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.sparsity.edges.edge_attention import NAMES
from gossamer.sparsity.edges.edge_extremes import extremes, extremes_backward
from gossamer.sparsity.edges.sorted_edges import SortedEdges

T = TypeVar("T")

ATTENDED = tuple(name for name in NAMES if name != "weight")
"""The terms of `attend`, in the order of its arguments."""


@dataclass(eq=False)
class Remembered(Generic[T]):
    """What was made of tensors, kept until they change or die.

    compares  whether their values are compared on every call, not only their versions
    """

    compares: bool = False
    _entries: dict[Any, tuple[list[weakref.ref[torch.UntypedStorage]], list[int | Tensor], T]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, leaves: Sequence[Tensor], more: Sequence[int], make: Callable[[], T]) -> T:
        """What `make` returns for these tensors and numbers; called once as long as they are the same."""
        key = (*[(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves], *more)
        with self._lock:
            known = self._entries.get(key)
            if known is not None and _same_storages(known[0], leaves) and all(map(_unchanged, leaves, known[1])):
                return known[2]
            # Inference tensors count no versions.
            states = [leaf.clone() if self.compares or leaf.is_inference() else leaf._version for leaf in leaves]
            made = make()
            drop = partial(self._entries.pop, key)  # the reference is what pop returns where nothing is left to drop
            storages = [weakref.ref(leaf.untyped_storage(), drop) for leaf in leaves]
            self._entries[key] = storages, states, made
            return made


def _same_storages(storages: Sequence[Any], leaves: Sequence[Tensor]) -> bool:
    return all(ref() is leaf.untyped_storage() for ref, leaf in zip(storages, leaves, strict=True))


def _unchanged(leaf: Tensor, state: int | Tensor) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(leaf, state)
    return not leaf.is_inference() and leaf._version == state


@dataclass(eq=False)
class _Edges:
    """A sorted edge list, with the weights that belong to it."""

    sorted: SortedEdges
    weight: Tensor | None
    mean: bool
    _values: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values of the matrix where all are known before."""
        known = self._values.get(dtype)
        if known is None:
            ones = torch.ones_like(self.sorted.coordinates, dtype=dtype)
            weight = ones if self.weight is None else self.weight.to(dtype)
            known = self._values[dtype] = self.weighted(weight, 1)
        return known

    def weighted(self, weight: Tensor, heads: int) -> Tensor:
        """The values of the matrix of so many heads for weights [edges, heads]."""
        expanded = self.sorted.with_heads(heads)
        values = expanded.sorted(weight.flatten())
        return values / expanded.degrees.repeat_interleave(expanded.degrees) if self.mean else values


@dataclass(eq=False)
class EdgeList:
    """How edge lists are computed from their leaves: sources (None: edges themselves), targets, and weights if known."""

    evaluate: Callable[..., Any]
    mean: bool
    _known: Remembered[_Edges]

    def __reduce__(self) -> tuple[Any, ...]:
        return EdgeList.of, (self.evaluate, self.mean, self._known.compares)

    @classmethod
    def of(cls, evaluate: Callable[..., Any], mean: bool, compares: bool) -> "EdgeList":
        """One that remembers nothing yet."""
        return cls(evaluate, mean, Remembered(compares))

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int], sources: int, targets: int) -> _Edges:
        """The sorted edge list for these leaves and numbers of nodes. FormatError if an edge is out of bounds."""

        def make() -> _Edges:
            source, target, weight = evaluated(self.evaluate, leaves, numbers)
            assert target is not None
            target = target.flatten()
            source = torch.arange(target.numel(), device=target.device) if source is None else source.flatten()
            weight = None if weight is None else _own(weight.flatten(), leaves)
            return _Edges(SortedEdges.of(source, target, sources, targets), weight, self.mean)

        return self._known.get(leaves, (*numbers, sources, targets), make)


@dataclass(eq=False)
class StructureValue:
    """How a value that depends on the structure alone is computed."""

    evaluate: Callable[..., Any]
    dtype: torch.dtype
    _known: Remembered[Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        return StructureValue.of, (self.evaluate, self.dtype, self._known.compares)

    @classmethod
    def of(cls, evaluate: Callable[..., Any], dtype: torch.dtype, compares: bool) -> "StructureValue":
        """One that remembers nothing yet."""
        return cls(evaluate, dtype, Remembered(compares))

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
        """The value for these leaves; not to be written to."""

        def make() -> Tensor:
            (value,) = evaluated(self.evaluate, leaves, numbers)
            assert value is not None
            return _own(value, leaves)

        return self._known.get(leaves, numbers, make)


def _own(value: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """The value in memory of its own: what is kept for a leaf must not keep it alive."""
    shared = any(value.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() for leaf in leaves)
    return value.clone() if shared else value


_lists: dict[str, EdgeList] = {}
_values: dict[str, StructureValue] = {}


def edge_list(expression: Expression, verify: Verify, mean: bool = False) -> str:
    """The key under which the operations find this edge list."""
    key = f"{expression.key}-{verify}{'-mean' if mean else ''}"
    _lists.setdefault(key, EdgeList.of(expression.evaluate, mean, verify == "full"))
    return key


def structure_value(expression: Expression, verify: Verify, dtype: torch.dtype) -> str:
    """The key under which the operation finds this value."""
    key = f"{expression.key}-{verify}-{dtype}"
    _values.setdefault(key, StructureValue.of(expression.evaluate, dtype, verify == "full"))
    return key


def _aggregate(x: Tensor, leaves: list[Tensor], numbers: list[int], weight: Tensor | None, size: int, key: str) -> Tensor:
    edges = _known(_lists, key).current(leaves, numbers, x.shape[0], size)
    trail = x.shape[1:]
    heads = prod(weight.shape[1:]) if weight is not None else 1
    rows = x.contiguous().view(x.shape[0], heads, prod(trail) // heads)
    values = edges.weighted(weight, heads) if weight is not None else edges.values(x.dtype)
    return edges.sorted.sums(rows, values).view(size, *trail)


def _aggregate_meta(x: Tensor, leaves: list[Tensor], numbers: list[int], weight: Any, size: int, key: str) -> Tensor:
    return x.new_empty((size, *x.shape[1:]))


def _edge_products(a: Tensor, b: Tensor, leaves: list[Tensor], numbers: list[int], edges: int, key: str) -> Tensor:
    found = _known(_lists, key).current(leaves, numbers, b.shape[0], a.shape[0])
    return found.sorted.products(a.contiguous(), b.contiguous())


def _edge_products_meta(a: Tensor, b: Tensor, leaves: list[Tensor], numbers: list[int], edges: int, key: str) -> Tensor:
    return a.new_empty((edges, a.shape[1]))


def _attend(values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    edges, terms, numbers = _attention(values, *rest)
    found: tuple[Tensor, Tensor] = torch.ops.gossamer.attend_edges.default(edges.positions, edges.coordinates, *terms, *numbers)
    return found


def _attend_meta(values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    targets, (heads, features) = rest[-5], values.shape[1:]
    return values.new_empty((targets, heads, features)), values.new_empty((targets, 2, heads))


def _attend_backward(gradient: Tensor, out: Tensor, statistics: Tensor, *rest: Any) -> list[Tensor]:
    *given, needs, key = rest
    edges, terms, numbers = _attention(*given, key)
    at, weight = ATTENDED.index("edge"), NAMES.index("weight")
    found = torch.ops.gossamer.attend_edges_backward.default(
        gradient.contiguous(), out, statistics, edges.positions, edges.coordinates, *terms, *numbers,
        [*needs[:weight], False, *needs[weight:]],
    )  # fmt: skip
    if needs[at]:
        place = sum(needs[:at])
        found[place] = edges.unsorted(found[place])
    return list(found)


def _attend_backward_meta(gradient: Tensor, out: Tensor, statistics: Tensor, *rest: Any) -> list[Tensor]:
    terms, needs = rest[: len(ATTENDED)], rest[-2]
    return [term.new_empty(term.shape) for term, needed in zip(terms, needs, strict=True) if needed]


def _attention(*arguments: Any) -> tuple[SortedEdges, list[Tensor | None], list[Any]]:
    """The edges, and the terms and numbers of `attend_edges`, for those of `attend`."""
    *given, leaves, numbers, targets, scale, slope, dropout, key = arguments
    terms, seed = dict(zip(ATTENDED, given, strict=False)), given[-1]
    edges = _known(_lists, key).current(leaves, numbers, terms["values"].shape[0], targets).sorted
    if terms["edge"] is not None:
        terms["edge"] = edges.sorted(terms["edge"])
    return edges, [terms.get(name) for name in NAMES], [seed, scale, slope, dropout]


def _extreme(x: Tensor, leaves: list[Tensor], numbers: list[int], size: int, kind: str, key: str) -> Tensor:
    edges = _known(_lists, key).current(leaves, numbers, x.shape[0], size).sorted
    found: Tensor = extremes(edges.positions, edges.coordinates, x, kind)
    return found


def _extreme_meta(x: Tensor, leaves: list[Tensor], numbers: list[int], size: int, *_: Any) -> Tensor:
    return x.new_empty((size, x.shape[1]))


def _extreme_backward(
    gradient: Tensor, x: Tensor, y: Tensor, leaves: list[Tensor], numbers: list[int], kind: str, key: str
) -> Tensor:
    edges = _known(_lists, key).current(leaves, numbers, x.shape[0], y.shape[0]).sorted
    pattern = edges.positions, edges.coordinates
    found: Tensor = extremes_backward(*pattern, gradient.contiguous(), x, y, kind)
    return found


def _extreme_backward_meta(gradient: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _structure(leaves: list[Tensor], numbers: list[int], size: list[int], key: str) -> Tensor:
    # A graph may reuse the memory of what it was given.
    return _known(_values, key).current(leaves, numbers).clone()


def _structure_meta(leaves: list[Tensor], numbers: list[int], size: list[int], key: str) -> Tensor:
    return leaves[0].new_empty(size, dtype=_known(_values, key).dtype)


def _known(table: dict[str, T], key: str) -> T:
    try:
        return table[key]
    except KeyError:
        raise CompileError(
            f"edge list {key} is unknown here: its graph was compiled by another process, and torch's caches have brought its "
            "code here without what Gossamer keeps (call torch.compile again in this process)"
        ) from None


_LEAVES = "Tensor[] leaves, SymInt[] numbers"
_TERMS = "Tensor values, " + "".join(f"Tensor? {name}, " for name in (*ATTENDED[1:], "seed"))
_ATTEND = f"{_TERMS}{_LEAVES}, SymInt targets, float scale, float slope, float dropout"
for _name, _arguments, _result, _kernel, _meta in (
    ("aggregate", f"Tensor x, {_LEAVES}, Tensor? weight, SymInt size", "Tensor", _aggregate, _aggregate_meta),
    ("edge_products", f"Tensor a, Tensor b, {_LEAVES}, SymInt edges", "Tensor", _edge_products, _edge_products_meta),
    ("attend", _ATTEND, "(Tensor, Tensor)", _attend, _attend_meta),
    (
        "attend_backward", f"Tensor gradient, Tensor out, Tensor statistics, {_ATTEND}, bool[] needs",
        "Tensor[]", _attend_backward, _attend_backward_meta,
    ),
    ("extreme", f"Tensor x, {_LEAVES}, SymInt size, str kind", "Tensor", _extreme, _extreme_meta),
    (
        "extreme_backward", f"Tensor gradient, Tensor x, Tensor y, {_LEAVES}, str kind", "Tensor", _extreme_backward,
        _extreme_backward_meta,
    ),
    ("structure", f"{_LEAVES}, SymInt[] size", "Tensor", _structure, _structure_meta),
):  # fmt: skip
    LIBRARY.define(f"{_name}({_arguments}, str key) -> {_result}", tags=TAGS)
    implement(_name, _kernel)
    LIBRARY.impl(_name, _kernel, "CUDA")
    LIBRARY.impl(_name, _meta, "Meta")

aggregate = torch.ops.gossamer.aggregate.default
edge_products = torch.ops.gossamer.edge_products.default
attend = torch.ops.gossamer.attend.default
attend_backward = torch.ops.gossamer.attend_backward.default
extreme = torch.ops.gossamer.extreme.default
extreme_backward = torch.ops.gossamer.extreme_backward.default
structure = torch.ops.gossamer.structure.default


def used_in(graph: fx.Graph) -> dict[str, EdgeList | StructureValue]:
    """What the operations in a graph find by their keys."""
    operations = aggregate, edge_products, attend, attend_backward, extreme, extreme_backward, structure
    keys = [str(node.args[-1]) for node in graph.nodes if node.target in operations]
    return {key: _lists[key] if key in _lists else _values[key] for key in keys}


def restore(used: Mapping[str, EdgeList | StructureValue]) -> None:
    """Has the operations find what a graph uses that another process has compiled."""
    for key, each in used.items():
        if isinstance(each, EdgeList):
            _lists.setdefault(key, each)
        else:
            _values.setdefault(key, each)
