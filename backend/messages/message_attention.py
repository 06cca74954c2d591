"""Attention over an edge list, as graph attention networks spell it, becomes one operation that keeps nothing an edge and head.

    %z = leaky_relu(add(index_select(%a, 0, %source), index_select(%b, 0, %target)), slope)
    %p = exp(sub(%z, index_select(scatter_reduce(…, %target, %z, "amax"), 0, %target)))
    %w = div(%p, index_select(scatter_add(zeros, 0, %target, %p) + 1e-16, 0, %target))
    %y = scatter_add(zeros, 0, %target, mul(%w, index_select(%x, 0, %source)))     →   gossamer::attend(%x, %a, %b, …)

(Veličković et al., "Graph Attention Networks", 2018.) What is subtracted before the exponential may be any number a target, the
scores any that `message_scores.py` knows, and there may be dropout of the weights. In a joint graph the gradients go the same
way: all that reaches the scores comes from %y, so what the scores' gradient is scattered to, and the scatter of the gradient at
%x, are the outputs of one backward operation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import fx

from gossamer.backend.graph.dropout import dropout_at
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import ancestors, of_tensors, same, same_dtype, same_shape
from gossamer.backend.messages.message_patterns import Aggregation, Gather, aggregation_at, gather_at, repeated, rows_of
from gossamer.backend.messages.message_scores import EdgeIndex, Scores, gradients_of, is_scores_gradient, read_scores
from gossamer.backend.regions.contractions import is_backward
from gossamer.sparsity.edges.edge_attention import MOST_FEATURES

aten = torch.ops.aten


@dataclass(frozen=True)
class EdgeAttention:
    """One such attention.

    aggregation  its last step; the rows it gathers are [sources, heads, features] or [sources, features]
    scores       what the softmax is of
    dropout      of the weights, 0 for none
    gradients    in a joint graph: the nodes that are gradients, by the name of the term
    gradient     in a joint graph: the gradient of the result that they are computed from
    """

    aggregation: Aggregation
    scores: Scores
    dropout: float
    gradients: dict[str, fx.Node]
    gradient: fx.Node | None = None


def attentions(found: Sequence[Aggregation], structure: Structure) -> Iterator[EdgeAttention]:
    """The aggregations that are attention as a whole, gradients included."""
    for aggregation in found:
        attention = None if is_backward(aggregation.node) else _attention(aggregation, found, structure)
        if attention is not None:
            yield attention


def _attention(aggregation: Aggregation, found: Sequence[Aggregation], structure: Structure) -> EdgeAttention | None:
    weighted = _weighted(aggregation)
    if weighted is None:
        return None
    aggregation, factor = weighted
    value = aggregation.message.meta["val"]
    if aggregation.gather is None or aggregation.base is not None or aggregation.mean or value.dim() not in (2, 3):
        return None
    heads = value.shape[1] if value.dim() == 3 else 1
    if value.dtype not in (torch.float32, torch.float64):
        return None
    source, target = (EdgeIndex(index, structure) for index in (aggregation.gather.index, aggregation.target))
    weights = rows_of(factor)
    dropout = dropout_at(weights)
    softmax = _softmax(weights if dropout is None else dropout.of, target, structure)
    if softmax is None or factor.meta["val"].shape[1] != heads or (dropout is not None and dropout.share >= 1):
        return None
    if not all(same_dtype(each, aggregation.message) for each in (aggregation.gather.x, factor, softmax.of)):
        return None
    if not isinstance(value.shape[-1], int) or value.shape[-1] > MOST_FEATURES:
        return None
    training = any(is_backward(user) for user in weights.graph.nodes)
    for scores in read_scores(softmax.of, heads, aggregation, source, target, structure):
        if any(_escapes(inside, aggregation.node) for inside in (scores.raw, weights if dropout is None else dropout.drawn)):
            continue  # something else reads what is inside
        forward = EdgeAttention(aggregation, scores, 0.0 if dropout is None else dropout.share, {})
        attention = _with_gradients(forward, softmax, weights, found, source, target, structure) if training else forward
        if attention is not None:
            return attention
    return None


def _with_gradients(
    attention: EdgeAttention,
    softmax: "_Softmax",
    weights: fx.Node,
    found: Sequence[Aggregation],
    source: EdgeIndex,
    target: EdgeIndex,
    structure: Structure,
) -> EdgeAttention | None:
    """The attention with its gradients; None if they are not those of the attention alone."""
    aggregation, scores = attention.aggregation, attention.scores
    assert aggregation.gather is not None
    raw = scores.raw
    if raw in ancestors([aggregation.gather.x]):
        return None
    backward = [each for each in found if is_backward(each.node) and each.base is None and not each.mean]
    to_values = [
        (each.node, each.gather.x) for each in backward
        if each.gather is not None and len(each.factors) == 1 and rows_of(each.factors[0].node) is weights
        and target.is_(each.gather.index) and source.is_(each.target) and not each.factors[0].inverse
    ]  # fmt: skip
    if aggregation.gather.index is None:
        to_values = list(_of_values_of_edges(aggregation, weights, target, structure))
    of_scores = [
        node for node in raw.graph.nodes
        if is_backward(node) and (_is_of_exponential(node, softmax) if scores.outer == 1 else is_scores_gradient(node, scores))
    ]  # fmt: skip
    if len(to_values) != 1 or len(of_scores) != 1:
        return None
    gradients = {"values": to_values[0][0], **gradients_of(scores, of_scores[0], backward, source, target)}
    if _escapes(of_scores[0], *gradients.values()):
        if scores.edge is None:
            return None
        gradients["edge"] = of_scores[0]
    if len(gradients) == 1:
        return None
    return EdgeAttention(aggregation, scores, attention.dropout, gradients, to_values[0][1])


def _weighted(aggregation: Aggregation) -> tuple[Aggregation, fx.Node] | None:
    """An aggregation of rows that are gathered, or values of edges, and the weights that multiply them."""
    if aggregation.gather is not None:
        factors = aggregation.factors
        return (aggregation, factors[0].node) if len(factors) == 1 and not factors[0].inverse else None
    message = rows_of(aggregation.message)
    if message.target is not aten.mul.Tensor or not of_tensors(message):
        return None
    for values, factor in permutations(same(a) for a in message.args):
        broadcast = not same_shape(factor, message) and factor.meta["val"].dim() == message.meta["val"].dim()
        dropout = dropout_at(rows_of(factor))
        whole = rows_of(factor) if dropout is None else dropout.of
        if broadcast and same_shape(values, message) and whole.target is aten.div.Tensor:
            return replace(aggregation, gather=Gather(values, None), message=message), factor
    return None


def _of_values_of_edges(
    aggregation: Aggregation, weights: fx.Node, target: EdgeIndex, structure: Structure
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The gradients of values that each edge has its own of, and those of the result."""
    for node in weights.graph.nodes:
        if node.target is aten.mul.Tensor and is_backward(node) and of_tensors(node):
            for of_result, factor in permutations(same(a) for a in node.args):
                gather = gather_at(of_result, structure) if rows_of(factor) is weights else None
                if gather is not None and target.is_(gather.index) and same_shape(node, aggregation.message):
                    yield node, gather.x


