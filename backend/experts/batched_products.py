"""Replaces batches of products with pruned weights by sparse regions, as of experts with a capacity, and of ensembles.

    %y = bmm(%x, %w)                              %x [experts, tokens, k], %w [experts, k, m]
      →
    %rows = reshape(%x, [-1, k])                  sorted by expert, and each expert has as many
    %y = view(gossamer::region([%rows, %ends, %w], "5c01…"), [experts, -1, m])

The regions are those of grouped products (see sparse_experts.py). Products that stay dense are not changed.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.experts.sparse_experts import Judged, judged, main_weight
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density, zero_heavy
from gossamer.backend.graph.nodes import arguments, in_training
from gossamer.backend.regions.contractions import contraction_at
from gossamer.backend.report.report import Decision
from gossamer.sparsity.experts.stored_products import grouped_rows

aten = torch.ops.aten


def take_batches(graph: fx.Graph, statics: Mapping[fx.Node, Static], context: GraphContext) -> list[Decision]:
    """Replaces batches of products where that is faster. Returns a decision for each weight with many zeros."""
    values, decisions = {node: static.tensor for node, static in statics.items()}, dict[str, Decision]()
    known = computed_from(graph, values)
    for node in list(graph.nodes):
        batch = _Batch.at(node, known)
        main = None if batch is None else main_weight(batch.weight, statics)
        if batch is None or main is None or not zero_heavy(main.tensor) or contraction_at(node, values) is not None:
            continue
        reason = _refused(batch, context)
        made = batch.take(statics, context) if reason is None else _dense(main, reason)
        decisions.setdefault(main.name, made)  # in training, the same weight has another product in the backward pass
    graph.eliminate_dead_code()
    return list(decisions.values())


def _refused(batch: "_Batch", context: GraphContext) -> str | None:
    """Returns why a batch must stay as it is, whatever its weights; None if it need not."""
    if in_training(batch.node.graph):
        return "trained dense: batches of weights are sparse in inference only"
    if context.exported:
        return "no sparse kernel for a batch of weights in an exported program"
    if batch.node.kwargs:
        return "no sparse kernel for a batch of weights with factors"
    return None


def _dense(main: Static, reason: str) -> Decision:
    return Decision.dense(main.name, "bmm", main.tensor.shape, density(main.tensor), reason)


@dataclass(frozen=True)
class _Batch:
    """A batch of products with weights.

    node    the products
    x       the factor that is not static, [experts, tokens, k], or [experts, k, tokens] if the weight is on the left
    weight  the static factor, [experts, k, m], or [experts, m, k] on the left
    left    whether the weight is on the left
    addend  what is added, or None
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    left: bool
    addend: fx.Node | None

    @classmethod
    def at(cls, node: fx.Node, known: Container[fx.Node]) -> "_Batch | None":
        """Returns the batch that a node computes; None unless one factor is static and the other is not."""
        if node.target not in (aten.bmm.default, aten.baddbmm.default):
            return None
        *addend, first, second = arguments(node)
        if (first in known) == (second in known):
            return None
        left = first in known
        x, weight = (second, first) if left else (first, second)
        return cls(node, x, weight, left, addend[0] if addend else None)

    def take(self, statics: Mapping[fx.Node, Static], context: GraphContext) -> Decision:
        """Replaces the products by a region for each expert, unless dense ones are faster. Returns the decision."""
        grouped, y = self._grouped()
        found = judged(grouped, statics, context)
        assert isinstance(found, Judged)
        if found.reason is not None:
            found.forget()
            return found.dense(found.reason)
        decision = found.put(statics, context)
        if decision.sparse:
            self.node.replace_all_uses_with(y)
        return decision

    def _grouped(self) -> tuple[fx.Node, fx.Node]:
        """Adds the same as one grouped product to the graph. Returns that, and the result in the shape of the batch."""
        emit = Emitter(self.node)
        x, weight = (emit(aten.permute.default, each, [0, 2, 1]) if self.left else each for each in (self.x, self.weight))
        experts, columns, rows = weight.meta["val"].shape
        counted = emit(aten.arange.start_step, 1, experts + 1, 1, dtype=torch.int64, device=x.meta["val"].device)
        ends = emit(aten.mul.Tensor, counted, emit.sizes(x, (1,))[0])
        grouped = emit(grouped_rows, emit(aten.reshape.default, x, [-1, columns]), weight, ends)
        y = emit(aten.view.default, grouped, [experts, -1, rows])
        if self.left:
            y = emit(aten.permute.default, y, [0, 2, 1])
        return grouped, y if self.addend is None else emit(aten.add.Tensor, self.addend, y)
