"""x (S + U V) becomes x S + (x U) V, where S is a sparse weight and U V has a low rank.

    %w = add(%s, mm(%u, %v))                    %p = mm(%x, %s)                    sparse
    %y = mm(%x, %w)                        →    %q = mm(mm(%x, %u), %v)            rank x (rows + columns) multiply-adds a token
                                                %y = add(%p, %q)

The sum has no zeros, and was dense. Its parts are what `sparse-weights` computes in one kernel.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import written_by
from gossamer.backend.graph.nodes import arguments, in_training, same_dtype, same_shape
from gossamer.backend.regions.contractions import contraction_at
from gossamer.backend.regions.cost import predicted, renewing_pays, usual_tokens
from gossamer.backend.regions.decide import refusal
from gossamer.backend.regions.low_rank import WIDEST
from gossamer.backend.report.report import Decision
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.elements import WEIGHTS

aten = torch.ops.aten

_AS_WRITTEN = "x (S + U V) as written: S is too dense, or changes at every step"


class DistributeFactors:
    """Products with a sparse weight and a low rank beside it get both parts apart."""

    name: ClassVar[str] = "distribute-factors"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Splits the products for which that pays; a decision for each that has such a weight."""
        statics, written = context.inputs.match(graph), written_by(graph)
        values = {node: static.tensor for node, static in statics.items() if node not in written}
        decisions = []
        for node in graph.nodes:
            split = _Split.at(node) if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs else None
            if split is None:
                continue
            name, gain = split.distribute(values, {node: static.name for node, static in statics.items()})
            if gain is None:
                continue
            pays = gain >= context.options.min_gain
            (split.finish if pays else split.undo)()
            reason = f"x (S + U V) as x S + (x U) V, rank {split.rank}" if pays else _AS_WRITTEN
            shape = tuple(int(size) for size in split.sparse.meta["val"].shape)
            decisions.append(Decision(name, "low rank", shape, 1.0, None, None, False, reason, gain))
        graph.eliminate_dead_code()
        return decisions


@dataclass
class _Split:
    """A product with a sum.

    node           the product, of `x`
    sparse         the matrix that may be sparse; `transposed`: x is multiplied with the transpose of the sum
    first, second  the factors of the low rank, and the `scale` of their product
    made           what `distribute` has added
    """

    node: fx.Node
    x: fx.Node
    sparse: fx.Node
    transposed: bool
    first: fx.Node
    second: fx.Node
    scale: float
    made: list[fx.Node] = field(default_factory=list)

    @classmethod
    def at(cls, node: fx.Node) -> "_Split | None":
        """The sum that a product multiplies with on its right."""
        *_, x, w = arguments(node)
        turned = False
        while w.target in (aten.permute.default, aten.t.default):
            w, turned = w.all_input_nodes[0], not turned
        if w.target is not aten.add.Tensor or not all(isinstance(each, fx.Node) for each in w.args):
            return None
        left, right = arguments(w)
        for sparse, low, scale in ((left, right, float(w.kwargs.get("alpha", 1))), (right, left, 1.0)):
            if low.target is aten.mul.Tensor and not isinstance(low.args[1], fx.Node):
                low, scale = low.args[0], scale * low.args[1]
            if low.target is not aten.mm.default or (sparse is right and w.kwargs):
                continue
            if not all(same_shape(each, w) and same_dtype(each, w) for each in (sparse, low)):
                continue
            first, second = arguments(low)
            sizes = first.meta["val"].shape[1], *sparse.meta["val"].shape
            whole = all(isinstance(size, int) and size > 0 for size in sizes) and len(sizes) == 3
            if whole and sizes[0] <= WIDEST and 2 * sizes[0] < min(sizes[1:]):
                return cls(node, x, sparse, turned, first, second, scale)
        return None

    @property
    def rank(self) -> int:
        """Columns of the first factor."""
        return int(self.first.meta["val"].shape[1])

    def distribute(self, values: dict[fx.Node, torch.Tensor], names: dict[fx.Node, str]) -> tuple[str, float | None]:
        """Adds the parts to the graph, without a use; the name of the sparse one, and the gain, None if there is no kernel."""
        emit = self._emit(Emitter(self.node))
        first, second = (self.second, self.first) if self.transposed else (self.first, self.second)
        product = emit(aten.mm.default, self.x, self._turned(emit, self.sparse))
        narrow = emit(aten.mm.default, self.x, self._turned(emit, first))
        low = emit(aten.mm.default, narrow, self._turned(emit, second))
        if self.scale != 1:
            low = emit(aten.mul.Tensor, low, self.scale)
        bias = [emit(aten.add.Tensor, product, arguments(self.node)[0])] if self.node.target is aten.addmm.default else []
        self.sum = emit(aten.add.Tensor, (bias or [product])[0], low)
        contraction = contraction_at(product, values)
        if contraction is None or refusal(contraction) is not None:
            self.undo()
            return "", None
        found, device = predicted(contraction, contraction.tokens), device_of(contraction.weight.device)
        m, k, element = contraction.m, contraction.k, WEIGHTS[contraction.weight.dtype]
        dense = device.predict(Matrix(m, k, 1, element, device.bits, features=device.features), usual_tokens(contraction))
        beside = dense.dense_us * self.rank * (m + k) / (m * k)
        main = contraction.weight.main
        trains = in_training(self.node.graph) and any(values[leaf].requires_grad for leaf in contraction.weight.leaves)
        if trains and not renewing_pays(contraction, 1.0):
            return names.get(main, str(main)), 0.0
        return names.get(main, str(main)), found.dense_us / (found.sparse_us + beside)

    def _emit(self, emit: Emitter) -> Any:
        def noted(*args: Any) -> fx.Node:
            self.made.append(emit(*args))
            return self.made[-1]

        return noted

    def _turned(self, emit: Any, matrix: fx.Node) -> fx.Node:
        made: fx.Node = emit(aten.permute.default, matrix, [1, 0]) if self.transposed else matrix
        return made

    def finish(self) -> None:
        """Has the sum of the parts take the place of the product."""
        self.node.replace_all_uses_with(self.sum)

    def undo(self) -> None:
        """Takes the parts out again."""
        for node in reversed(self.made):
            self.node.graph.erase_node(node)
        self.made = []
