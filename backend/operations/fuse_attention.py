"""SDDMM, softmax and SpMM on one pattern become one operation, in the inference or the joint graph.

    %s = gossamer::sample([%pos, %crd, %a, %q, %k])               %r = gossamer::attend_edges(%pos, %crd, %v, …, %q, %k, …)
    %p = gossamer::softmax(%pos, scale * %s)                 →    %y = %r[0]
    %y = gossamer::einsum([%pos, %crd, dropout(%p), %v])
    and with them: gradients of %v, of %p, of the softmax,   →    gossamer::attend_edges_backward(…)
    of %s and of %q, %k, …

The values of the entries, one for each edge and head, are then in no memory. Only what is computed matters: names do not, nor
does the order of factors, scales in between, leaky_relu, biases, or which dimension of a matrix comes first. A softmax whose
values are used otherwise stays as it is.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import fx

from gossamer.backend.graph.dropout import Dropout, dropout_at
from gossamer.backend.graph.einsum_calls import Call, Given, Rows, arguments, call_at, hint, plain, users
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import escapes
from gossamer.backend.operations.edge_scores import Scores, Term, Trace, read
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision
from gossamer.sparsity.edges.edge_attention import MOST_FEATURES, NAMES, SEEDS

aten, ours = torch.ops.aten, torch.ops.gossamer


class FuseAttention:
    """SDDMM, softmax and SpMM become one operation, with their gradients."""

    name: ClassVar[str] = "fuse-attention"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each attention."""
        decisions = []
        for node in [n for n in graph.nodes if n.target is ours.softmax.default]:
            found = _Attention.at(node)
            if found is not None:
                decisions.append(found.decision(context.inputs))
                found.replace()
        if decisions:
            graph.eliminate_dead_code()
        return decisions


