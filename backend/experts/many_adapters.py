"""many-adapters: for batches whose sequences choose their adapters, reads each adapter in place instead of gathering copies.

    %a = index(%A, [%ids])                [B, K, R]             %e = expand(unsqueeze(%ids, 1), [B, S])
    %h = bmm(%x, %a)                      [B, S, R]       →     %h = gossamer::routed_product(%x, %e, permute(%A, [0, 2, 1]))

    %d = bmm(permute(%x, [0, 2, 1]), %g)  [B, K, R]
    %s = index_put(zeros, [%ids], %d, True)             →     %s = gossamer::routed_outer(%x, %g, %e, adapters)

An adapter is an expert of low rank that all tokens of a sequence chose. The pass saves the copies of the factors and, in
training, the gradients of each sequence's copy. So it replaces only products with large copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from gossamer.backend.experts.layers import is_zeros
from gossamer.backend.experts.routes import from_the_end
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.layout import Layout, follow, path, spans
from gossamer.backend.graph.names import user_name
from gossamer.backend.graph.nodes import arguments, hints
from gossamer.backend.report.report import Decision
from gossamer.sparsity.experts import routed_linear as _  # noqa: F401  # defines the operation

aten = torch.ops.aten

_COPIED = 4 << 20
"""Least bytes of gathered factors for which reading them in place is faster, because they exceed the second-level cache.
Measured on one thread of an AMD EPYC (znver5) with 1024 features and 32 sequences: at rank 64, copies take 1.4 times as long
with 1 token and 4.1 times with 32 tokens a sequence; at rank 16, which copies 2 MiB, 1.3 and 0.8 times."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ManyAdapters:
    """Replaces batches of products with gathered factors, and their gradients."""

    name: ClassVar[str] = "many-adapters"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces the products whose copies are large. Returns a decision for each product with gathered factors."""
        if context.options.schedule != "auto":
            return []
        statics, decisions = context.inputs.match(graph), list[Decision]()
        for node in list(graph.nodes):
            product = _Product.at(node) or _Gradient.at(node)
            if product is None:
                continue
            pays = context.options.min_gain == 0 or (product.copied is not None and product.copied >= _COPIED)
            if pays:
                product.replace()
            if isinstance(product, _Product):
                static = statics.get(product.factors)
                name = static.name if static is not None else user_name(product.factors.name)
                decisions.append(_decision(name, product, pays))
        graph.eliminate_dead_code()
        return decisions


def _decision(name: str, product: "_Product", pays: bool) -> Decision:
    shape = tuple(hints(product.factors.meta["val"].shape) or ())
    if not pays:
        return Decision.dense(name, "adapters", shape, 1.0, "left to torch: copies of so few factors are cheap")
    reason = "each sequence reads its adapter in place"
    return Decision(name, "adapters", shape, 1.0, "routed rows", "routed", True, reason, None)


@dataclass(frozen=True)
class _Product:
    """bmm(x, gathered), with x [sequences, tokens, columns].

    factors  of all adapters, [adapters, columns, rows], or [adapters, rows, columns] if `turned`
    ids      the adapter of each sequence, [sequences]
    """

    node: fx.Node
    x: fx.Node
    factors: fx.Node
    ids: fx.Node
    turned: bool

    @classmethod
    def at(cls, node: fx.Node) -> "_Product | None":
        """Returns the product that a node is, else None."""
        if node.target is not aten.bmm.default:
            return None
        x, gathered = arguments(node)
        whole = path(gathered)
        factors, ids = _gather(whole[0])
        if factors is None or ids is None or not _is_served(factors.meta["val"], ids):
            return None
        turned = _turned(whole)
        return None if turned is None else cls(node, x, factors, ids, turned)

    @property
    def copied(self) -> int | None:
        """The bytes of the gathered factors; None if the number of sequences is unknown."""
        return _copied(self.factors, self.ids)

    def replace(self) -> None:
        """Replaces the product by the operation."""
        emit = Emitter(self.node)
        weight = self.factors if self.turned else emit(aten.permute.default, self.factors, [0, 2, 1])
        adapters, rows, columns = map(int, weight.meta["val"].shape)
        sequences, tokens = emit.sizes(self.x, (0, 1))
        experts = _experts(emit, self.ids, adapters, sequences, tokens)
        x = emit(aten.reshape.default, self.x, [-1, columns])
        y: Any = emit(torch.ops.gossamer.routed_product.default, x, experts, weight, None, None)
        self.node.replace_all_uses_with(emit(aten.reshape.default, y, [sequences, tokens, rows]))


@dataclass(frozen=True)
class _Gradient:
    """The gradient of factors: index_put(zeros, [ids], bmm(a, b), True) or index_add, maybe with views between.

    a, b    [sequences, rows, tokens] and [sequences, tokens, columns]
    turned  whether their product is transposed before it is added
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    ids: fx.Node
    turned: bool

    @classmethod
    def at(cls, node: fx.Node) -> "_Gradient | None":
        """Returns the gradient that a node is, else None."""
        given = arguments(node)
        if node.target is aten.index_put.default and len(given) == 4 and len(given[1]) == 1 and given[3] is True:
            zeros, (ids,), added, _ = given
        elif node.target is aten.index_add.default and given[1] == 0 and not node.kwargs:
            zeros, _, ids, added = given
        else:
            return None
        whole = path(added)
        if not is_zeros(zeros) or whole[0].target is not aten.bmm.default:
            return None
        if ids is None or ids.meta["val"].dim() != 1 or not _is_served(node.meta["val"], ids):
            return None
        (a, b), turned = arguments(whole[0]), _turned(whole)
        return None if turned is None else cls(node, a, b, ids, turned)

    @property
    def copied(self) -> int | None:
        """The bytes of the gradients of all sequences' factors; None if the number of sequences is unknown."""
        return _copied(self.node, self.ids)

    def replace(self) -> None:
        """Replaces the sum by the operation."""
        emit = Emitter(self.node)
        adapters, rows, columns = map(int, self.node.meta["val"].shape)
        sequences, tokens = emit.sizes(self.b, (0, 1))
        experts = _experts(emit, self.ids, adapters, sequences, tokens)
        a, b = emit(aten.permute.default, self.a, [0, 2, 1]), self.b
        first, second = (b, a) if self.turned else (a, b)
        first = emit(aten.reshape.default, first, [-1, 1, rows])
        second = emit(aten.reshape.default, second, [-1, columns])
        self.node.replace_all_uses_with(emit(torch.ops.gossamer.routed_outer.default, first, second, experts, adapters))


