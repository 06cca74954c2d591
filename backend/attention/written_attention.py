"""written-attention: replaces attention that a model writes out by the operation that other models call.

    %y = bmm(softmax(add(mul(bmm(%q, permute(%k)), 0.125), %mask)), %v)
        →    %y = getitem(scaled_dot_product(%q, %k, %v, attn_mask=%mask, scale=0.125), 0)

With a soft cap, dropout, or a gradient of a term that is added to scores, it becomes gossamer::attend_masked. Gradients are
replaced, too. Later passes (chains, masked-attention, cached-attention) then find it however it was written. Attention that
does something else with its scores stays as it is. written_out.py recognises the spellings.
"""

import operator
from functools import cache
from math import isfinite, isinf, prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.cached_attention import few_keys, few_queries
from gossamer.backend.attention.written_out import Term, Written, written_attention
from gossamer.backend.chains.masks import Constants
from gossamer.backend.graph.backward_part import JointGraph
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import zero_heavy
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import equal, equal_sizes, hint
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.report import Decision
from gossamer.dialects.attention import ADD
from gossamer.dialects.errors import CompileError
from gossamer.runtime.torch_internals import cpu_attention, cpu_attention_backward, statically_known_true
from gossamer.sparsity.attention.masked_attention import (
    LARGEST_HEAD,
    TYPES,
    attend_masked,
    attend_masked_backward,
    attend_masked_scores,
    attention_kernel,
    cap_steps,
)
from gossamer.sparsity.attention.tile_table import filling
from gossamer.sparsity.edges.edge_attention import SEEDS

aten, prims = torch.ops.aten, torch.ops.prims

_LEAST_QUERIES = 8
"""The fewest queries for attend_masked. The lanes of its kernel are queries, so that most would be idle with fewer."""

_LOW = -1e3
"""A number below this counts as hiding the scores that it is added to."""

_LEAST_CAPPED, _LEAST_ADDED, _LEAST_SCORES = 64 * 64, 128 * 128, 256 * 256
"""Queries times keys below which Inductor's products and softmax are faster than the operation: with a cap or dropout, with a
gradient of an added term, and with neither. The last limit does not hold if a chain may compute it."""

_LEAST_SUMMED = 2
"""The fewest scores that must share an added number for its gradient to be faster in the kernel."""


class WrittenAttention:
    """Replaces softmax between two batched products on CPUs by attention."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each attention that stays as it is."""
        if context.options.schedule == "reference":
            return []
        constants, decisions, changed = Constants(graph), list[Decision](), False
        joint = cache(lambda: JointGraph(graph))  # made at the first attention, before that is replaced
        empty: dict[fx.Node, fx.Node] = {}
        for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
            if not node.meta["val"].is_cpu:
                continue
            try:
                written = written_attention(node, joint)
                if written is not None:
                    lowered = written.trains and any(_may_lower_all(t, constants) for t in written.terms)
                    _check(written, lowered, context)
                    _Replaced(written, lowered, constants, empty).emit()
                    changed = True
            except (Refused, CompileError) as problem:
                decisions.append(_dense(node, context.reason(problem)))
        if changed:
            graph.eliminate_dead_code()
        return decisions


def _dense(node: fx.Node, reason: str) -> Decision:
    weights: Any = node.args[0]
    size = tuple(hint(n) or 0 for n in weights.meta["val"].shape[-2:])
    return Decision.dense(place_of(node), "attention", size, 1.0, reason)