@dataclass(eq=False)
class _Attention:
    """A softmax over rows with all that it is computed from and used for.

    forward    the product with values
    dropout    of the weights before it
    of_values  the gradient of values, and `gradient` that of the result, with the letter of its rows
    trace      where the gradient of the scores goes to
    """

    rows: Rows
    scores: Scores
    forward: Call
    dropout: Dropout | None = None
    of_values: Call | None = None
    gradient: Given | None = None
    gradient_row: str = ""
    trace: Trace | None = None
    first: fx.Node | None = None

    @classmethod
    def at(cls, softmax: fx.Node) -> "_Attention | None":
        """What surrounds a softmax, if all of it is known."""
        weights, step, dropout = _after_dropout(softmax)
        uses = [_Use.of(user, softmax) for user in users(softmax) if user is not step]
        if dropout is not None and any(use is None or use.kind != "through softmax" for use in uses):
            return None
        uses += [_Use.of(user, weights) for user in users(weights)] if dropout is not None else []
        kinds = [use.kind for use in uses if use is not None]
        if len(kinds) != len(uses) or len(set(kinds)) != len(kinds) or "forward" not in kinds or arguments(softmax)[2]:
            return None
        by = {use.kind: use for use in uses if use is not None}
        forward = by["forward"].call
        assert forward is not None
        rows = forward.sparse[0].rows
        if rows is None or plain(arguments(softmax)[0]) is not rows.positions or not _is_product(forward, rows):
            return None
        scores = read(arguments(softmax)[1], rows)
        if scores is None or not _fits(forward, scores):
            return None
        found = cls(rows, scores, forward, dropout)
        return found if found._backward(by) and not found._is_read_elsewhere(by) else None

    def _is_read_elsewhere(self, by: "dict[str, _Use]") -> bool:
        """Whether anything else depends on the numbers that dropout draws."""
        ends = {use.node for use in by.values() if use.kind != "of weights"}
        return self.dropout is not None and escapes(self.dropout.drawn, ends)

    def _backward(self, by: "dict[str, _Use]") -> bool:
        """Whether the gradients in the graph, if there are any, are those of this attention."""
        if set(by) - {"forward", "of values"} not in (set(), {"of weights", "through softmax"}):
            return False
        if "of values" in by:
            self.of_values = by["of values"].call
            assert self.of_values is not None
            self.gradient, self.gradient_row = self.of_values.dense[0], self.rows_of(self.of_values).row
        if "through softmax" in by:
            through, sampled = by["through softmax"].node, by["of weights"].call
            assert sampled is not None
            gradient = plain(arguments(through)[1])
            of_weights = gradient if self.dropout is None else self.dropout.gradient_before(gradient)
            if of_weights is not sampled.node or escapes(sampled.node, {through}):
                return False
            own = sampled.operands[0].rows
            assert own is not None
            gradients = [each for each in sampled.dense if own.row in each.letters]
            if len(sampled.dense) != 2 or len(gradients) != 1:
                return False
            self.gradient, self.gradient_row = gradients[0], own.row
            self.trace = Trace.of(through, self.scores)
            if self.trace is None:
                return False
        places = {node: number for number, node in enumerate(self.forward.node.graph.nodes)}
        self.first = min((use.node for kind, use in by.items() if kind != "forward"), key=places.__getitem__, default=None)
        return self.trace is None or self._needed() is not None

    # Gradients

    def _needed(self) -> dict[str, list[tuple[fx.Node, float]]] | None:
        """For each gradient the nodes that are it, times a number; None if entries need a gradient that nothing gives."""
        found: dict[str, list[tuple[fx.Node, float]]] = {}
        if self.of_values is not None:
            found["values"] = [(self.of_values.node, 1.0)]
        if self.trace is None:
            return found
        more = self.trace.more
        for call, term in self.trace.ends:
            name = self._gradient_of(call, term)
            if name is None:
                more = True
            else:
                found.setdefault(name, []).append((call.node, term.scale if name in ("target", "source") else 1.0))
        for node, term in self.trace.weights:
            if self.scores.factor.factors and term.equals(Term(self.scores.factor.scale, ())):
                found.setdefault("weight", []).append((node, 1.0))
            else:
                more = True
        if more:
            if not self.scores.others:
                return None
            found["edge"] = [(self.trace.start, 1.0)]
        return found

    def _gradient_of(self, call: Call, term: Term) -> str | None:
        """What an einsum with the gradient of the scores for values is the gradient of."""
        rows, result = call.sparse[0].rows, call.spec.result.letters
        if rows is None or rows.pattern != self.rows.pattern:
            return None
        if not call.dense and not term.factors and len(result) == 1:
            name = "target" if result == rows.row else "source"
            return name if self.scores.nodes[name] else None
        if self.scores.product is None or len(call.dense) != 1 or not term.equals(self.scores.factor):
            return None
        name, other = ("queries", "keys") if rows.row in result else ("keys", "queries")
        same = plain(call.dense[0].values) is plain(self._matrix(other).values)
        return name if same and len(result) == 2 and (rows.row in result) != (rows.column in result) else None

    def _matrix(self, name: str) -> Given:
        """The queries or the keys."""
        assert self.scores.product is not None
        rows = self.scores.product.operands[0].rows
        assert rows is not None
        letter = rows.row if name == "queries" else rows.column
        return next(each for each in self.scores.product.dense if letter in each.letters)

    # Replacing

    def replace(self) -> None:
        """Puts the operation and its gradient where they were."""
        needed = self._needed()
        assert needed is not None
        emit = Emitter(self.forward.node, {})
        sparse = self.forward.sparse[0]
        terms = self._terms(emit)
        numbers = self.scores.factor.scale, self.scores.slope
        device, share = sparse.values.meta["val"].device, 0.0 if self.dropout is None else self.dropout.share
        seed = emit(aten.randint.low, *SEEDS, [1], device=device) if share else None
        arguments = [*sparse.arrays[:2], *(terms.get(name) for name in NAMES), seed, *numbers, share]
        both = emit(ours.attend_edges.default, *arguments)
        out, statistics = (emit(operator.getitem, both, number) for number in range(2))
        result = self.forward.spec.result.letters
        self._put(self.forward.node, _arranged(emit, out, result[0] == self.rows_of(self.forward).row))
        if self.first is None or not needed:
            return
        emit = Emitter(self.first, {})
        assert self.gradient is not None
        gradient = _as_heads(emit, self.gradient, transposed=self._is_last(self.gradient, self.gradient_row))
        needs = [name in needed for name in NAMES]
        found = emit(ours.attend_edges_backward.default, gradient, out, statistics, *arguments, needs)
        for number, name in enumerate(name for name in NAMES if name in needed):
            self._put_gradient(emit, name, emit(operator.getitem, found, number), needed[name])

    def rows_of(self, call: Call) -> Rows:
        """The pattern with the letters of a call."""
        rows = call.sparse[0].rows
        assert rows is not None
        return rows

    @staticmethod
    def _is_last(matrix: Given, letter: str) -> bool:
        return matrix.letters[1] == letter

    def _put_gradient(self, emit: Emitter, name: str, found: fx.Node, places: Sequence[tuple[fx.Node, float]]) -> None:
        for node, scale in places:
            value = found
            if name in ("target", "source"):
                value = emit(aten.squeeze.dim, value, 1)
                value = value if scale == 1 else emit(aten.mul.Tensor, value, scale)
            elif name not in ("edge", "weight"):
                call = call_at(node, ours.einsum.default)
                assert call is not None
                own = self.rows_of(call)
                letter = own.row if name == "queries" else own.column
                value = _arranged(emit, value, call.spec.result.letters[0] == letter)
            self._put(node, value)

    @staticmethod
    def _put(node: fx.Node, value: fx.Node) -> None:
        node.replace_all_uses_with(value)

    def _terms(self, emit: Emitter) -> dict[str, fx.Node]:
        """The terms of the operation by name, with one head."""
        scores, rows = self.scores, self.rows
        values = self.forward.dense[0]
        terms = {"values": _as_heads(emit, values, self._is_last(values, rows.column))}
        if scores.product is not None:
            own = scores.product.operands[0].rows
            assert own is not None
            for name, letter in (("queries", own.row), ("keys", own.column)):
                matrix = self._matrix(name)
                terms[name] = _as_heads(emit, matrix, self._is_last(matrix, letter))
        for name, parts in scores.nodes.items():
            if parts:
                total = _sum(emit, [Term(scale, (vector.values,)) for scale, vector in parts])
                terms[name] = emit(aten.unsqueeze.default, total, 1)
        if scores.others:
            alone = scores.product is None and not any(scores.nodes.values())
            terms["edge"] = scores.raw if alone else _sum(emit, scores.others)
        if scores.factor.factors:
            terms["weight"] = scores.factor.factors[0]
        return terms

    def decision(self, inputs: Inputs) -> Decision:
        """What the report says about it."""
        sizes = [hint(size) for size in self.rows.sizes]
        entries = hint(self.forward.sparse[0].values.meta["val"].shape[0])
        kinds = ["dot products"] if self.scores.product is not None else []
        kinds += ["sums by node"] if any(self.scores.nodes.values()) else []
        kinds += ["stored scores"] if self.scores.others else []
        training = " and their gradients" if self.trace is not None else ""
        reason = f"scores ({', '.join(kinds)}), softmax and product{training} in one pass over the rows"
        density = min(1.0, entries / max(1, prod(sizes)))
        format = self.forward.sparse[0].format
        assert format is not None
        name = name_of(self.rows.coordinates, inputs)
        return Decision(name, "attention", tuple(sizes), density, format.name, "edges", True, reason, None)