def _experts(emit: Emitter, ids: fx.Node, adapters: int, sequences: Any, tokens: Any) -> fx.Node:
    """Returns the adapter of each token, [sequences * tokens, 1]. Negative ids count from the end."""
    ids = emit(aten.unsqueeze.default, from_the_end(emit, ids, adapters), 1)
    each = emit(aten.expand.default, ids, [sequences, tokens])
    flat: fx.Node = emit(aten.reshape.default, each, [-1, 1])
    return flat


def _copied(factors: fx.Node, ids: fx.Node) -> int | None:
    sequences, value = hints(ids.meta["val"].shape), factors.meta["val"]
    return None if sequences is None else sequences[0] * prod(map(int, value.shape[1:])) * value.dtype.itemsize


def _is_served(value: Tensor, ids: fx.Node) -> bool:
    """Whether kernels exist for factors and ids of these types and sizes."""
    if value.dim() != 3 or not isinstance(value.shape[0], int):
        return False
    if not value.is_cpu or value.dtype not in _DTYPES or ids.meta["val"].dtype not in (torch.int64, torch.int32):
        return False
    return all(isinstance(size, int) and size > 1 for size in value.shape[1:])


def _turned(whole: Sequence[fx.Node]) -> bool | None:
    """Whether views transpose each matrix of a batch, the first of these nodes. None if they do anything else."""
    shape = whole[0].meta["val"].shape
    layout = follow(Layout.contiguous(shape), list(whole[1:])) if len(shape) == 3 else None
    if layout is None or layout.offset or len(layout.dims) != 3:
        return None
    sequences, a, b = shape
    batch, rows, columns = layout.dims
    plain, turned = (spans(rows, a, b) and spans(columns, b, 1)), (spans(rows, b, 1) and spans(columns, a, b))
    return turned if spans(batch, sequences, a * b) and plain != turned else None


def _gather(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Returns the matrices and the ids of the ones that a node gathers; (None, None) for other nodes."""
    given = arguments(node)
    if node.target is aten.index.Tensor and len(given[1]) == 1:
        source, ids = given[0], given[1][0]
    elif node.target is aten.index_select.default and given[1] == 0:
        source, _, ids = given
    else:
        return None, None
    found = ids is not None and source.meta["val"].dim() == 3 and ids.meta["val"].dim() == 1
    return (source, ids) if found else (None, None)
