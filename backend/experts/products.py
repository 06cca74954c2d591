"""Recognises products of rows with the weights of their experts, in both spellings that graphs have.

    grouped_mm(%rows, transpose(%w), %ends)                  rows sorted by expert; transformers' own fallback as well
    bmm(index(%w, [%ids]), unsqueeze(%rows, -1))             a copy of the weight for each row, also from einsum

A `layout` says where the elements of a value lie in a matrix [pairs, width], whatever dimensions the value has in the graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.routes import Order, Routing, ends_at, ids_at, same_dims, sorts, tokens_at
from gossamer.backend.graph.layout import Axis, Dim, Layout, follow, merged, path, spans
from gossamer.backend.graph.nodes import equal, equal_sizes

aten = torch.ops.aten

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default", "gossamer.grouped_rows.default")


@dataclass(frozen=True, eq=False)
class Operand:
    """The source of the rows that a product multiplies.

    node    the tokens [tokens, width], or a value with a row for each pair
    tokens  whether `node` has the tokens
    order   how the rows are sorted
    layout  of the operand in the matrix [tokens, width], or in [pairs, width]
    """

    node: fx.Node
    tokens: bool
    order: Order
    layout: Layout
    width: int


@dataclass(frozen=True)
class Pieces:
    """The separate weights and biases of a product, expert by expert; empty where the graph has them as one value."""

    weights: tuple[fx.Node, ...] = ()
    biases: tuple[fx.Node, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.weights or self.biases)


@dataclass(frozen=True, eq=False)
class Product:
    """A product of rows with the weights of their experts.

    node    the result, including the bias if there is one
    bare    the result without the bias
    rows    the operand as the graph has it, [pairs, columns] if it is sorted
    x       the source of the operand, if it is known
    weight  [experts, rows, columns], or [experts, columns, rows] if `turned`
    routing, order  the expert of each row; routing is None if only `ends` are known
    ends    where the rows of each expert end, if they are sorted
    flat    whether the rows of operand and result lie one after the other in the graph
    pieces  the separate weights and biases
    """

    node: fx.Node
    bare: fx.Node
    rows: fx.Node
    x: Operand | None
    weight: fx.Node
    turned: bool
    bias: fx.Node | None
    routing: Routing | None
    order: Order
    ends: fx.Node | None
    flat: bool = True
    pieces: Pieces = Pieces()

    @property
    def per_token(self) -> bool:
        """Whether the product multiplies the tokens themselves, each with all of its experts."""
        return self.order is None and self.x is not None and self.x.tokens

    @property
    def source(self) -> fx.Node:
        """The operand: the tokens, or the rows of all pairs."""
        return self.x.node if self.x is not None and self.per_token else self.rows

    @property
    def gathered(self) -> bool:
        """Whether the graph gathers the weight of each row by its expert's number: negative numbers count from the end."""
        return self.ends is None and self.x is not None

    @property
    def experts(self) -> int:
        return int(self.weight.meta["val"].shape[0])

    @property
    def outputs(self) -> int:
        return int(self.weight.meta["val"].shape[2 if self.turned else 1])

    @property
    def columns(self) -> int:
        return int(self.weight.meta["val"].shape[1 if self.turned else 2])


@dataclass(frozen=True, eq=False)
class Rows:
    """A value that has a row for each pair.

    node     the value before views
    layout   of the value after views, in a matrix [pairs, width]
    product  the product whose result it is, with or without a bias
    scores   the scores that multiplied the rows of this product
    inputs   the products that it is computed from element by element, if it is no product's result
    """

    node: fx.Node
    routing: Routing
    order: Order
    width: int
    layout: Layout
    product: Product | None = None
    scores: fx.Node | None = None
    inputs: tuple[Product, ...] = ()


