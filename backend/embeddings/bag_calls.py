"""Recognises bags of rows in graphs, and gradients of their tables, as models and torch write them.

%b = _embedding_bag(%table, %i, %offsets, ...)                         a bag, its gradient is
%g = _embedding_bag_backward(%grad, %i, %offsets, %b[1], ...)          this

%e = embedding(%table, %i)                                             sums and means of the rows of each line of i
%y = sum(mul(%e, unsqueeze(%w, -1)), [1])
%g = embedding_dense_backward(mul(expand(unsqueeze(%grad, 1)), unsqueeze(%w, -1)), %i, ...)
"""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.graph.nodes import arguments, equal, equal_sizes, hint, only_user, same
from gossamer.runtime.torch_internals import statically_known_true
from gossamer.sparsity.bags.sparse_lookups import TYPES
from gossamer.sparsity.bags.sum_bags import WIDEST  # the import defines the operation, too

aten = torch.ops.aten

_KINDS = ("sum", "mean", "max")
_BAGS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}
_BACKWARD: dict[Any, tuple[int, int]] = {
    aten._embedding_bag_backward.default: (6, 3),
    aten._embedding_bag_dense_backward.default: (5, 2),
}
"""Operations that compute the gradient of a table, with the places of two arguments: the number of rows, and the bags of
entries.
"""
_SUM_BAGS = torch.ops.gossamer.sum_bags.default
_PUT = aten._unsafe_masked_index_put_accumulate.default
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Bags:
    """Bags of a table, or the gradient of a table from the gradient of its bags.

    node     the node that computes them
    table    the table, or the gradient of the bags
    rows, columns  the sizes of the table
    scale    the scales of the rows of a stored table
    divisor  divides the sums afterwards, or their gradients before; None for no division
    """

    node: fx.Node
    table: fx.Node
    indices: fx.Node
    offsets: fx.Node | None
    weights: fx.Node | None
    padding: int
    kind: str
    last: bool
    rows: Any
    columns: int
    scale: fx.Node | None = None
    divisor: Any = None
    keepdim: bool = False

    @property
    def alike(self) -> object:
        """A key. One call can compute all bags with the same key."""
        value, weights = self.table.meta["val"], self.weights
        held = None if weights is None else weights.meta["val"].dtype
        return value.dtype, self.columns, self.indices.meta["val"].dtype, held, self.kind, self.last, self.scale is None

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes that the bags are computed from."""
        return [each for each in (self.table, self.indices, self.offsets, self.weights, self.scale) if each is not None]

    @property
    def bytes(self) -> int:
        """The bytes of rows that the bags read; for open sizes, as at tracing."""
        value, entries = self.table.meta["val"], 1
        for size in self.indices.meta["val"].shape:
            entries *= hint(size) or 1
        return entries * int(value.shape[-1]) * int(value.itemsize)


def bags_of(node: fx.Node) -> Bags | None:
    """Returns the bags that a node computes, if our kernel can compute them, else None."""
    if node.target in _BAGS:
        names = ["table", "indices", "offsets", "by_frequency", "kind", "sparse", "weights", "last", "padding"]
        given: dict[str, Any] = dict(zip(names, (None, None, None, False, 0, False, None, False, -1), strict=True))
        given |= dict(zip(names, node.args, strict=False))
        if given["by_frequency"] or node.kwargs:
            return None
        return _taken(node, **given)
    return _stored(node) if node.target is _SUM_BAGS else _sums(node)


def _stored(node: fx.Node) -> Bags | None:
    """Returns the bags of our own operation for one stored table; one call may compute them with others."""
    tables, indices, offsets, weights, padding, kind, last, scales, columns = arguments(node)
    if len(tables) != 1 or not scales or not tables[0].meta["val"].is_cpu:
        return None
    table: fx.Node = tables[0]
    rows = (table if table.meta["val"].dim() == 2 else scales[0]).meta["val"].shape[0]
    return Bags(node, table, indices[0], offsets[0], weights[0], padding[0], kind, last, rows, columns[0], scales[0])


def _taken(
    node: fx.Node, *, table: Any, indices: Any, offsets: Any, kind: int, weights: Any, last: bool, padding: int, **_: Any
) -> Bags | None:
    rows, columns = table.meta["val"].shape
    found = Bags(node, table, indices, offsets, weights, padding, _KINDS[kind], bool(last), rows, columns)
    return found if _fits(found) else None


def _fits(bags: Bags) -> bool:
    """Whether our kernel takes these types, sizes and strides."""
    table, indices = bags.table.meta["val"], bags.indices.meta["val"]
    return (
        table.is_cpu
        and table.dtype in TYPES
        and table.dim() == 2
        and isinstance(table.shape[1], int)
        and 0 < table.shape[1] <= WIDEST
        and equal_sizes(table.stride(), (table.shape[1], 1))
        and indices.dtype in INTEGERS
        and (bags.weights is None or bags.weights.meta["val"].dtype is table.dtype)
        and (bags.offsets is None or bags.offsets.meta["val"].dtype in INTEGERS)
    )


def _sums(node: fx.Node) -> Bags | None:
    """Returns the sums or means of the rows of each line of a matrix of indices, else None."""
    if node.target not in (aten.sum.dim_IntList, aten.mean.dim) or node.kwargs or len(node.args) < 2:
        return None
    x, dims, *keepdim = arguments(node)
    if not isinstance(x, fx.Node) or x.meta["val"].dim() != 3 or list(dims or ()) not in ([1], [-2]) or only_user(x) is None:
        return None
    looked_up, weights = _weighted(x)
    if looked_up is None or looked_up.target is not aten.embedding.default:
        return None
    table, indices = arguments(looked_up)[:2]
    length, mean = indices.meta["val"].shape[1], node.target is aten.mean.dim
    by_kernel = mean and statically_known_true(length > 0)  # the kernel's mean of no rows is 0, torch's is NaN
    if mean and not by_kernel and table.meta["val"].itemsize < 4:
        return None  # f16 sums may overflow before the division
    divisor = length if mean and not by_kernel else None
    (rows, columns), keeps = table.meta["val"].shape, bool(keepdim[:1] == [True])
    kind = "mean" if by_kernel else "sum"
    found = Bags(node, table, indices, None, weights, -1, kind, False, rows, columns, None, divisor, keeps)
    return found if _fits(found) else None


def _weighted(x: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Returns a value, and the weights [lines, length, 1] that multiply it; (x, None) without weights, (None, None) if
    unknown."""
    if x.target is not aten.mul.Tensor:
        return x, None
    for value, weights in (arguments(x), arguments(x)[::-1]):
        if not isinstance(value, fx.Node) or not isinstance(weights, fx.Node):
            continue
        sizes = value.meta["val"].shape
        per_line = equal_sizes(weights.meta["val"].shape, (*sizes[:2], 1)) and not equal(sizes[2], 1)
        if per_line and only_user(value) is x:
            return value, weights
    return None, None


