"""Finds layers that a model computes expert by expert, in a loop that Dynamo has unrolled.

    for e in range(experts):                                         for e in range(experts):
        token, slot = torch.where(chosen == e)                           own = (scores * (chosen == e)).sum(-1, keepdim=True)
        y.index_add_(0, token, expert(x[token]) * scores[token, slot, None])     y = y + expert(x) * own

The weights are parts of one parameter, weight[e], or parameters of separate modules (parts.py). Dynamo traces the left loop
only under torch._dynamo.config.capture_dynamic_output_shape_ops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.gates import Between, Gate, gate_between
from gossamer.backend.experts.hits import Scored, is_tensor, scored
from gossamer.backend.experts.layers import Layer, is_zeros
from gossamer.backend.experts.parts import Part, first_parts, part_at, weights_of, whole
from gossamer.backend.experts.products import Product
from gossamer.backend.experts.routes import Routing
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import Size, arguments, equal, equal_sizes, is_backward, same, same_shape
from gossamer.backend.graph.patterns import unrounded

aten = torch.ops.aten

_ADDS = {aten.add.Tensor, aten.index_add.default, aten.index_put.default}


@dataclass(frozen=True)
class _Term:
    """The term that one expert adds to the result.

    shape   its shape if it has all tokens, None if it has those that chose the expert
    x       the tokens that the expert may choose from
    scored  the scores of its tokens
    firsts  its first products: one of gate and up together, or one of each
    hidden  the operand of `down`
    """

    shape: Sequence[Size] | None
    x: fx.Node
    scored: Scored
    firsts: tuple[Part, ...]
    hidden: fx.Node
    down: Part

    @property
    def between(self) -> Between:
        """The computation between the products."""
        return Between(tuple(part.node for part in self.firsts), self.hidden)


def loops(graph: fx.Graph) -> list[Layer]:
    """Returns the layers that are written as such loops, in their order."""
    found, seen = list[Layer](), set[fx.Node]()
    for node in reversed(graph.nodes):
        if node.target in _ADDS and node not in seen and not is_backward(node):
            layer = _loop(node, seen)
            if layer is not None:
                found.append(layer)
    return found[::-1]


def _loop(node: fx.Node, seen: set[fx.Node]) -> Layer | None:
    """Returns the layer whose last step a node is, else None. Adds its steps to `seen`."""
    terms, into = list[_Term](), node
    while isinstance(into, fx.Node):
        seen.add(into)
        found = ((_term(value, token), before) for before, token, value in _steps(into))
        step = next(((term, before) for term, before in found if term is not None and _fits(into, term, before)), None)
        if step is None:
            break
        terms.append(step[0])
        into = step[1]
    if len(terms) < 2:
        return None
    terms.sort(key=lambda term: term.scored.expert)
    first, numbers = terms[0], [term.scored.expert for term in terms]
    if numbers != list(range(len(terms))) or not all(_alike(term, first) for term in terms):
        return None
    gate, order = _gate(terms)
    if gate is None:
        return None
    emit, routing = Emitter(node), Routing(first.scored.experts)
    up = _product([[term.firsts[place] for place in order] for term in terms], emit, routing)
    down = _product([[term.down] for term in terms], emit, routing)
    added = into if isinstance(into, fx.Node) and not is_zeros(into) else None
    if up is None or down is None:
        return None
    x = first.x if all(term.x is first.x for term in terms) else whole(first.x)
    return Layer(node, added, x, routing, first.scored.scores, up, down, gate)


def _fits(node: fx.Node, term: _Term, before: Any) -> bool:
    """Whether a step adds a term to the rows of its tokens, and starts from a value of the same shape or from zeros."""
    shape, routing = node.meta["val"].shape, Routing(term.scored.experts)
    if term.shape is not None and not equal_sizes(term.shape, shape):
        return False
    if term.shape is None and not (len(shape) == 2 and equal(shape[0], routing.tokens)):
        return False
    if node.target is aten.index_put.default and not any(arguments(node)[3:]) and not routing.all_differ:
        return False  # a token would keep one of the rows that it gets from an expert
    if not isinstance(before, fx.Node):
        return not before
    return is_tensor(before) and (is_zeros(before) or same_shape(before, node))


def _alike(term: _Term, other: _Term) -> bool:
    """Whether two experts have the same tokens, choices and scores."""
    nodes = [(whole(each.x), each.scored.experts, each.scored.scores, len(each.firsts)) for each in (term, other)]
    return nodes[0] == nodes[1]


def _gate(terms: list[_Term]) -> tuple[Gate | None, tuple[int, ...]]:
    """Returns the activation of all experts, and the order that puts gate before up; (None, ()) if the experts differ."""
    found = {term.between.spelling: term.between for term in terms}
    columns = int(terms[0].hidden.meta["val"].shape[1])
    gates = {gate_between(each, columns) for each in found.values()}
    return gates.pop() if len(gates) == 1 else (None, ())


def _product(parts: list[list[Part]], emit: Emitter, routing: Routing) -> Product | None:
    """Returns the product of all experts, with their weights as one value; None if the weights do not fit together."""
    node, made = parts[0][0].node, weights_of(parts, emit)
    if made is None:
        return None
    weight, bias, pieces = made
    return Product(node, node, node, None, weight, parts[0][0].turned, bias, routing, None, None, False, pieces)


def _term(value: Any, token: fx.Node | None) -> _Term | None:
    """Returns the term that a value is: the result of an expert times scores, for its tokens or for all; else None."""
    value = unrounded(value)
    if not isinstance(value, fx.Node) or value.target is not aten.mul.Tensor:
        return None
    for result, weight in (arguments(value), arguments(value)[::-1]):
        if not is_tensor(result) or not is_tensor(weight):
            continue
        found, down = scored(weight, token), part_at(unrounded(result))
        if found is None or down is None or not _is_row_by_row(value, result, weight):
            continue
        firsts = first_parts(down.x)
        rows = {_rows(part.x, token) for part in firsts}
        x = rows.pop() if len(rows) == 1 else None
        if x is None or len(firsts) > 2 or not equal(x.meta["val"].shape[0], Routing(found.experts).tokens):
            continue
        shape = value.meta["val"].shape if token is None else None
        return _Term(shape, x, found, tuple(firsts), same(down.x), down)
    return None


def _is_row_by_row(value: fx.Node, result: Any, weight: Any) -> bool:
    """Whether a product multiplies each row of a result with one number."""
    shape = result.meta["val"].shape
    return same_shape(value, result) and equal_sizes(weight.meta["val"].shape, (*shape[:-1], 1))


def _steps(node: fx.Node) -> Iterator[tuple[Any, fx.Node | None, Any]]:
    """Yields ways to read a step: the value that it adds to, the tokens that it adds to (None for all), and the term."""
    args: Any = arguments(node)
    if node.target is aten.mul.Tensor:  # the first step of a sum without zeros
        yield None, None, node
    elif node.target is aten.add.Tensor and not node.kwargs:
        yield args[0], None, args[1]
        yield args[1], None, args[0]
    elif node.target is aten.index_add.default and args[1] == 0 and not node.kwargs:
        yield args[0], args[2], args[3]
    elif node.target is aten.index_put.default and len(args[1]) == 1:
        yield from _assigned(*args)


def _assigned(into: fx.Node, indices: Any, value: Any, *adds: Any) -> Iterator[tuple[Any, fx.Node | None, Any]]:
    """Yields the same for y[token] = y[token] + value, and for index_put(y, [token], value, True)."""
    if any(adds):
        yield into, indices[0], value
        return
    total = unrounded(value)
    if total.target is not aten.add.Tensor or total.kwargs:
        return
    for own, other in (arguments(total), arguments(total)[::-1]):
        read = same(own) if isinstance(own, fx.Node) else None
        if read is not None and read.target is aten.index.Tensor and arguments(read) == (into, indices):
            yield into, indices[0], other


def _rows(x: Any, token: fx.Node | None) -> fx.Node | None:
    """Returns the matrix of all tokens whose rows, all or those of an expert, a product multiplies; else None."""
    if token is None:
        return x
    x = whole(x)
    if x.target is not aten.index.Tensor:
        return None
    source, (*first, index) = arguments(x)
    if index is not token or any(each is not None for each in first):
        return None
    if first:
        source = same(source)
        if len(first) > 1 or source.target is not aten.unsqueeze.default or arguments(source)[1] != 0:
            return None
        source = arguments(source)[0]
    return source if source.meta["val"].dim() == 2 else None