def untransposed(weight: Any) -> tuple[fx.Node, bool]:
    """Returns the stored weight of a grouped product, which takes [experts, columns, rows], and whether it is stored like that,
    too.
    """
    whole = path(weight)
    source = whole[0]
    if source.meta["val"].dim() == 3 and len(whole) > 1:
        experts, rows, columns = source.meta["val"].shape
        layout = follow(Layout.contiguous(source.meta["val"].shape), whole[1:])
        wanted = (Axis(experts, rows * columns),), (Axis(columns, 1),), (Axis(rows, columns),)
        if layout is not None and not layout.offset and same_dims(layout.dims, wanted):
            return source, False
    return weight, True


def grouped(node: fx.Node, found: Mapping[fx.Node, Rows]) -> Product | None:
    """Returns the grouped product, with offsets, that a node is; else None."""
    rows, weight, *more = node.args
    ends: Any = more[0] if more else node.kwargs.get("offs")
    rest = [*more[1:], *(value for name, value in node.kwargs.items() if name != "offs")]
    if any(value is not None for value in rest) or not isinstance(ends, fx.Node) or not isinstance(rows, fx.Node):
        return None
    if rows.meta["val"].dim() != 2 or weight.meta["val"].dim() != 3:  # type: ignore[union-attr]
        return None
    stored, turned = untransposed(weight)
    ids = ends_at(ends, int(stored.meta["val"].shape[0]))
    routing = None if ids is None else ids.routing
    x = order = None
    if routing is not None:
        width = int(rows.meta["val"].shape[1])
        x = operand(rows, routing, width, found)
        sorted_rows = x is not None and x.order is not None and sorts(x.order, routing) and _is_matrix(x, routing)
        order, x = (x.order, x) if x is not None and sorted_rows else (None, None)
    if order is None:
        routing = None  # the rows may be in any order
    return Product(node, node, rows, x, stored, turned, None, routing, order, ends)


def _is_matrix(x: Operand, routing: Routing) -> bool:
    return same_dims(x.layout.dims, ((Axis(routing.pairs, x.width),), (Axis(x.width, 1),)))


def gathered(node: fx.Node, found: Mapping[fx.Node, Rows]) -> Rows | None:
    """Returns the rows of a batched product with gathered weights that a node is, else None."""
    for place in (0, 1):
        product = _gathered(node, place, found)
        if product is not None:
            return product
    return None


def _gathered(node: fx.Node, place: int, found: Mapping[fx.Node, Rows]) -> Rows | None:
    """Returns the same if the operand at this place has the weights."""
    sides: Any = node.args
    whole = path(sides[place])
    index = whole[0]
    if index.target is not aten.index.Tensor or index.args[0].meta["val"].dim() != 3:  # type: ignore[union-attr]
        return None
    indices: Any = index.args[1]
    ids = ids_at(indices[0]) if len(indices) == 1 else None
    layout = follow(Layout.contiguous(index.meta["val"].shape), whole[1:])
    if ids is None or layout is None or layout.offset or not _whole(ids.layout, ids.routing):
        return None
    weight: Any = index.args[0]
    _, a, b = weight.meta["val"].shape
    batch, *matrix = layout.dims
    free, inner = matrix if place == 0 else matrix[::-1]
    turned = not spans(inner, b, 1)
    if turned and not spans(inner, a, b):
        return None
    outputs, columns, step = (b, a, 1) if turned else (a, b, b)
    outer, own = (_of_product(dim, a * b, step, outputs) for dim in (batch, free))
    x = operand(sides[1 - place], ids.routing, columns, found)
    if outer is None or own is None or x is None or x.layout.offset or x.order is not ids.order:
        return None
    beside, *others = x.layout.dims
    summed, rest = (others[0], others[1]) if place == 0 else (others[1], others[0])
    if rest or not spans(summed, columns, 1) or not same_dims((beside,), (_of_operand(outer, outputs, x, ids.routing),)):
        return None
    if not x.tokens and any(equal(axis.stride % outputs, 0) for axis in own if outputs > 1):
        return None
    dims = (outer, own, ()) if place == 0 else (outer, (), own)
    flat = _is_flat(dims) and (x.tokens or _is_flat(x.layout.dims))
    product = Product(node, node, sides[1 - place], x, weight, turned, None, ids.routing, ids.order, None, flat)
    return Rows(node, ids.routing, ids.order, outputs, Layout(0, dims), product)