def gradient_of(node: fx.Node) -> Bags | None:
    """Returns the gradient of a table whose rows were summed line by line, if a node computes it and our kernel can; else
    None."""
    if node.target is aten.embedding_dense_backward.default:
        spread, indices, rows, padding, by_frequency = arguments(node)
        if by_frequency:
            return None
    elif node.target is _PUT:
        found = _put(node)
        if found is None:
            return None
        spread, indices, rows, padding = found
    else:
        return None
    if not isinstance(rows, int) or indices.meta["val"].dim() != 2:
        return None
    spread, divisor = _divided(spread)
    value, weights = _weighted(spread) if only_user(spread) is not None else (spread, None)
    grad = _spread_over_lines(value)
    if grad is None:
        return None
    columns = grad.meta["val"].shape[-1]
    found_bags = Bags(node, grad, indices, None, weights, padding, "sum", False, rows, columns, None, divisor)
    return found_bags if _fits_gradient(found_bags) else None


def _fits_gradient(bags: Bags) -> bool:
    value = bags.table.meta["val"]
    width = value.shape[-1]
    return bool(
        value.is_cpu
        and value.dtype in TYPES
        and isinstance(width, int)
        and 0 < width <= WIDEST
        and bags.indices.meta["val"].dtype in INTEGERS
        and (bags.weights is None or bags.weights.meta["val"].dtype is value.dtype)
    )


def _put(node: fx.Node) -> tuple[fx.Node, fx.Node, Any, int] | None:
    """Returns gradients, indices, rows and padding of Inductor's decomposition of embedding_dense_backward, else None."""
    zeros, mask, indices, spread = arguments(node)
    empty = zeros.target is aten.full.default and zeros.args[1] == 0
    if not empty or len(indices) != 1 or mask.target is not aten.unsqueeze.default:
        return None
    rows, padding, pending = arguments(zeros)[0][0], -1, [arguments(mask)[0]]
    while pending:
        each = pending.pop()
        if each.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
            pending += each.args
        elif each.args[0] is not indices[0]:
            return None
        elif each.target is aten.ne.Scalar and padding == -1:
            padding = each.args[1]
        elif (each.target, each.args[1]) not in ((aten.ge.Scalar, 0), (aten.lt.Scalar, rows)):
            return None
    return spread, indices[0], rows, padding


def _divided(spread: fx.Node) -> tuple[fx.Node, Any]:
    """Returns a dividend and the number that divides it; or the value itself and None."""
    if spread.target in (aten.div.Scalar, aten.div.Tensor) and only_user(spread) is not None:
        value, divisor = arguments(spread)
        is_number = not isinstance(divisor, fx.Node) or not isinstance(divisor.meta["val"], Tensor)
        if is_number and isinstance(value, fx.Node):
            return value, divisor
    return spread, None


def _spread_over_lines(value: fx.Node | None) -> fx.Node | None:
    """Returns the gradient of sums that a value repeats along its middle dimension, else None."""
    if value is None or value.target is not aten.expand.default:
        return None
    inner = arguments(value)[0]
    shape = inner.meta["val"].shape
    if len(shape) != 3 or not equal(shape[1], 1) or not equal_sizes(shape[::2], value.meta["val"].shape[::2]):
        return None
    return inner


def parts(node: fx.Node) -> dict[int, fx.Node]:
    """Returns the results of a node with several results, by their numbers."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def table_gradients(bags: Bags) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Returns the nodes that compute gradients of the table of `_embedding_bag`, and of its weights.

    Returns None if other nodes use the results that torch keeps for these gradients.
    """
    of_table, of_weights = list[fx.Node](), list[fx.Node]()
    for number, part in parts(bags.node).items():
        for user in part.users if number else ():
            if user.target in _BACKWARD and not _by_frequency(user):
                of_table.append(user)
            elif user.target is aten._embedding_bag_per_sample_weights_backward.default:
                of_weights.append(user)
            else:
                return None
    return list(dict.fromkeys(of_table)), list(dict.fromkeys(of_weights))


def _by_frequency(node: fx.Node) -> bool:
    return bool(node.args[_BACKWARD[node.target][0] + 1])


def gradient_of_bags(node: fx.Node, bags: Bags) -> Bags:
    """Returns the gradient of the table of these bags, which a node computes."""
    grad, rows = same(arguments(node)[0]), arguments(node)[_BACKWARD[node.target][0]]
    return replace(bags, node=node, table=grad, rows=rows)
