"""Attention over an edge list, as graph attention networks spell it, becomes one operation that keeps nothing an edge and head.

    %z = leaky_relu(add(index_select(%a, 0, %source), index_select(%b, 0, %target)), slope)
    %p = exp(sub(%z, index_select(scatter_reduce(…, %target, %z, "amax"), 0, %target)))
    %w = div(%p, index_select(scatter_add(zeros, 0, %target, %p) + 1e-16, 0, %target))
    %y = scatter_add(zeros, 0, %target, mul(%w, index_select(%x, 0, %source)))     →   gossamer::attend(%x, %a, %b, …)

(Veličković et al., "Graph Attention Networks", 2018.) What is subtracted before the exponential may be any number a target.
In a joint graph the gradients go the same way: all that reaches %a and %b through the logits comes from %y, so the two
scatters of the gradient at the logits and the scatter of the gradient at %x are the outputs of one backward operation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.contractions import is_backward
from gossamer.backend.message_patterns import (
    Aggregation,
    Gather,
    aggregation_at,
    as_long,
    gather_at,
    of_tensors,
    repeated,
    rows_of,
    same,
)
from gossamer.backend.structure import Structure, ancestors

aten = torch.ops.aten


@dataclass(frozen=True)
class EdgeAttention:
    """One such attention.

    aggregation  its last step; the rows it gathers are [sources, heads, features] or [sources, features]
    source       [sources, heads] or [sources], added at the source of each edge
    target       [targets, heads] or [targets], added at the target
    slope        of leaky_relu, 1 if there is none
    gradients    in a joint graph: the scatters that compute the gradients of values, source and target, None where not needed
    gradient     in a joint graph: the gradient of the result that they are computed from
    """

    aggregation: Aggregation
    source: Gather
    target: Gather
    slope: float
    gradients: tuple[Aggregation | None, Aggregation | None, Aggregation | None] = (None, None, None)
    gradient: fx.Node | None = None


def attentions(found: Sequence[Aggregation], structure: Structure) -> Iterator[EdgeAttention]:
    """The aggregations that are attention as a whole, gradients included."""
    for aggregation in found:
        attention = None if is_backward(aggregation.node) else _attention(aggregation, found, structure)
        if attention is not None:
            yield attention


def _attention(aggregation: Aggregation, found: Sequence[Aggregation], structure: Structure) -> EdgeAttention | None:
    value = aggregation.message.meta["val"]
    if aggregation.gather is None or aggregation.base is not None or aggregation.mean or value.dim() not in (2, 3):
        return None
    heads = value.shape[1] if value.dim() == 3 else 1
    if len(aggregation.factors) != 1 or aggregation.factors[0].inverse or value.dtype not in (torch.float32, torch.float64):
        return None
    source, target = (_Index(index, structure) for index in (aggregation.gather.index, aggregation.target))
    weights = rows_of(aggregation.factors[0].node)
    activated = _softmax(weights, target, structure)
    if activated is None or aggregation.factors[0].node.meta["val"].shape[1] != heads:
        return None
    logits, slope = _activation(activated)
    terms = [gather_at(term, structure) for term in _terms(logits)]
    at_source = [term for term in terms if term is not None and source.is_(term.index)]
    at_target = [term for term in terms if term is not None and target.is_(term.index)]
    if len(terms) != 2 or len(at_source) != 1 or len(at_target) != 1 or _heads(logits) != heads:
        return None
    if not as_long(at_source[0].x, aggregation.gather.x) or not as_long(at_target[0].x, aggregation.node):
        return None  # one edge list, checked once, serves all of them
    attention = EdgeAttention(aggregation, at_source[0], at_target[0], slope)
    backward = [each for each in found if is_backward(each.node)]
    if not any(is_backward(user) for user in weights.graph.nodes):
        return attention
    return _with_gradients(attention, logits, weights, backward, source, target)


def _with_gradients(
    attention: EdgeAttention,
    logits: fx.Node,
    weights: fx.Node,
    backward: Sequence[Aggregation],
    source: "_Index",
    target: "_Index",
) -> EdgeAttention | None:
    """The attention with its gradients; None if something else reads what is inside it, the values for example."""
    aggregation = attention.aggregation
    assert aggregation.gather is not None
    if _escapes(logits, aggregation.node) or logits in ancestors([aggregation.gather.x]):
        return None
    to_values = to_source = to_target = None
    for each in backward:
        gather, message = each.gather, rows_of(each.message)
        if each.base is not None or each.mean:
            continue
        if gather is not None and len(each.factors) == 1 and rows_of(each.factors[0].node) is weights:
            if target.is_(gather.index) and source.is_(each.target) and not each.factors[0].inverse:
                if to_values is not None:
                    return None
                to_values = each
        elif gather is None and _is_gradient(message, logits, attention.slope):
            if source.is_(each.target):
                to_source = each
            elif target.is_(each.target):
                to_target = each
    if to_values is None or to_values.gather is None or (to_source is None and to_target is None):
        return None
    known = (to_values, to_source, to_target)
    return EdgeAttention(aggregation, attention.source, attention.target, attention.slope, known, to_values.gather.x)


class _Index:
    """An edge list, to be found again in other nodes."""

    def __init__(self, node: fx.Node, structure: Structure) -> None:
        self._structure, self._known = structure, self._identity(node, structure)

    def is_(self, node: fx.Node) -> bool:
        """Whether this is computed in the same way."""
        return self._identity(node, self._structure) == self._known

    @staticmethod
    def _identity(node: fx.Node, structure: Structure) -> tuple[Any, ...]:
        expression = structure.cut(rows_of(node))
        return expression.key, expression.leaves, expression.numbers


def _softmax(weights: fx.Node, target: _Index, structure: Structure) -> fx.Node | None:
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
    return logits if target.is_(sums.target) and (added == 0 or negligible) else None


def _is_maximum(node: fx.Node, of: fx.Node, target: _Index) -> bool:
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


def _activation(node: fx.Node) -> tuple[fx.Node, float]:
    """What leaky_relu is applied to, and its slope; the node itself and 1 if there is none."""
    if node.target is aten.leaky_relu.default:
        return same(node.args[0]), float((*node.args, 0.01)[1])  # type: ignore[arg-type]
    if node.target is aten.where.self:
        condition, positive, negative = (same(a) for a in node.args)
        scaled = negative.target is aten.mul.Tensor and isinstance(negative.args[1], int | float)
        if scaled and same(negative.args[0]) is positive and _is_positive(condition, positive):
            return positive, float(negative.args[1])  # type: ignore[arg-type]
    return node, 1.0


def _is_gradient(node: fx.Node, logits: fx.Node, slope: float) -> bool:
    """Whether this is the gradient at the logits, that is, behind the activation's derivative."""
    if node.target is aten.leaky_relu_backward.default:
        return same(node.args[1]) is logits
    if node.target is aten.where.self and slope != 1:
        condition, positive, negative = (same(a) for a in node.args)
        scaled = negative.target is aten.mul.Tensor and same(negative.args[0]) is positive
        return scaled and positive is not logits and _is_positive(condition, logits)
    return False


def _is_positive(condition: fx.Node, node: fx.Node) -> bool:
    return bool(condition.target is aten.gt.Scalar and condition.args[1] == 0 and same(condition.args[0]) is node)


def _terms(node: fx.Node) -> list[fx.Node]:
    if node.target is aten.add.Tensor and all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs:
        return [term for a in node.args for term in _terms(same(a))]
    return [node]


def _heads(logits: fx.Node) -> Any:
    shape = logits.meta["val"].shape
    return 1 if len(shape) == 1 else shape[1] if len(shape) == 2 else None


def _escapes(start: fx.Node, end: fx.Node) -> bool:
    """Whether the forward part of a joint graph returns something computed from `start` otherwise than through `end`."""
    seen: set[fx.Node] = set()
    pending = [start]
    while pending:
        node = pending.pop()
        ahead = [user for user in node.users if user is not end and user not in seen and not is_backward(user)]
        if any(user.op == "output" for user in ahead):
            return True
        seen.update(ahead)
        pending += ahead
    return False
