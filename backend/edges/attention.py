"""Attention over edges, with its gradients, becomes one operation, whatever spells it.

    %z = leaky_relu(%a[source] + %b[target], slope)                             %r = attend(edges, %x, %b, %a, …, slope)
    %w = softmax of %z over the edges of each target                   →        %y = %r[0]
    %y = for each target the sum of %w * %x[source] over its edges
    and with them: gradients of %x, of %w, of the softmax, of %a, %b   →        attend_backward(…)

(Veličković et al., "Graph Attention Networks", 2018.) The values of the edges, one for each edge and head, are then in no
memory. The scores may be any that `scores.py` knows, and there may be dropout of the weights. In a joint graph all that reaches
the scores comes from %y, so that what the scores' gradient is summed to, and the gradient of %x, are the outputs of one
operation. If anything else depends on what is inside, all stays as it is.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.scores import Gradient, Gradients, Scores, Term, gradients, read, starts
from gossamer.backend.edges.spelling import Edges, Operation, PerNode, Sum, rows_of
from gossamer.backend.graph.dropout import dropout_at
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import ancestors, escapes, is_backward, same, same_dtype
from gossamer.sparsity.edges.edge_attention import MOST_FEATURES, NAMES, SEEDS

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention.

    result     [targets, heads, features], as one matrix or not
    values     [sources, heads, features]
    scores     what the softmax is of
    dropout    of the weights, 0 for none
    gradients  in a joint graph: the nodes that are gradients, by the name of the term
    upstream   in a joint graph: the gradient of the result that they are computed from
    """

    result: PerNode
    values: PerNode
    heads: int
    features: int
    scores: Scores
    dropout: float
    gradients: Gradients
    upstream: PerNode | None


def attention_at(forward: Sum, trail: Sequence[Any], edges: Edges) -> Attention | None:
    """The attention whose last step is a sum of products [edges, *trail], gradients included."""
    heads, features = (1, trail[0]) if len(trail) == 1 else trail if len(trail) == 2 else (None, None)
    if not isinstance(heads, int) or not isinstance(features, int) or features > MOST_FEATURES:
        return None
    if forward.side != "target" or forward.gathered is None or len(forward.factors) != 1:
        return None
    weights = rows_of(forward.factors[0])
    dropout = dropout_at(weights)
    softmax = edges.softmax(weights if dropout is None else dropout.of)
    if softmax is None or (dropout is not None and dropout.share >= 1):
        return None
    result, values = forward.result, forward.gathered
    if not all(same_dtype(each, result.tensor) for each in (values.tensor, weights, softmax.of)):
        return None
    for scores in read(softmax.of, heads, edges):
        if scores.product is not None and scores.product.size > MOST_FEATURES:
            continue
        of_scores = starts(scores, softmax.gradients)
        known = _gradients(scores, of_scores, weights, values, edges)
        if known is None:
            continue
        found, upstream = known
        ends = {result.tensor, *(each.place.tensor for places in found.values() for each in places)}
        inside = [scores.raw, *([] if dropout is None else [dropout.drawn])]
        if any(escapes(node, ends) for node in inside):
            continue  # something else reads what is inside
        if found and scores.raw in ancestors([values.tensor]):
            continue  # what reaches the scores does not all come from the result
        return Attention(result, values, heads, features, scores, dropout.share if dropout else 0.0, found, upstream)
    return None


def _gradients(
    scores: Scores, of_scores: list[fx.Node], weights: fx.Node, values: PerNode, edges: Edges
) -> tuple[Gradients, PerNode | None] | None:
    """The gradients, and that of the result; None if they are not those of one attention."""
    found: Gradients = {}
    of_result: list[PerNode] = []
    for each in edges.backward_sums():
        if each.side == "source" and each.gathered is not None and [*map(rows_of, each.factors)] == [weights]:
            found.setdefault("values", []).append(Gradient(each.result))
            of_result.append(each.gathered)
    if len(of_scores) > 1:
        return None
    for start in of_scores:
        found |= gradients(scores, start, edges)
        if escapes(start, {each.place.tensor for places in found.values() for each in places}):
            if not scores.stored:
                return None
            found["edge"] = [Gradient(PerNode(start))]
        of_result = of_result or [
            product.queries
            for node in start.graph.nodes
            if is_backward(node) and (product := edges.product(node)) and same(product.keys.tensor) is same(values.tensor)
        ]
    if found and not of_result:
        return None
    return found, of_result[0] if of_result else None


def replace(found: Attention, operation: Operation, emit: Emitter) -> None:
    """Puts the operation and its gradients where they were; `emit` adds nodes before the result."""
    terms = _terms(found, emit)
    product = found.scores.product
    slope = found.scores.slope if product is None or product.direction is None else product.slope
    device = found.result.tensor.meta["val"].device
    seed = emit(aten.randint.low, *SEEDS, [1], device=device) if found.dropout else None
    numbers = found.scores.factor.scale, slope, found.dropout
    arguments = [*operation.before, *(terms.get(name) for name in NAMES), seed, *numbers]
    both = emit(operation.forward, *arguments, *operation.after)
    out, statistics = (emit(operator.getitem, both, number) for number in range(2))
    _put(found.result, out, emit)
    if found.upstream is None:
        return
    emit = Emitter(min(each.place.tensor for places in found.gradients.values() for each in places), {})
    upstream = found.upstream.read([found.heads, found.features], emit)
    needs = [name in found.gradients for name in NAMES]
    parts = emit(operation.backward, upstream, out, statistics, *arguments, needs, *operation.after)
    for number, name in enumerate(name for name in NAMES if name in found.gradients):
        gradient = emit(operator.getitem, parts, number)
        for each in found.gradients[name]:
            value = gradient if abs(each.multiple - 1) < 1e-9 else emit(aten.mul.Tensor, gradient, each.multiple)
            if name == "direction":
                value = emit(aten.reshape.default, value, list(each.place.tensor.meta["val"].shape))
            _put(each.place, value, emit)


def _put(place: PerNode, found: fx.Node, emit: Emitter) -> None:
    place.tensor.replace_all_uses_with(place.written(found, emit))


def _terms(found: Attention, emit: Emitter) -> dict[str, fx.Node]:
    """The terms of the operation by name."""
    scores, heads = found.scores, found.heads
    terms = {"values": found.values.read([heads, found.features], emit)}
    product = scores.product
    if product is not None:
        terms["queries"] = product.queries.read([heads, product.size], emit)
        terms["keys"] = product.keys.read([heads, product.size], emit)
        if product.direction is not None:
            terms["direction"] = emit(aten.reshape.default, product.direction, [heads, product.size])
        for weight in scores.factor.factors:
            terms["weight"] = PerNode(weight).read([], emit)
    for side, parts in scores.nodes.items():
        if parts:
            terms[side] = _sum(emit, [Term(scale, (each.read([heads], emit),)) for scale, each in parts])
    if scores.stored:
        edge = scores.raw if scores.alone else _sum(emit, scores.others)
        terms["edge"] = edge if edge.meta["val"].dim() == 1 else PerNode(edge).read([heads], emit)
    return terms


def _sum(emit: Emitter, terms: Sequence[Term]) -> fx.Node:
    """The sum of some products."""
    products = []
    for term in terms:
        product, *factors = term.factors
        for factor in factors:
            product = emit(aten.mul.Tensor, product, factor)
        products.append(product if term.scale == 1 else emit(aten.mul.Tensor, product, term.scale))
    total, *others = products
    for each in others:
        total = emit(aten.add.Tensor, total, each)
    return total