def _check(written: Written, lowered: bool, context: GraphContext) -> None:
    """Raises Refused if the operation cannot compute this attention, or not faster."""
    q, k, v = (x.meta["val"] for x in (written.q, written.k, written.v))
    if not (q.dtype in (*TYPES, torch.float64) and q.dtype == k.dtype == v.dtype):
        raise Refused(f"its type is {q.dtype}")
    size = q.shape[-1]
    if not (isinstance(size, int) and size == v.shape[-1]):
        raise Refused(f"its heads have {size} features, and those of values {v.shape[-1]}")
    if not all(statically_known_true(extent > 0) for extent in (*q.shape[-3:-1], v.shape[-2])):
        raise Refused("there may be no tokens")  # torch's operation divides by their number
    if not all(_has_stack(x, written) for x in (written.q, written.k, written.v)):
        raise Refused("its scores have a batch that its queries or keys do not have")
    if any(t.hidden is None and t.value.meta["val"].dtype != q.dtype for t in written.terms):
        raise Refused("its mask has another type")
    first_low = next((n for n, t in enumerate(written.terms) if t.hidden is not None and isfinite(t.factor)), None)
    if lowered and first_low is not None and not set(written.added).isdisjoint(written.terms[:first_low]):
        raise Refused("a bias of masked scores has a gradient")
    more = _more(written, lowered)
    if _generates(written, context):
        return
    if more is None:
        if not any(zero_heavy(each.tensor) for each in context.inputs.statics.values()):
            _check_scores(q, v, _LEAST_SCORES, context)
        return
    if q.dtype not in TYPES or size > LARGEST_HEAD:
        raise Refused(f"{more} of heads of {size} elements of {q.dtype}")
    if (hint(q.shape[-2]) or 0) < _LEAST_QUERIES and context.options.min_gain > 0:
        raise Refused(f"{more} for fewer than {_LEAST_QUERIES} queries")
    if written.cap is not None or written.dropout is not None:
        least = _LEAST_CAPPED
    elif written.added:
        least = _LEAST_ADDED
        _check_sums(written, context)
    else:
        least = _LEAST_SCORES
    _check_scores(q, v, least, context)
    steps = (*cap_steps(written.cap), *((ADD,) if written.terms else ()))
    for part in _parts(written):
        attention_kernel(part, q, written.scale, steps, written.share)


def _has_stack(operand: fx.Node, written: Written) -> bool:
    """Whether an operand has the batch and the heads of the scores. A term that is added to scores may have a batch alone."""
    if written.stacked is None:
        return True
    (*own, _, _), (batch, heads, _, _) = operand.meta["val"].shape, written.stacked.meta["val"].shape
    return equal_sizes(own, (batch, heads) if len(own) == 2 else (batch * heads,))


def _generates(written: Written, context: GraphContext) -> bool:
    """Whether attention is of a few queries in inference, so that cached-attention has a kernel for it."""
    q, v = written.q.meta["val"], written.v.meta["val"]
    of_kernel = q.is_cpu and q.dtype in TYPES and q.shape[-1] <= LARGEST_HEAD and few_queries(q.shape[-2])
    return of_kernel and not written.trains and written.dropout is None and not few_keys(v.shape[-2], context)


def _more(written: Written, lowered: bool) -> str | None:
    """Returns what this attention has that torch's operation cannot compute; None if there is nothing."""
    if written.cap is not None:
        return "a soft cap"
    if written.dropout is not None:
        return "dropout"
    if written.added:
        return "the gradient of what is added to scores"
    return "the gradient under a mask that may hide all keys of a query by a low number" if lowered else None


def _parts(written: Written) -> tuple[str, ...]:
    """Returns the names of the kernels that it needs."""
    return ("forward", *(("queries", "keys") if written.trains else ()), *(("scores",) if written.added else ()))


def _check_scores(q: torch.Tensor, v: torch.Tensor, least: int, context: GraphContext) -> None:
    if (hint(q.shape[-2]) or 0) * (hint(v.shape[-2]) or 0) < least and context.options.min_gain > 0:
        raise Refused(f"with fewer than {least} pairs of a query and a key it is faster as it is written")


def _check_sums(written: Written, context: GraphContext) -> None:
    """Raises Refused if each score has its own added number. Writing their gradients takes as long as is gained."""
    whole = _scores_of(written)
    for term in written.added:
        if prod(hint(whole[axis]) or 1 for axis in _summed(term, whole)) < _LEAST_SUMMED and context.options.min_gain > 0:
            raise Refused("the bias of each score has a gradient of its own")


def _scores_of(written: Written) -> list[Any]:
    """Returns the sizes of scores: batch, heads, queries and keys. If nothing tells batch and heads apart, batch is 1."""
    q, v = (n.meta["val"].shape for n in (written.q, written.v))
    stack = (1, q[0]) if written.stacked is None else written.stacked.meta["val"].shape[:2]
    return [*stack, q[-2], v[-2]]


def _summed(term: Term, whole: list[Any]) -> list[int]:
    """Returns the axes of scores along which a term is broadcast."""
    own = [1] * (4 - term.value.meta["val"].dim()) + list(term.value.meta["val"].shape)
    folded = term.dims == 3 and term.value.meta["val"].dim() == 3 and not equal(own[1], 1)  # batch and heads folded
    return [] if folded else [axis for axis in range(4) if equal(own[axis], 1) and not equal(whole[axis], 1)]