def _whole(layout: Layout, routing: Routing) -> bool:
    """Whether a layout has the experts of all pairs, each once, in one or several dimensions."""
    dims = tuple(axis for dim in layout.dims for axis in dim)
    return not layout.offset and same_dims((dims,), routing.rows.dims)


def _is_flat(dims: tuple[Dim, ...]) -> bool:
    axes = merged(axis for dim in dims for axis in dim)
    return len(axes) <= 1 and all(equal(axis.stride, 1) for axis in axes)


def _of_product(dim: Dim, size: int, step: int, outputs: int) -> Dim | None:
    """Returns the axes of gathered weights, of `size` elements each, as axes of the product; None if they do not fit."""
    axes = list[Axis]()
    for axis in dim:
        if equal(axis.stride % size, 0):
            axes.append(Axis(axis.size, axis.stride // size * outputs))
        elif equal(axis.stride, step):
            axes.append(Axis(axis.size, 1))
        else:
            return None
    return tuple(axes)


def _of_operand(batch: Dim, outputs: int, x: Operand, routing: Routing) -> Dim:
    """Returns the axes that an operand must have if the product has these. A token is repeated for all of its experts."""
    axes = list[Axis]()
    for axis in batch:
        each = axis.stride // outputs
        if not x.tokens or x.order is not None:
            axes.append(Axis(axis.size, each * x.width))
        elif equal(axis.size, routing.pairs) and equal(each, 1):
            axes += [Axis(routing.tokens, x.width), Axis(routing.top, 0)]
        elif equal(axis.size, routing.tokens) and equal(each, routing.top):
            axes.append(Axis(axis.size, x.width))
        else:
            axes.append(Axis(axis.size, 0))
    return tuple(axis for axis in axes if not equal(axis.size, 1))


def operand(node: Any, routing: Routing, width: int, found: Mapping[fx.Node, Rows]) -> Operand | None:
    """Returns the source of the rows of a product, if it is known, else None."""
    whole = path(node)
    rows = found.get(whole[0])
    if rows is not None and rows.routing == routing and rows.width == width:
        layout = follow(rows.layout, whole[1:])
        return None if layout is None else Operand(rows.node, False, rows.order, layout, width)
    return _gathered_tokens(whole, routing, width) or _tokens(whole, routing, width)


def _tokens(whole: list[fx.Node], routing: Routing, width: int) -> Operand | None:
    """Returns the tokens that these nodes are views of: the last value with one row for each token."""
    for number in range(len(whole) - 1, -1, -1):
        if equal_sizes(whole[number].meta["val"].shape, (routing.tokens, width)):
            layout = follow(Layout.contiguous(whole[number].meta["val"].shape), whole[number + 1 :])
            return None if layout is None else Operand(whole[number], True, None, layout, width)
    return None


def _gathered_tokens(whole: list[fx.Node], routing: Routing, width: int) -> Operand | None:
    """Returns the tokens that these nodes are views of, gathered once for each pair."""
    root = whole[0]
    if root.target is not aten.index.Tensor:
        return None
    x: Any = root.args[0]
    indices: Any = root.args[1]
    if len(indices) != 1 or not equal_sizes(x.meta["val"].shape, (routing.tokens, width)):
        return None
    of_tokens, order = tokens_at(indices[0], routing)
    natural = Layout(0, ((Axis(routing.tokens, width), Axis(routing.top, 0)), (Axis(width, 1),)))
    start = natural if order is None else Layout.contiguous(root.meta["val"].shape)
    layout = follow(start, whole[1:]) if of_tokens else None
    return None if layout is None else Operand(x, True, order, layout, width)
