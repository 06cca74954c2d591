"""Finds the value behind copies, roundings, and views that fold batch and heads into one dimension or unfold them.

written_out.py treats [batch, heads, queries, keys] and [batch x heads, queries, keys] as the same, whatever views lead from one
to the other. `matmul` makes such views, and so does `einsum`, by way of five dimensions.
"""

from math import prod
from typing import Any

from torch import fx

from gossamer.backend.graph.layout import Layout, follow, path, spans
from gossamer.backend.graph.nodes import arguments, equal, equal_sizes, same
from gossamer.backend.graph.patterns import is_rounding


def plain(node: Any) -> fx.Node:
    """Returns the node before copies, roundings to other floats, and views that fold or unfold batch and heads."""
    while True:
        node = before = same(node)
        node = arguments(node)[0] if is_rounding(node) else _unfolded(node, (False,))[0]
        if node is before:
            return before


def operand(node: Any) -> tuple[fx.Node, bool]:
    """Returns the value of three or four dimensions that `node` is a view of, and whether `node` has its last two swapped."""
    return _unfolded(same(node), (False, True))


def _unfolded(node: fx.Node, ways: tuple[bool, ...]) -> tuple[fx.Node, bool]:
    """Returns the first value behind the views of `node` that has the same matrices, and whether they are transposed.

    `ways` are the answers that are allowed. Prefers a value of four dimensions. Returns the node itself if there is none.
    """
    nodes = path(node)
    for rank in (4, 3):
        for number, source in enumerate(nodes[:-1]):
            turned = _turned(source, nodes[number + 1 :]) if source.meta["val"].dim() == rank else None
            if turned in ways:
                return source, bool(turned)
    return node, False


def _turned(source: fx.Node, views: list[fx.Node]) -> bool | None:
    """Whether views of a stack of matrices transpose the matrices. None if they do anything else, except folding."""
    shape, last = source.meta["val"].shape, views[-1].meta["val"].shape
    layout = follow(Layout.contiguous(tuple(shape)), views)
    if layout is None or len(last) not in (3, 4) or not equal(layout.offset, 0):
        return None
    (*stack, by_row, by_column), (rows, columns) = layout.dims, shape[-2:]
    if not spans(tuple(axis for dim in stack for axis in dim), prod(shape[:-2]), rows * columns):
        return None
    if equal_sizes(last[-2:], (rows, columns)) and spans(by_row, rows, columns) and spans(by_column, columns, 1):
        return False
    return True if spans(by_row, columns, 1) and spans(by_column, rows, columns) else None