class _Replaced:
    """Writes the operation into the graph in place of one written attention."""

    def __init__(self, written: Written, lowered: bool, constants: Constants, empty: dict[fx.Node, fx.Node]) -> None:
        self._written, self._lowered, self._constants, self._empty = written, lowered, constants, empty

    def emit(self) -> None:
        """Emits the forward operation, and the backward operation if there are gradients."""
        written = self._written
        emit = Emitter(written.product)
        given = [self._four(emit, x) for x in (written.q, written.k, written.v)]
        if written.turned:
            given[1] = emit(aten.permute.default, given[1], [0, 1, 3, 2])
        mask = self._mask(emit, given)
        if mask is not None and written.added:  # so that Inductor writes it in the layout that the kernel reads
            mask = emit(aten.clone.default, mask, memory_format=torch.contiguous_format)
        how = self._scoring(emit)
        if how is None:
            given = [_by_features(emit, x) for x in given]
            more = {"scale": written.scale} | ({"attn_mask": mask} if mask is not None else {})
            node = emit(cpu_attention, *given, 0.0, False, **more)
        else:
            node = emit(attend_masked, *given, mask, *how)
        out, logarithms = (emit(operator.getitem, node, n) for n in (0, 1))
        if written.trains:
            self._gradients(given, mask, how, [out, logarithms])
        result = emit(aten.clone.default, out, memory_format=torch.contiguous_format)
        hidden = None if written.safe else self._hidden_rows(emit, mask)
        if hidden is not None:
            nothing = emit(
                aten.full.default, [], float("nan"), dtype=result.meta["val"].dtype, device=result.meta["val"].device
            )
            result = emit(aten.where.self, hidden, nothing, result)
        written.product.replace_all_uses_with(self._folded(emit, result))

    def _scoring(self, emit: Emitter) -> list[Any] | None:
        """Returns the arguments that are a `Scoring`; None if torch's operation can compute it."""
        written = self._written
        if _more(written, self._lowered) is None:
            return None
        device = written.q.meta["val"].device
        seed = emit(aten.randint.low, *SEEDS, [1], device=device) if written.dropout is not None else None
        return [written.scale, written.cap, seed, written.share, self._lowered]

    def _gradients(self, given: list[fx.Node], mask: Any, how: list[Any] | None, made: list[fx.Node]) -> None:
        """Emits the backward operation, and replaces the gradients of all operands by its results."""
        written, backward = self._written, self._written.backward
        order = {node: n for n, node in enumerate(written.product.graph.nodes)}
        emit = Emitter(min((node for found in backward.gradients.values() for node in found), key=order.__getitem__))
        assert backward.upstream is not None
        saved = [self._four(emit, backward.upstream), *given, *made]
        whole = _scores_of(written)
        axes = [set(_summed(term, whole)) for term in written.added]
        summed = sorted(set.intersection(*axes, {0, 1})) if axes else []
        if how is None:
            more = {"scale": written.scale} | ({"attn_mask": mask} if mask is not None else {})
            node = emit(cpu_attention_backward, _by_features(emit, saved[0]), *saved[1:], 0.0, False, **more)
        elif not axes:
            node = emit(attend_masked_backward, *saved, mask, *how)
        else:
            node = emit(attend_masked_scores, *saved, mask, *how, summed)
        totals: dict[fx.Node, list[fx.Node]] = {}
        for n, factor in enumerate(written.factors):
            if backward.gradients[factor]:
                value = emit(operator.getitem, node, n)
                value = emit(aten.permute.default, value, [0, 1, 3, 2]) if n == 1 else value
                value = emit(aten.clone.default, value, memory_format=torch.contiguous_format)
                totals.setdefault(factor, []).append(self._folded(emit, value))
        for term, over in zip(written.added, axes, strict=True):
            value = emit(operator.getitem, node, 3)
            if rest := sorted(over.difference(summed)):
                value = emit(aten.sum.dim_IntList, value, rest, True)
            value = emit(aten.reshape.default, value, emit.sizes(term.value, tuple(range(term.value.meta["val"].dim()))))
            value = value if term.factor == 1 else emit(aten.mul.Tensor, value, term.factor)
            if value.meta["val"].dtype != term.value.meta["val"].dtype:
                value = emit(prims.convert_element_type.default, value, term.value.meta["val"].dtype)
            totals.setdefault(term.value, []).append(value)
        for operand, values in totals.items():
            total = values[0]
            for value in values[1:]:
                total = emit(aten.add.Tensor, total, value)
            first, *others = backward.gradients[operand]
            first.replace_all_uses_with(total)
            for other in others:  # the graph adds it to the first
                other.replace_all_uses_with(emit.zeros(total))

    def _four(self, emit: Emitter, node: fx.Node) -> fx.Node:
        """Returns a stack of matrices as [batch, heads, ...]."""
        if node.meta["val"].dim() == 4:
            return node
        if self._written.stacked is None:
            return emit(aten.unsqueeze.default, node, 0)
        return emit(aten.reshape.default, node, [*emit.sizes(self._written.stacked, (0, 1)), *emit.sizes(node, (1, 2))])

    def _folded(self, emit: Emitter, node: fx.Node) -> fx.Node:
        """Returns a value with batch and heads folded into one dimension, as products have it."""
        return emit(aten.view.default, node, [-1, *emit.sizes(node, (2, 3))])

    def _mask(self, emit: Emitter, given: list[fx.Node]) -> fx.Node | None:
        """Returns the sum of all terms; None if there are none. The first term is the one that was added last."""
        total: fx.Node | None = None
        for term in reversed(self._written.terms):
            dtype = given[0].meta["val"].dtype
            if term.hidden is None:
                value = self._four_of(emit, term, self._times(emit, term))
                total = value if total is None else emit(aten.add.Tensor, total, value)
                continue
            shown = total if total is not None else emit(aten.full.default, [], 0.0, dtype=dtype)
            number = filling(dtype) if isfinite(term.factor) else term.factor
            hidden = emit(aten.full.default, [], number, dtype=dtype)
            value = self._four_of(emit, term, term.value)
            total = emit(aten.where.self, value, *((hidden, shown) if term.hidden else (shown, hidden)))
        return total

    def _times(self, emit: Emitter, term: Term) -> fx.Node:
        return term.value if term.factor == 1 else emit(aten.mul.Tensor, term.value, term.factor)

    def _four_of(self, emit: Emitter, term: Term, value: fx.Node) -> fx.Node:
        """Returns the value of a term with four dimensions."""
        sizes = value.meta["val"].shape
        if term.dims == 3 and len(sizes) == 3 and not equal(sizes[0], 1):
            return self._four(emit, value)
        while value.meta["val"].dim() < 4:
            value = emit(aten.unsqueeze.default, value, 0)
        return value

    def _hidden_rows(self, emit: Emitter, mask: fx.Node | None) -> fx.Node | None:
        """Returns which queries see no key, so that softmax gives NaN; None if there are no such queries."""
        terms = self._written.terms
        if mask is None or (len(terms) == 1 and not _may_hide_all(terms[0], self._constants)):
            return None
        if mask not in self._empty:
            self._empty[mask] = emit(
                aten.logical_not.default, emit(aten.any.dim, emit(aten.ne.Scalar, mask, -torch.inf), -1, True)
            )
        return self._empty[mask]