def _after_dropout(softmax: fx.Node) -> tuple[fx.Node, fx.Node | None, Dropout | None]:
    """What products are weighted with, and, if there is a dropout, its first step and what it is."""
    for step in users(softmax):
        for node in step.users:
            dropout = dropout_at(node)
            if dropout is not None and dropout.of is softmax and dropout.share < 1:
                return node, step, dropout
    return softmax, None, None


@dataclass(frozen=True, eq=False)
class _Use:
    """What uses the weights that a softmax gives: "forward", "of values", "of weights" or "through softmax"."""

    kind: str
    node: fx.Node
    call: Call | None

    @classmethod
    def of(cls, node: fx.Node, softmax: fx.Node) -> "_Use | None":
        if node.target is ours.softmax_backward.default:
            return cls("through softmax", node, None) if plain(arguments(node)[2]) is softmax else None
        call = call_at(node, ours.sample.default)
        if call is not None:
            others = all(plain(each.values) is not softmax for each in call.dense)
            return cls("of weights", node, call) if others and call.operands[0].rows is not None else None
        call = call_at(node, ours.einsum.default)
        if call is None or len(call.sparse) != 1 or len(call.dense) != 1 or plain(call.sparse[0].values) is not softmax:
            return None
        rows = call.sparse[0].rows
        if rows is None or len(call.spec.result.letters) != 2 or len(call.dense[0].letters) != 2:
            return None
        return cls("forward" if rows.row in call.spec.result.letters else "of values", node, call)


