"""Recognises attention over edges in any spelling, and replaces it and its gradients by one operation each.

    %z = leaky_relu(%a[source] + %b[target], slope)                             %r = attend(edges, %x, %b, %a, …, slope)
    %w = softmax of %z over the edges of each target                   →        %y = %r[0]
    %y = for each target the sum of %w * %x[source] over its edges
    and with them: gradients of %x, %a, %b                             →        attend_backward(…)

(Veličković et al., "Graph Attention Networks", 2018.) The operation keeps no array with a value for each edge and head. The
scores may be any that `scores.py` knows, and the weights may have dropout. Only the forward part is matched. Sequence numbers
then tell which nodes are its gradients (`graph/backward_part.py`).
"""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.scores import Scores, Term, read
from gossamer.backend.edges.spelling import Edges, Operation, PerNode, Softmax, Sum, rows_of
from gossamer.backend.graph.backward_part import BackwardPart, JointGraph
from gossamer.backend.graph.dropout import Dropout, dropout_at
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import between, escapes, same_dtype
from gossamer.backend.graph.refused import Refused
from gossamer.sparsity.edges.edge_attention import MOST_FEATURES, NAMES, SEEDS

aten = torch.ops.aten

_INFERENCE = BackwardPart(frozenset(), None, {})


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention.

    result    [targets, heads, features], where heads and features may be one dimension
    scores    the scores before the softmax
    terms     the operation's operands by name, each as a sum, including "values" [sources, heads, features]
    dropout   the share of weights that dropout zeroes, 0 for none
    backward  its gradients in a joint graph
    """

    result: PerNode
    heads: int
    features: int
    scores: Scores
    terms: Mapping[str, Sequence[Term]]
    dropout: float
    backward: BackwardPart

    @property
    def trains(self) -> bool:
        """Whether any gradient is asked for."""
        return any(self.backward.gradients.values())

    def trail(self, name: str) -> list[Any]:
        """Returns the sizes of a term without its first dimension, the nodes or edges."""
        if name == "values":
            return [self.heads, self.features]
        if name in ("queries", "keys", "direction"):
            return [self.heads, self.scores.size]
        of_all = name == "edge" and self.terms[name][0].factors[0].tensor.meta["val"].dim() == 1
        return [] if name == "weight" or of_all else [self.heads]


def attention_at(forward: Sum, trail: Sequence[Any], edges: Edges, joint: JointGraph | None) -> Attention | None:
    """Returns the attention whose last step is a sum of products [edges, *trail]; None if its weights are no softmax.

    `joint` is the graph if it has gradients. Raises Refused for a softmax that cannot be replaced.
    """
    heads, features = (1, trail[0]) if len(trail) == 1 else trail if len(trail) == 2 else (None, None)
    weights = rows_of(forward.weight)
    dropout = dropout_at(weights)
    softmax = edges.softmax(weights if dropout is None else dropout.of)
    if softmax is None or not isinstance(heads, int) or not isinstance(features, int):
        return None
    if dropout is not None and dropout.share >= 1:
        raise Refused("its dropout leaves no weight")
    if not all(same_dtype(each, forward.result.tensor) for each in (forward.values.tensor, weights, softmax.of)):
        raise Refused("its scores and values have different types")
    reason = Refused("its scores are not one number for each edge and head")
    for scores in read(softmax.of, heads, edges):
        try:
            return _whole(forward, heads, features, scores, softmax, dropout, joint)
        except Refused as problem:
            reason = problem
    raise reason


def _whole(
    forward: Sum, heads: int, features: int, scores: Scores, softmax: Softmax, dropout: Dropout | None, joint: JointGraph | None
) -> Attention:
    """Returns the attention with its gradients. Raises Refused if other nodes depend on values inside."""
    if max(features, scores.size or 0) > MOST_FEATURES:
        raise Refused(f"its heads have more than {MOST_FEATURES} features")
    terms = {"values": [Term(1.0, (forward.values,))], **scores.terms}
    inputs = list(dict.fromkeys(each.tensor for parts in terms.values() for term in parts for each in term.factors))
    result = forward.result.tensor
    fixed = [] if joint is None or softmax.shift is None or joint.backward_of(softmax.shift) else [softmax.shift]
    inside = between([*inputs, *fixed], result)
    if joint is not None and any(map(joint.backward_of, inside)):
        backward = joint.part(inside, inputs, result)
    else:
        of_scores = {scores.raw, *between([scores.raw], result), *([] if dropout is None else [dropout.drawn])}
        if any(escapes(node, {result}) for node in of_scores - {result, *inputs}):
            raise Refused("its weights are used elsewhere")
        backward = _INFERENCE
    return Attention(forward.result, heads, features, scores, terms, dropout.share if dropout else 0.0, backward)


def replace(found: Attention, operation: Operation, emit: Emitter) -> None:
    """Replaces the attention and its gradients by the operations; `emit` adds nodes before the result."""
    terms = {
        name: _sum(emit, [_product(emit, term, found.trail(name)) for term in parts]) for name, parts in found.terms.items()
    }
    device = found.result.tensor.meta["val"].device
    seed = emit(aten.randint.low, *SEEDS, [1], device=device) if found.dropout else None
    numbers = found.scores.scale, found.scores.slope, found.dropout
    arguments = [*operation.before, *(terms.get(name) for name in NAMES), seed, *numbers]
    both = emit(operation.forward, *arguments, *operation.after)
    out, statistics = (emit(operator.getitem, both, number) for number in range(2))
    found.result.tensor.replace_all_uses_with(found.result.written(out, emit))
    if found.trains:
        _replace_gradients(found, operation, arguments, [out, statistics])


def _replace_gradients(found: Attention, operation: Operation, arguments: list[Any], saved: list[fx.Node]) -> None:
    places, gradient = found.backward.gradients, found.backward.upstream
    assert gradient is not None
    emit = Emitter(min(place for each in places.values() for place in each), {})
    upstream = PerNode(gradient, found.result.across).read([found.heads, found.features], emit)
    wanted = [name for name in NAMES if any(places[each.tensor] for term in found.terms.get(name, ()) for each in term.factors)]
    needs = [name in wanted for name in NAMES]
    parts = emit(operation.backward, upstream, *saved, *arguments, needs, *operation.after)
    shares = defaultdict[fx.Node, list[fx.Node]](list)
    for number, name in enumerate(wanted):
        gradient = emit(operator.getitem, parts, number)
        for term in found.terms[name]:
            for factor in term.factors:
                if places[factor.tensor]:
                    others = Term(term.scale, tuple(each for each in term.factors if each is not factor))
                    share = _product(emit, others, found.trail(name), gradient)
                    shares[factor.tensor].append(factor.written(share, emit))
    for tensor, own in shares.items():
        _share_out(own, places[tensor], emit)


def _share_out(shares: list[fx.Node], places: Sequence[fx.Node], emit: Emitter) -> None:
    """Replaces the parts of a gradient by new parts. Autograd adds them up, so only their sum matters."""
    for number, place in enumerate(places):
        last = number == len(places) - 1
        own = shares[number:] if last else shares[number : number + 1]
        place.replace_all_uses_with(_sum(emit, own) if own else emit.zeros(shares[0]))


def _product(emit: Emitter, term: Term, trail: list[Any], more: fx.Node | None = None) -> fx.Node:
    """Emits the product of a term's factors as rows [..., *trail], and of `more`."""
    factors = [each.read(trail, emit) for each in term.factors]
    product = reduce(lambda a, b: emit(aten.mul.Tensor, a, b), factors if more is None else [more, *factors])
    return product if abs(term.scale - 1) < 1e-9 else emit(aten.mul.Tensor, product, term.scale)


def _sum(emit: Emitter, terms: Sequence[fx.Node]) -> fx.Node:
    return reduce(lambda a, b: emit(aten.add.Tensor, a, b), terms)