def _by_features(emit: Emitter, node: fx.Node) -> fx.Node:
    """Returns a value with contiguous elements of a head. Torch's kernel reads the strides of the other dimensions only."""
    value = node.meta["val"]
    contiguous = equal(value.stride(-1), 1) or equal(value.shape[-1], 1)
    return node if contiguous else emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def _may_hide_all(term: Term, constants: Constants) -> bool:
    if term.hidden is not None:
        return isinf(term.factor)
    known = constants.of(term.value)
    if known is not None:
        return bool(known.isneginf().all(-1).any())
    if term.value.target is not aten.where.self:
        return True
    values = [constants.of(n) if isinstance(n, fx.Node) else None for n in term.value.args[1:]]
    return any(value is None or bool(value.isneginf().any()) for value in values)


def _may_lower_all(term: Term, constants: Constants) -> bool:
    """Whether a finite number may hide all keys of a query.

    Their weights are equal then. But rounding loses the sum of exponentials, which the gradients need, beside that number.
    """
    known = constants.of(term.value)
    if term.hidden is not None:
        lowers = not isinf(term.factor) and term.factor < _LOW
        return lowers and (known is None or bool((known == term.hidden).all(-1).any()))
    if known is not None:
        low = known * term.factor < _LOW
        return bool((low.all(-1) & known.isfinite().any(-1)).any())
    if term.value.target is not aten.where.self:
        return True
    values = [constants.of(n) if isinstance(n, fx.Node) else None for n in term.value.args[1:]]
    return any(value is None or bool(((value * term.factor < _LOW) & value.isfinite()).any()) for value in values)
