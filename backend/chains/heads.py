"""Finds the matrix that heads were cut out of. The matrix has one row for each token.

    %m [.., N]  →  view, slice, select, permute, expand  →  [B, H, S, D], or with its dimensions in another order

The rows of the matrix come sequence by sequence, [B, S], or position by position, [S, B]. attention.py, rotary.py and
head_norm.py call this.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from gossamer.backend.graph.fusable import is_identity
from gossamer.backend.graph.layout import Layout, follow, merged, path, spans
from gossamer.backend.graph.nodes import Size, equal
from gossamer.backend.regions.matrix_functions import Extra

Roles = tuple[int, int, int, int]
"""The dimensions of batch, heads, positions and the columns of a head."""

ROLES: tuple[Roles, ...] = ((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3))
"""The orders of dimensions in which models compute with heads: [B, H, S, D], [B, S, H, D] and [S, B, H, D]."""


@dataclass(frozen=True)
class Heads:
    """Columns of a matrix [T, columns] as heads.

    offset       the column at which the first head begins
    count        heads in the matrix, side by side. The value cut from it may repeat each of them
    by_position  whether the rows come position by position, not sequence by sequence
    """

    matrix: fx.Node
    offset: int
    count: int
    by_position: bool


@dataclass(frozen=True)
class PerHead:
    """An operation on each head of a matrix by itself, a norm or a rotation: [T, columns] → [T, heads x size].

    operation  its name: "normalize" is `kernel.normalize` in a chain and `dense_chain.normalize` in plain torch
    heads      the heads that it reads
    node       its result in the graph
    roles      which dimensions of `node` are batch, heads, positions and columns
    members    the nodes from the heads to `node`
    extras     the values that it reads besides the matrix
    """

    operation: ClassVar[str]

    heads: Heads
    node: fx.Node
    roles: Roles
    members: tuple[fx.Node, ...]
    extras: tuple[Extra, ...]

    @property
    def size(self) -> int:
        """Columns of a head."""
        size: int = self.node.meta["val"].shape[-1]
        return size

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.heads.count * self.size

    @property
    def numbers(self) -> dict[str, Any]:
        """The attributes of the operation, by name."""
        return {"heads": self.heads.count, "head_size": self.size, "offset": self.heads.offset}

    @property
    def layout(self) -> Layout:
        """The layout of `node` in the result, a matrix with all heads side by side."""
        shape = self.node.meta["val"].shape
        batch, heads, length, size = (shape[role] for role in self.roles)
        outer, inner = row_strides(batch, length, heads * size, self.heads.by_position)
        strides = dict(zip(self.roles, (outer, size, inner, 1), strict=True))
        return Layout.strided(shape, [strides[n] for n in range(4)])


def row_strides(batch: Size, length: Size, columns: Size, by_position: bool) -> tuple[Size, Size]:
    """Returns the strides from one sequence to the next, and from one position to the next, in elements of the matrix."""
    return (columns, batch * columns) if by_position else (length * columns, columns)


def cut_heads(layout: Layout | None, matrix: fx.Node, columns: int, sizes: tuple[Size, Size], roles: Roles) -> Heads | None:
    """Returns the heads of a matrix that a value of this layout has; None if it is not some columns of all tokens.

    `sizes` are batch and length. The value may repeat each head of the matrix several times in a row.
    """
    if layout is None or len(layout.dims) != 4 or not isinstance(layout.offset, int):
        return None
    batch, heads, positions, inside = (merged(layout.dims[role]) for role in roles)
    size = inside[0].size if inside else 1
    if not isinstance(size, int) or not spans(inside, size, 1):
        return None
    if heads and equal(heads[-1].stride, 0):
        heads = heads[:-1]
    count = heads[0].size if heads else 1
    if not isinstance(count, int) or not spans(heads, count, size) or layout.offset + count * size > columns:
        return None
    for by_position in (False, True):
        between = row_strides(*sizes, columns, by_position)
        if spans(batch, sizes[0], between[0]) and spans(positions, sizes[1], between[1]):
            return Heads(matrix, layout.offset, count, by_position)
    return None


def cuts(x: fx.Node, made: PerHead | None) -> Iterator[tuple[Roles, Heads, list[fx.Node]]]:
    """Yields the ways in which `x` may be all heads of a matrix, or of the result of the step `made`: the roles of its
    dimensions, the heads, and the nodes between."""
    for roles in ROLES:
        cut = cut_from(made, x, roles)
        if cut is not None and equal(cut[0].count, x.meta["val"].shape[roles[1]]):
            yield roles, *cut


def cut_from(made: PerHead | None, node: fx.Node, roles: Roles) -> tuple[Heads, list[fx.Node]] | None:
    """Returns the heads that a value was cut from, and the nodes between. `made` is the step before it, None for a matrix."""
    if made is None:
        return matrix_behind(node, roles)
    views, shape = path(node)[1:], node.meta["val"].shape
    sizes = shape[roles[0]], shape[roles[2]]
    heads = cut_heads(follow(made.layout, views), made.node, made.columns, sizes, roles)
    return None if heads is None else (heads, passed(views))


def matrix_behind(node: fx.Node, roles: Roles) -> tuple[Heads, list[fx.Node]] | None:
    """Returns the heads of the earliest matrix that a value can have been cut from, and the nodes between."""
    nodes, shape = path(node), node.meta["val"].shape
    if len(shape) != 4:
        return None
    sizes = shape[roles[0]], shape[roles[2]]
    for start, source in enumerate(nodes[:-1]):
        given, views = source.meta["val"], nodes[start + 1 :]
        columns = given.shape[-1] if given.dim() > 1 else None
        if not isinstance(columns, int) or not equal(given.numel(), sizes[0] * sizes[1] * columns):
            continue
        heads = cut_heads(follow(Layout.contiguous(tuple(given.shape)), views), source, columns, sizes, roles)
        if heads is not None:
            while len(views) > 1 and is_identity(views[0]):
                heads, views = replace(heads, matrix=views[0]), views[1:]
            return heads, passed(views)
    return None


def passed(views: list[fx.Node]) -> list[fx.Node]:
    """Returns the views, each part of a split with the node of its split before it."""
    found: list[fx.Node] = []
    for view in views:
        found += [*view.all_input_nodes, view] if view.target is operator.getitem else [view]
    return found
