"""Recognises message passing in graphs: rows gathered by an edge list, weighted, and summed by an edge list.

    aggregation   scatter_add(zeros, 0, %target, mul(%weight, index_select(%x, 0, %source)))     A @ x        SpMM
    edge products sum(mul(index_select(%a, 0, %target), index_select(%b, 0, %source)), -1)       at edges     SDDMM
    maxima        scatter_reduce(zeros, 0, %target, index_select(%x, 0, %source), "amax", include_self=False)

It knows every form that eager code, autograd and decompositions use:

gathers   `index_select`, `index`, `gather`, `embedding`
scatters  `scatter_add`, `index_add`, `index_put`, `scatter_reduce`, `index_reduce`
weights   by multiplication or division, one for all features or one for each head, and times a number

The same forms occur in the backward pass: the gradient of a gather is a scatter, the gradient of a scatter is a gather, and the
gradient of weights is an edge product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.device import has_kernels
from gossamer.backend.edges.spelling import rows_of
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import (
    arguments,
    as_long,
    equal_sizes,
    in_training,
    is_backward,
    of_tensors,
    same,
    same_dtype,
    same_shape,
)
from gossamer.runtime.torch_internals import statically_known_true
from gossamer.sparsity.edges.edge_extremes import MOST_FEATURES

aten = torch.ops.aten

SCATTERS = {
    aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default, aten.index_put.default,
    aten._unsafe_index_put.default, aten.index_reduce.default,
}  # fmt: skip
"""Operations that sum by an index."""

_REDUCTIONS = (aten.scatter_reduce.two, aten.index_reduce.default)
_KINDS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}
EXTREMES = ("max", "min")

_FAR = 1e6
"""Numbers this far from 1 stay where they are: products of several would overflow."""

_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default}
"""Operations that multiply rows with weights or numbers."""


_WRAPPING = {aten.index.Tensor, aten.index_put.default, aten._unsafe_index_put.default}
"""Operations for which negative nodes count from the end. The others refuse negative nodes."""


def identity(index: fx.Node, structure: Structure) -> tuple[Any, ...]:
    """Returns a key that is the same for all nodes that compute the same edge list."""
    expression = structure.cut(rows_of(index))
    return expression.key, expression.leaves, expression.numbers


class EdgeIndex:
    """An edge list that can be compared with other nodes. If it is None, for the edges themselves, no node equals it."""

    def __init__(self, node: fx.Node | None, structure: Structure) -> None:
        self._structure = structure
        self._known = None if node is None else identity(node, structure)

    def is_(self, node: fx.Node | None) -> bool:
        """Whether a node computes the same edge list."""
        return node is not None and identity(node, self._structure) == self._known


@dataclass(frozen=True)
class Gather:
    """Rows of a tensor, one for each edge.

    x      [nodes, ...]
    index  the node of each edge, an integer vector up to dimensions of size 1; None if x itself has a row for each edge
    wraps  whether negative nodes count from the end
    """

    x: fx.Node
    index: fx.Node | None
    wraps: bool = False


@dataclass(frozen=True)
class Factor:
    """A factor of a message, [edges, ...], with sizes of 1 where all features have the same factor.

    inverse  whether it divides the message
    """

    node: fx.Node
    inverse: bool = False


@dataclass(frozen=True)
class Aggregation:
    """The sum, mean, maximum or minimum of messages over the edges of each target, times a number.

    node     the scatter
    target   the target of each edge
    gather   the gathered rows; None if `message` is no product of gathered rows and weights
    factors  the weights that multiply the gathered rows
    message  the summed values, [edges, *trail]
    base     the tensor that the sums are added to, None for zeros
    size     the number of targets: an integer or a node
    kind     "sum", "mean", "max" or "min"; all are 0 for a target without edges
    scale    the number
    """

    node: fx.Node
    target: fx.Node
    gather: Gather | None
    factors: tuple[Factor, ...]
    message: fx.Node
    base: fx.Node | None
    size: Any
    kind: str
    scale: float

    @property
    def edges(self) -> tuple[fx.Node | None, fx.Node]:
        """The source of each edge, None if the edges themselves are the sources; and the target of each edge."""
        return self.gather.index if self.gather else None, self.target

    @property
    def wraps(self) -> tuple[bool, bool]:
        """Whether negative sources and targets count from the end."""
        return self.gather is not None and self.gather.wraps, self.node.target in _WRAPPING

    @property
    def shape(self) -> tuple[Any, Any]:
        """The sizes of the sparse matrix of this product."""
        return self.node.meta["val"].shape[0], self.source.meta["val"].shape[0]

    @property
    def plain(self) -> bool:
        """Whether it is only the sum of `message`."""
        return self.base is None and self.kind == "sum" and bool(self.node.kwargs.get("alpha", 1) == 1)

    @property
    def source(self) -> fx.Node:
        """The tensor whose rows are summed."""
        return self.gather.x if self.gather else self.message


@dataclass(frozen=True)
class EdgeProducts:
    """The dot product of two gathered rows for each edge and head, times a number.

    node     the sum over features
    product  the elementwise product that is summed
    kept     the number of leading dimensions that the sum keeps
    scale    the number
    """

    node: fx.Node
    left: Gather
    right: Gather
    product: fx.Node
    kept: int
    scale: float

    @property
    def edges(self) -> tuple[fx.Node | None, fx.Node]:
        """The source and the target of each edge."""
        assert self.left.index is not None
        return self.right.index, self.left.index

    @property
    def wraps(self) -> tuple[bool, bool]:
        """Whether negative sources and targets count from the end."""
        return self.right.wraps, self.left.wraps

    @property
    def shape(self) -> tuple[Any, Any]:
        """The sizes of the sparse matrix that has the products as its entries."""
        return self.left.x.meta["val"].shape[0], self.right.x.meta["val"].shape[0]

    @property
    def message(self) -> fx.Node:
        """The tensor with a row for each edge."""
        return self.product


Messages = Aggregation | EdgeProducts


def gather_at(node: fx.Node, structure: Structure) -> Gather | None:
    """Returns the gather that a node is, maybe behind views of its rows; else None."""
    node = rows_of(node)
    args: tuple[Any, ...] = node.args
    match node.target:
        case aten.index_select.default if _first(node, args[1]):
            x, _, index = args
        case aten.index.Tensor if len(args[1]) == 1:
            x, (index,) = args
        case aten.gather.default if _first(node, args[1]) and _same_trail(args[0], node):
            x, index = args[0], repeated(args[2])
        case aten.embedding.default if not _has_own_gradient(node):
            x, index = args[:2]
        case _:
            return None
    if not isinstance(index, fx.Node) or index not in structure or x in structure or not _is_edge_list(index):
        return None
    if not _together(index, x):
        return None
    return Gather(x, index, node.target in _WRAPPING)


def aggregation_at(node: fx.Node, structure: Structure) -> Aggregation | None:
    """Returns the aggregation that a node is, else None."""
    args: tuple[Any, ...] = node.args
    match node.target:
        case aten.scatter_add.default | aten.scatter_reduce.two if _first(node, args[1]) and same_shape(args[2], args[3]):
            base, index, message = args[0], repeated(args[2]), args[3]
        case aten.index_add.default | aten.index_reduce.default if _first(node, args[1]):
            base, _, index, message = args[:4]
        case aten.index_put.default | aten._unsafe_index_put.default if args[3:] == (True,) and len(args[1]) == 1:
            base, (index,), message = args[:3]
        case _:
            return None
    size, value, alpha = zeros_of(base), node.meta["val"], node.kwargs.get("alpha", 1)
    kind = _KINDS.get(args[4]) if node.target in _REDUCTIONS else "sum"
    alone = node.target in _REDUCTIONS and not node.kwargs.get("include_self", True)
    if kind is None or not isinstance(alpha, int | float) or (size is None if alone else kind != "sum"):
        return None
    if alpha != 1 and not _may_come_last(alpha, node):
        return None
    if not isinstance(index, fx.Node) or index not in structure or not _is_edge_list(index) or not _together(index, node):
        return None
    if message in structure or not value.is_floating_point() or not has_kernels(value.device) or _is_empty(value):
        return None
    if not _same_trail(message, node) or not as_long(message, index) or (kind in EXTREMES and not _has_extremes(node)):
        return None
    root, gather, factors, scale = _message(message, structure)
    if kind in EXTREMES and (factors or scale != 1):
        root, gather, factors, scale = message, None, (), 1.0
    return Aggregation(node, index, gather, factors, root, base if size is None else None, size, kind, scale * alpha)


def _has_extremes(node: fx.Node) -> bool:
    """Whether kernels exist for the maxima or minima that a node computes."""
    value = node.meta["val"]
    features = value.shape[1:].numel()
    known = value.dtype in (torch.float32, torch.float64) and value.is_cpu and not is_backward(node)
    return known and isinstance(features, int) and 0 < features <= MOST_FEATURES


def edge_products_at(node: fx.Node, structure: Structure) -> EdgeProducts | None:
    """Returns the edge products that a node is, else None."""
    if node.target is not aten.sum.dim_IntList:
        return None
    product = same(node.args[0])
    if product.target is not aten.mul.Tensor or not of_tensors(product):
        return None
    value = product.meta["val"]
    over = [dim % value.dim() for dim in arguments(node)[1] or range(value.dim())]
    kept = value.dim() - len(over)
    if kept < 1 or sorted(over) != list(range(kept, value.dim())):
        return None
    if node.meta["val"].dtype != value.dtype or not value.is_floating_point() or _is_empty(value):
        return None
    scale, factors = _factors(product)
    alike = [f.node for f in factors if not f.inverse and same_shape(f.node, product) and same_dtype(f.node, product)]
    if not len(alike) == len(factors) == 2:
        return None
    left, right = (gather_at(factor, structure) for factor in alike)
    return EdgeProducts(node, left, right, product, kept, scale) if left and right else None


def _message(message: fx.Node, structure: Structure) -> tuple[fx.Node, Gather | None, tuple[Factor, ...], float]:
    """Returns a message as a product: the node with the product's shape, the gathered rows, the weights, and a number.

    If it is no such product, returns the message itself without rows.
    """
    root = rows_of(message) if rows_of(message).target in _PRODUCTS else message
    scale, factors = _factors(root)
    for at, factor in enumerate(factors):
        gather = gather_at(factor.node, structure) if not factor.inverse and same_shape(factor.node, root) else None
        if gather is None or not same_dtype(gather.x, root):
            continue
        rest = [Factor(unexpanded(f.node), f.inverse) for f in factors[:at] + factors[at + 1 :]]
        if all(weighs(f.node, root) for f in rest):
            return root, gather, tuple(rest), scale
    return message, None, (), 1.0


def _factors(node: fx.Node, inverse: bool = False) -> tuple[float, list[Factor]]:
    """Returns the product that a node computes, as a number and factors. Numbers that may not come last stay in factors."""
    node = same(node)
    if node.target not in _PRODUCTS:
        return 1.0, [Factor(node, inverse)]
    left, right = (*arguments(node), -1.0)[:2]
    over = inverse ^ (node.target in (aten.div.Tensor, aten.div.Scalar))
    if isinstance(right, int | float) and _may_come_last(right, node):
        number, factors = _factors(left, inverse)
        return number / right if over else number * right, factors
    if not of_tensors(node):
        return 1.0, [Factor(node, inverse)]
    (one, some), (other, more) = _factors(left, inverse), _factors(right, over)
    return one * other, some + more


def _may_come_last(number: float, node: fx.Node) -> bool:
    """Whether a sum may be multiplied by a number, or divided by it, in place of its terms.

    Not in f16, where a sum may overflow before it is scaled. Not if a sum of nothing, which is 0, may become NaN.
    """
    return node.meta["val"].dtype != torch.float16 and 1 / _FAR <= abs(number) <= _FAR


def weighs(factor: fx.Node, root: fx.Node) -> bool:
    """Whether a factor has one number for each edge, or for each edge and head: first sizes of the messages, then 1."""
    value, of = factor.meta["val"], root.meta["val"]
    if value.dim() != of.dim() or value.dtype != of.dtype or not as_long(factor, root):
        return False
    ones = [statically_known_true(size == 1) for size in value.shape[1:]]
    leading = ones.index(True) if True in ones else len(ones)
    if all(ones):
        return True
    whole = all(statically_known_true(p == q) for p, q in zip(value.shape[1 : 1 + leading], of.shape[1:], strict=False))
    return whole and all(ones[leading:]) and leading < len(ones)


def zeros_of(base: Any) -> Any:
    """Returns the first size of a tensor of zeros; None for any other tensor."""
    if base.target is aten.zeros.default or (base.target is aten.full.default and base.args[1] == 0):
        return base.args[0][0]
    return None


def repeated(index: Any) -> fx.Node | None:
    """Returns the edge list that an index repeats for every feature, as scatter and gather require; None for other indices."""
    if _is_edge_list(index):
        return index
    source = index.args[0] if index.target in (aten.expand.default, aten.repeat.default) else None
    if source is None or source.meta["val"].dim() != index.meta["val"].dim():  # new dimensions come first
        return None
    return source if _is_edge_list(source) and as_long(source, index) else None


def _has_own_gradient(embedding: fx.Node) -> bool:
    """Whether the gradient of an embedding is not that of a gather: 0 for padding, scaled by frequency, or sparse."""
    padding, others = arguments(embedding)[2:3], arguments(embedding)[3:]
    return (any(row >= 0 for row in padding) or any(others)) and in_training(embedding.graph)


def unexpanded(node: fx.Node) -> fx.Node:
    source: Any = node.args[0] if node.target is aten.expand.default else node
    return source if source.meta["val"].dim() == node.meta["val"].dim() and as_long(source, node) else node


def _is_edge_list(index: Any) -> bool:
    value = index.meta["val"]
    integers = value.dtype in (torch.int64, torch.int32)
    return integers and value.dim() >= 1 and all(statically_known_true(size == 1) for size in value.shape[1:])


def _is_empty(rows: torch.Tensor) -> bool:
    """Whether rows have no elements. Then there is nothing to sum."""
    return any(statically_known_true(size == 0) for size in rows.shape[1:])


def _together(a: Any, b: Any) -> bool:
    """Whether an index and a tensor are on one device. Torch allows others."""
    return bool(a.meta["val"].device == b.meta["val"].device)


def _first(node: fx.Node, dim: Any) -> bool:
    return bool(dim % max(node.meta["val"].dim(), 1) == 0)


def _same_trail(a: Any, b: Any) -> bool:
    return equal_sizes(a.meta["val"].shape[1:], b.meta["val"].shape[1:])