@dataclass(frozen=True)
class _Softmax:
    """By targets: what it is of, the exponentials of it, and the gather of what is subtracted before, if anything is."""

    of: fx.Node
    exponential: fx.Node
    shift: fx.Node | None


def _softmax(weights: fx.Node, target: EdgeIndex, structure: Structure) -> _Softmax | None:
    """What the weights are the softmax of by targets."""
    if weights.target is not aten.div.Tensor or not of_tensors(weights):
        return None
    exponential, total = same(weights.args[0]), gather_at(weights.args[1], structure)  # type: ignore[arg-type]
    if exponential.target is not aten.exp.default or total is None or not target.is_(total.index):
        return None
    summed, added = same(total.x), 0.0
    if summed.target is aten.add.Tensor and isinstance(summed.args[1], float) and not summed.kwargs:
        added, summed = summed.args[1], same(summed.args[0])  # against division by zero
    sums = aggregation_at(summed, structure)
    if sums is None or same(sums.message) is not exponential or sums.base is not None or sums.mean:
        return None
    logits, shift = same(exponential.args[0]), None
    if logits.target is aten.sub.Tensor and of_tensors(logits) and not logits.kwargs:
        shift = gather_at(logits.args[1], structure)  # type: ignore[arg-type]
        if shift is not None and target.is_(shift.index):
            logits = same(logits.args[0])
    negligible = shift is not None and 0 <= added <= 1e-8 and _is_maximum(same(shift.x), logits, target)
    if not target.is_(sums.target) or not (added == 0 or negligible):
        return None
    return _Softmax(logits, exponential, None if shift is None else shift.x)


def _is_maximum(node: fx.Node, of: fx.Node, target: EdgeIndex) -> bool:
    """Whether this is the maximum by targets, so that the exponentials add up to 1 or more."""
    if node.target is not aten.scatter_reduce.two or node.args[4] != "amax":
        return False
    base, dim, index, source = node.args[:4]
    index = repeated(index)
    if dim != 0 or same(source) is not of or index is None or not target.is_(index):
        return False
    if not node.kwargs.get("include_self", True):
        return True
    least = torch.finfo(node.meta["val"].dtype).min
    return bool(base.target is aten.full.default and base.args[1] <= least)  # type: ignore[union-attr, operator]


def _is_of_exponential(node: fx.Node, softmax: _Softmax) -> bool:
    """Whether this is the gradient of what the exponential is of: all of the scores' if none comes by way of the shift."""
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return False
    constant = softmax.shift is None or not any(is_backward(user) for user in _copies(softmax.shift))
    return constant and [same(a) is softmax.exponential for a in node.args].count(True) == 1


def _copies(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node, and of copies of it."""
    for user in node.users:
        yield user
        if same(user) is same(node):
            yield from _copies(user)


def _escapes(start: fx.Node, *ends: fx.Node) -> bool:
    """Whether a graph returns what is computed from `start` otherwise than through `ends`; of forward, by forward alone."""
    seen: set[fx.Node] = set()
    pending = [start]
    while pending:
        node = pending.pop()
        ahead = [u for u in node.users if u not in ends and u not in seen and (is_backward(start) or not is_backward(u))]
        if any(user.op == "output" for user in ahead):
            return True
        seen.update(ahead)
        pending += ahead
    return False
