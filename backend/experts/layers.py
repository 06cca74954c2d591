"""Finds whole layers of a mixture of experts in a graph: gate and up, an activation, down, and the weighted sum over the
experts.

    %sums = grouped_mm(%sorted, %gate_up, %ends)              down to
    %each = grouped_mm(silu(%gate) * %up, %down, %ends)           →   Layer(x, routing, scores, up, down, "silu", "halves")
    %y = sum(view(index(%each * %scores, [%inverse]), ...), [1])

`Mixtures` walks over the graph once. For each value that has a row for each pair of a token and an expert, it notes where the
rows are (`Rows`). gates.py recognises the activation between the products by its values.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.gates import Gate, gate_at
from gossamer.backend.experts.products import GROUPED, Product, Rows, gathered, grouped
from gossamer.backend.experts.routes import Order, Routing, ids_at, inverts, order_at, same_dims, tokens_at
from gossamer.backend.graph.fusable import ELEMENTWISE
from gossamer.backend.graph.layout import Axis, Dim, Layout, follow, path, spans
from gossamer.backend.graph.nodes import arguments, equal, equal_sizes, is_backward
from gossamer.backend.graph.patterns import CONVERTS, is_rounding, number_of

aten = torch.ops.aten

_SUMS = {aten.index_add.default, aten.scatter_add.default, aten.index_put.default}
_BRINGS_BACK = {aten.index.Tensor, aten.index_copy.default, aten.index_put.default}


@dataclass(frozen=True)
class Layer:
    """One mixture of experts.

    node    the result [tokens, outputs], maybe in more dimensions
    added   the value that the result is added to, None for zeros
    x       the tokens [tokens, columns], maybe in more dimensions
    scores  the scores of all pairs, flat in their natural order
    """

    node: fx.Node
    added: fx.Node | None
    x: fx.Node
    routing: Routing
    scores: fx.Node
    up: Product
    down: Product
    gate: Gate


class Mixtures:
    """The mixtures of experts of a graph: whole `layers`, and all `products`, both in their order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.layers, self.products = list[Layer](), list[Product]()
        self._rows: dict[fx.Node, Rows] = {}
        self._ended = set[Product]()
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and not is_backward(node):
                self._look_at(node)

    def _look_at(self, node: fx.Node) -> None:
        if str(node.target) in GROUPED:
            self._take_grouped(node)
        elif node.target is aten.bmm.default:
            rows = gathered(node, self._rows)
            if rows is not None:
                self._take(rows)
            elif self._rows:
                self._end(node, self._summed_product(node))
        elif self._rows:
            if node.target is aten.sum.dim_IntList:
                self._end(node, self._summed(node))
            elif node.target in _BRINGS_BACK and (found := self._brought_back(node)) is not None:
                self._bring_back(found)
            elif node.target in _SUMS:
                self._end(node, self._scattered(node))
            elif node.target in ELEMENTWISE:
                self._take_elementwise(node)

    def _take(self, rows: Rows) -> None:
        self._rows[rows.node] = rows
        assert rows.product is not None
        self.products.append(rows.product)

    def _take_grouped(self, node: fx.Node) -> None:
        product = grouped(node, self._rows)
        if product is None:
            return
        if product.routing is None:
            self.products.append(product)
            return
        layout = Layout.contiguous((product.routing.pairs, product.outputs))
        self._take(Rows(node, product.routing, product.order, product.outputs, layout, product))

    def _at(self, node: Any) -> Rows | None:
        """Returns the rows that a value has, with the value's layout, else None."""
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        whole = path(node)
        rows = self._rows.get(whole[0])
        layout = None if rows is None else follow(rows.layout, whole[1:])
        return None if rows is None or layout is None else replace(rows, layout=layout)

    def _take_elementwise(self, node: fx.Node) -> None:
        given = [self._at(each) for each in arguments(node)]
        known = [rows for rows in given if rows is not None]
        if not known:
            return
        if node.target in CONVERTS:
            if is_rounding(node):
                self._rows[node] = replace(known[0], node=node)
            return
        found = self._with_bias(node, given) or self._with_scores(node, given) or self._hidden(node, known)
        if found is not None:
            self._rows[node] = found
            if found.scores is not None and found.routing.top == 1 and found.order is None:
                self._end(node, (found, None))

    def _with_bias(self, node: fx.Node, given: list[Rows | None]) -> Rows | None:
        if node.target is not aten.add.Tensor or len(given) != 2 or node.kwargs or None not in given:
            return None
        place = given.index(None)
        rows, added = given[1 - place], arguments(node)[place]
        if rows is None or rows.product is None or rows.product.bias is not None or rows.scores is not None:
            return None
        whole = path(added)
        index, indices = whole[0], arguments(whole[0])[1:2]
        if index.target is not aten.index.Tensor or not _fits_bias(arguments(index)[0], rows.product):
            return None
        ids = ids_at(indices[0][0]) if len(indices[0]) == 1 else None
        if ids is None or ids.routing != rows.routing or ids.order is not rows.order:
            return None
        layout = follow(Layout.contiguous(index.meta["val"].shape), whole[1:])
        if layout is None or not same_dims(layout.dims, rows.layout.dims):
            return None
        bias: Any = arguments(index)[0]
        product = replace(rows.product, node=node, bias=bias)
        self.products[self.products.index(rows.product)] = product
        return replace(rows, node=node, product=product)

    def _with_scores(self, node: fx.Node, given: list[Rows | None]) -> Rows | None:
        if node.target is not aten.mul.Tensor or len(given) != 2 or None not in given:
            return None
        place = given.index(None)
        rows = given[1 - place]
        if rows is None or rows.product is None or rows.scores is not None:
            return None
        scores = self._scores(arguments(node)[place], rows.routing, rows.order, _without_width(rows))
        return None if scores is None else replace(rows, node=node, scores=scores)

    def _scores(self, node: Any, routing: Routing, order: Order, wanted: tuple[Dim, ...]) -> fx.Node | None:
        """Returns the value with the flat scores of all pairs, if `node` has these scores in the wanted dimensions, else None.

        Takes the last such value: views that are made again after a write have another sequence number than their gradients.
        """
        if not isinstance(node, fx.Node) or not node.meta["val"].is_floating_point():
            return None
        whole = path(node)
        shape = routing.experts.meta["val"].shape
        if order is not None:
            index, indices = whole[0], arguments(whole[0])[1:2]
            if index.target is not aten.index.Tensor or len(indices[0]) != 1 or order_at(indices[0][0]) is not order:
                return None
            layout = follow(Layout.contiguous(index.meta["val"].shape), whole[1:])
            if layout is None or not same_dims(_padded(layout, wanted), wanted):
                return None
            inner: Any = arguments(index)[0]
            column = (*routing.rows.dims, *((),) * (inner.meta["val"].dim() - 1))
            return self._scores(inner, routing, None, column)
        if same_dims(_padded(Layout.contiguous(node.meta["val"].shape), wanted), wanted):
            return node
        for number in range(len(whole) - 1, -1, -1):
            if equal_sizes(whole[number].meta["val"].shape, shape):
                layout = follow(Layout.contiguous(shape), whole[number + 1 :])
                fits = layout is not None and not layout.offset and same_dims(_padded(layout, wanted), wanted)
                return whole[number] if fits else None
        return None

    def _hidden(self, node: fx.Node, known: list[Rows]) -> Rows | None:
        first = _per_element(known[0])
        if first is None:
            return None
        inputs = dict[Product, None]()
        for rows in known:
            each = _per_element(rows)
            alike = each is not None and same_dims(each.layout.dims, first.layout.dims) and each.width == first.width
            if not alike or rows.routing != first.routing or rows.order is not first.order or rows.scores is not None:
                return None
            inputs.update(dict.fromkeys((rows.product,) if rows.product is not None else rows.inputs))
        return Rows(node, first.routing, first.order, first.width, first.layout, inputs=tuple(inputs))

    def _bring_back(self, found: Rows) -> None:
        """Notes rows that are in their natural order again."""
        self._rows[found.node] = found
        if found.scores is not None and found.routing.top == 1:
            self._end(found.node, (found, None))

    def _brought_back(self, node: fx.Node) -> Rows | None:
        """Returns rows that were read by the inverse of their order, or written to the places of their order, else None."""
        given, order_of = arguments(node), order_at
        if node.target is aten.index.Tensor:
            (value, indices), order_of = given[:2], inverts
        elif node.target is aten.index_copy.default:
            value, indices = given[3], [given[2]] if given[1] == 0 else []
        else:
            value, indices = given[2], [] if any(given[3:]) else given[1]
        rows = self._at(value)
        if rows is None or len(indices) != 1 or rows.order is None or order_of(indices[0]) is not rows.order:
            return None
        shape = rows.routing.pairs, rows.width
        matrix = Layout.contiguous(shape)
        if not same_dims(rows.layout.dims, matrix.dims) or not equal_sizes(node.meta["val"].shape, shape):
            return None
        return replace(rows, node=node, order=None, layout=matrix)

    def _summed(self, node: fx.Node) -> tuple[Rows, fx.Node | None] | None:
        rows, dims, *keeps = self._at(arguments(node)[0]), *arguments(node)[1:]
        if rows is None or rows.order is not None or rows.scores is None or any(keeps) or len(dims) != 1:
            return None
        (dim,) = dims
        left = list(rows.layout.dims)
        summed = left.pop(dim)
        return (rows, None) if spans(summed, rows.routing.top, rows.width) and _is_result(left, rows) else None

    def _summed_product(self, node: fx.Node) -> tuple[Rows, fx.Node | None] | None:
        """Recognises einsum("tko,tk->to"): a product of the rows of each token with its scores."""
        for place in (0, 1):
            rows = self._at(arguments(node)[place])
            if rows is None or rows.product is None or rows.scores is not None or rows.order is not None:
                continue
            batch, *matrix = rows.layout.dims
            free, summed = matrix if place == 0 else matrix[::-1]
            if not spans(summed, rows.routing.top, rows.width) or not _is_result([batch, free], rows):
                continue
            tokens: Dim = tuple(Axis(axis.size, axis.stride // rows.width) for axis in batch)
            slots: Dim = tuple(Axis(axis.size, 1) for axis in summed)
            wanted = (tokens, slots, ()) if place == 0 else (tokens, (), slots)
            scores = self._scores(arguments(node)[1 - place], rows.routing, None, wanted)
            if scores is not None:
                return replace(rows, scores=scores), None
        return None

    def _scattered(self, node: fx.Node) -> tuple[Rows, fx.Node | None] | None:
        """Recognises operations that add the rows to zeros, or to another value, by their tokens."""
        into: Any
        if node.target is aten.index_put.default:
            into, indices, value, *adds = arguments(node)
            if len(indices) != 1 or not any(adds):
                return None
            index: Any = indices[0]
        else:
            into, dim, index, value = arguments(node)[:4]
            if dim != 0 or node.kwargs.get("alpha", 1) != 1:
                return None
        rows = self._at(value)
        if rows is None or rows.scores is None or node.meta["val"].dim() != 2:
            return None
        if node.target is aten.scatter_add.default:
            whole = path(index)
            layout = follow(Layout.contiguous(whole[0].meta["val"].shape), whole[1:])
            if layout is None or not same_dims(layout.dims, ((Axis(rows.routing.pairs, 1),), (Axis(rows.width, 0),))):
                return None
            index = whole[0]
        of_tokens, order = tokens_at(index, rows.routing)
        matrix = Layout.contiguous((rows.routing.pairs, rows.width)).dims
        if not of_tokens or order is not rows.order or not same_dims(rows.layout.dims, matrix):
            return None
        if not equal_sizes(into.meta["val"].shape, (rows.routing.tokens, rows.width)):
            return None
        return rows, None if is_zeros(into) else into

    def _end(self, node: fx.Node, found: tuple[Rows, fx.Node | None] | None) -> None:
        """Notes the layer whose result a node is, if there is one."""
        if found is None:
            return
        rows, added = found
        down, scores = rows.product, rows.scores
        assert down is not None
        assert scores is not None
        hidden = None if down.x is None else self._rows.get(down.x.node)
        inputs = () if hidden is None else hidden.inputs or ((hidden.product,) if hidden.product is not None else ())
        if hidden is None or len(inputs) != 1 or down in self._ended or hidden.scores is not None:
            return
        (up,) = inputs
        if up.x is None or not up.x.tokens or up.routing != rows.routing or up.experts != down.experts:
            return
        dims = self._rows[up.node].layout.dims
        along = [number for number, dim in enumerate(dims) if dim and spans(dim[-1:], up.outputs, 1)]
        gate = gate_at(hidden.node, up.node, along[0], up.outputs, down.columns) if len(along) == 1 else None
        if gate is not None:
            self._ended.add(down)
            self.layers.append(Layer(node, added, up.x.node, rows.routing, scores, up, down, gate))


def is_zeros(node: fx.Node) -> bool:
    """Whether a value has only zeros."""
    return node.target in (aten.zeros_like.default, aten.new_zeros.default) or number_of(node) == 0


def _fits_bias(bias: Any, product: Product) -> bool:
    return equal_sizes(bias.meta["val"].shape, (product.experts, product.outputs))


def _is_result(dims: list[Dim], rows: Rows) -> bool:
    """Whether the dimensions left after the sum go through the tokens, and through the row of each."""
    flat: Dim = tuple(axis for dim in dims for axis in dim)
    tokens, width = rows.routing.tokens, rows.width
    return same_dims((flat,), ((Axis(tokens, rows.routing.top * width), Axis(width, 1)),))


def _without_width(rows: Rows) -> tuple[Dim, ...]:
    """Returns the dimensions of a value that has one number for each row."""
    return tuple(
        tuple(Axis(a.size, a.stride // rows.width) for a in dim if _is_pair(a, rows.width)) for dim in rows.layout.dims
    )


def _is_pair(axis: Axis, width: int) -> bool:
    return equal(axis.stride % width, 0) and (width > 1 or not equal(axis.size, 1))


def _padded(layout: Layout, wanted: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*((),) * (len(wanted) - len(layout.dims)), *layout.dims)


def _per_element(rows: Rows) -> Rows | None:
    """Returns the rows of a value that has only a part of each row, such as gates, as a matrix of their own; else None."""
    features = [axis for dim in rows.layout.dims for axis in dim if not _is_pair(axis, rows.width)]
    if len(features) != 1 or not isinstance(features[0].size, int):
        return None
    width = features[0].size
    dims = tuple(
        tuple(Axis(a.size, a.stride // rows.width * width if _is_pair(a, rows.width) else 1) for a in dim)
        for dim in rows.layout.dims
    )
    return replace(rows, layout=Layout(0, dims), width=width)
