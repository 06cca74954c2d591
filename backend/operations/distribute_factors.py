"""Rewrites x (S + U V) as x S + (x U) V, where S is a sparse weight and U V has a low rank.

    %w = add(%s, mm(%u, %v))                    %p = mm(%x, %s)                    sparse
    %y = mm(%x, %w)                        →    %q = mm(mm(%x, %u), %v)            rank x (rows + columns) multiply-adds a token
                                                %y = add(%p, %q)

The sum S + U V has no zeros, so without this pass it stays dense. The pass `sparse-weights` then computes the parts in one
kernel. A sum may have several sparse terms and several low ranks, with signs and factors, as merged adapters have.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import written_by
from gossamer.backend.graph.nodes import WIDE_FLOATS, arguments, in_training, same_dtype, same_shape
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
    """Splits products with a sum of a sparse weight and a low rank into one product for each part."""

    name: ClassVar[str] = "distribute-factors"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Splits products where that is faster. Returns a decision for each product with such a sum."""
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
            decisions.append(Decision(name, "low rank", split.shape, 1.0, None, None, False, reason, gain))
        graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _LowRank:
    """A term of a sum: the product of two narrow factors, times a scale."""

    first: fx.Node
    second: fx.Node
    scale: float

    @classmethod
    def at(cls, term: fx.Node, scale: float) -> "_LowRank | None":
        """Returns the low rank that a term is; None for other terms."""
        if term.target is not aten.mm.default:
            return None
        first, second = arguments(term)
        sizes = first.meta["val"].shape[1], *term.meta["val"].shape
        narrow = all(isinstance(size, int) and size > 0 for size in sizes) and sizes[0] <= WIDEST
        return cls(first, second, scale) if narrow and 2 * sizes[0] < min(sizes[1:]) else None

    @property
    def rank(self) -> int:
        """The columns of the first factor."""
        return int(self.first.meta["val"].shape[1])


@dataclass
class _Split:
    """A product of x with a sum.

    node        the product
    shape       shape of the sum
    transposed  whether x is multiplied with the transpose of the sum
    others      the terms that are not low ranks and may be sparse, each with its factor
    low         the terms of low rank
    made        the nodes that `distribute` added
    """

    node: fx.Node
    x: fx.Node
    shape: tuple[int, ...]
    transposed: bool
    others: list[tuple[fx.Node, float]]
    low: list[_LowRank]
    made: list[fx.Node] = field(default_factory=list)

    @classmethod
    def at(cls, node: fx.Node) -> "_Split | None":
        """Returns the split of a product; None unless its right factor is a sum with low ranks and other terms."""
        if node.meta["val"].dtype not in WIDE_FLOATS:  # x U may overflow although x (S + U V) does not
            return None
        *_, x, w = arguments(node)
        turned = False
        while w.target in (aten.permute.default, aten.t.default):
            w, turned = w.all_input_nodes[0], not turned
        terms = _terms(w)
        found = [_LowRank.at(*each) for each in terms]
        low = [each for each in found if each is not None]
        others = [each for each, narrow in zip(terms, found, strict=True) if narrow is None]
        shape = w.meta["val"].shape
        if not (low and others) or 2 * sum(each.rank for each in low) >= min(shape):
            return None
        return cls(node, x, tuple(map(int, shape)), turned, others, low)

    @property
    def rank(self) -> int:
        """The rank of all low ranks together."""
        return sum(each.rank for each in self.low)

    def distribute(self, values: dict[fx.Node, torch.Tensor], names: dict[fx.Node, str]) -> tuple[str, float | None]:
        """Adds the parts to the graph; nothing uses them yet.

        Returns the name of the sparse weight, and the predicted gain; None for the gain if there is no kernel.
        """
        emit = self._emit(Emitter(self.node))
        scaled = lambda value, scale: value if scale == 1 else emit(aten.mul.Tensor, value, scale)
        (sparse, *more) = [scaled(*each) for each in self.others]
        for each in more:
            sparse = emit(aten.add.Tensor, sparse, each)
        product = self.sum = emit(aten.mm.default, self.x, self._turned(emit, sparse))
        if self.node.target is aten.addmm.default:
            self.sum = emit(aten.add.Tensor, product, arguments(self.node)[0])
        for each in self.low:
            first, second = (each.second, each.first) if self.transposed else (each.first, each.second)
            narrow = emit(aten.mm.default, self.x, self._turned(emit, first))
            wide = emit(aten.mm.default, narrow, self._turned(emit, second))
            self.sum = emit(aten.add.Tensor, self.sum, scaled(wide, each.scale))
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
        """Replaces the product by the sum of the parts."""
        self.node.replace_all_uses_with(self.sum)

    def undo(self) -> None:
        """Removes the parts from the graph."""
        for node in reversed(self.made):
            self.node.graph.erase_node(node)
        self.made = []


def _terms(value: fx.Node, scale: float = 1.0) -> list[tuple[fx.Node, float]]:
    """Returns the terms of a sum of matrices of one type, each with its factor. A value that is no sum is its own only term."""
    given = arguments(value)
    if value.target in (aten.add.Tensor, aten.sub.Tensor):
        alike = all(isinstance(each, fx.Node) and same_shape(each, value) and same_dtype(each, value) for each in given)
        if alike:
            factor: Any = value.kwargs.get("alpha", 1)
            sign = -factor if value.target is aten.sub.Tensor else factor
            return [*_terms(given[0], scale), *_terms(given[1], scale * sign)]
    if value.target is aten.mul.Tensor and isinstance(given[1], int | float) and same_dtype(given[0], value):
        return _terms(given[0], scale * given[1])
    return [(value, scale)]