def _is_product(call: Call, rows: Rows) -> bool:
    """Whether a call is y[row, f] = sum over columns of p[row, column] v[column, f], in any order of its dimensions."""
    (features,) = set(call.dense[0].letters) - {rows.column} if rows.column in call.dense[0].letters else (rows.row,)
    return features != rows.row and set(call.spec.result.letters) == {rows.row, features}


def _fits(forward: Call, scores: Scores) -> bool:
    """Whether sizes and types are those that there are kernels for."""
    matrices = [forward.dense[0], *(scores.product.dense if scores.product is not None else [])]
    values = [matrix.values.meta["val"] for matrix in matrices]
    widths = [size for value in values for size in value.shape]
    known = all(isinstance(value.shape[n], int) and value.shape[n] <= MOST_FEATURES for value, n in _features(forward, scores))
    return bool(widths) and known and all(v.device.type == "cpu" and v.dtype == values[0].dtype for v in values)


def _features(forward: Call, scores: Scores) -> list[tuple[torch.Tensor, int]]:
    """The matrices, each with its dimension of features."""
    found = []
    for call in [forward, *([scores.product] if scores.product is not None else [])]:
        rows = call.operands[0].rows if call.operands[0].format is not None else call.sparse[0].rows
        assert rows is not None
        for matrix in call.dense:
            dim = next(n for n, letter in enumerate(matrix.letters) if letter not in (rows.row, rows.column))
            found.append((matrix.values.meta["val"], dim))
    return found


def _as_heads(emit: Emitter, matrix: Given, transposed: bool) -> fx.Node:
    """A matrix as [nodes, 1, features]; `transposed` if its features come first."""
    node = emit(aten.permute.default, matrix.values, [1, 0]) if transposed else matrix.values
    return emit(aten.unsqueeze.default, node, 1)


def _arranged(emit: Emitter, node: fx.Node, in_order: bool) -> fx.Node:
    """[nodes, 1, features] as a matrix, features first if not `in_order`."""
    matrix = emit(aten.squeeze.dim, node, 1)
    return matrix if in_order else emit(aten.permute.default, matrix, [1, 0])


def _sum(emit: Emitter, terms: Sequence[Term]) -> fx.Node:
    """The sum of some products."""
    total: fx.Node | None = None
    for term in terms:
        value, *factors = term.factors
        for factor in factors:
            value = emit(aten.mul.Tensor, value, factor)
        if term.scale != 1:
            value = emit(aten.mul.Tensor, value, term.scale)
        total = value if total is None else emit(aten.add.Tensor, total, value)
    assert total is not None
    return total
