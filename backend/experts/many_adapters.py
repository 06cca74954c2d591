"""many-adapters: sequences that choose their adapters, whose factors the graph gathers, read each adapter where it lies.

    %a = index(%A, [%ids])                [B, K, R]             %e = expand(unsqueeze(%ids, 1), [B, S])
    %h = bmm(%x, %a)                      [B, S, R]       →     %h = gossamer::routed_product(%x, %e, permute(%A, [0, 2, 1]))

An adapter is an expert of a low rank that all tokens of a sequence chose. The copies of the factors are what it saves, so only
products with large ones are replaced.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.layout import Layout, follow, path, spans
from gossamer.backend.graph.names import user_name
from gossamer.backend.graph.nodes import arguments, hints, in_training
from gossamer.backend.report.report import Decision
from gossamer.sparsity.experts import routed_linear as _  # noqa: F401  # defines the operation

aten = torch.ops.aten

_COPIED = 4 << 20
"""Bytes of gathered factors from which on reading them in place is faster: they do not stay in the second-level cache. On one
thread of an AMD EPYC (znver5), for 1024 features and a rank of 64, 32 sequences of 1 and 32 tokens take 1.4 and 4.1 times as
long with copies; with a rank of 16, that copies 2 MiB, 1.3 and 0.8 times."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ManyAdapters:
    """Batches of products with gathered factors, in inference."""

    name: ClassVar[str] = "many-adapters"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces the products whose copies are large; a decision for each that was found."""
        if in_training(graph) or context.options.schedule != "auto":
            return []
        statics, decisions = context.inputs.match(graph), list[Decision]()
        for node in list(graph.nodes):
            product = _Product.at(node)
            if product is None:
                continue
            static = statics.get(product.factors)
            name = static.name if static is not None else user_name(product.factors.name)
            shape = tuple(hints(product.factors.meta["val"].shape) or ())
            copied = product.copied
            pays = context.options.min_gain == 0 or (copied is not None and copied >= _COPIED)
            if pays:
                product.replace()
            reason = "each sequence reads its adapter in place" if pays else "left to torch: copies of so few factors are cheap"
            decisions.append(
                Decision(
                    name,
                    "adapters",
                    shape,
                    1.0,
                    "routed rows" if pays else None,
                    "routed" if pays else None,
                    pays,
                    reason,
                    None,
                )
            )
        graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _Product:
    """bmm(x, gathered): x is [sequences, tokens, columns].

    factors  [adapters, columns, rows], or [adapters, rows, columns] where they are `turned`
    ids      [sequences]
    """

    node: fx.Node
    x: fx.Node
    factors: fx.Node
    ids: fx.Node
    turned: bool

    @classmethod
    def at(cls, node: fx.Node) -> "_Product | None":
        """The product that a node is."""
        if node.target is not aten.bmm.default:
            return None
        x, gathered = arguments(node)
        whole = path(gathered)
        factors, ids = _gather(whole[0])
        layout = None if factors is None else follow(Layout.contiguous(whole[0].meta["val"].shape), whole[1:])
        if factors is None or ids is None or layout is None or layout.offset:
            return None
        value = factors.meta["val"]
        if not value.is_cpu or value.dtype not in _DTYPES or ids.meta["val"].dtype not in (torch.int64, torch.int32):
            return None
        if not all(isinstance(size, int) and size > 1 for size in value.shape[1:]) or not isinstance(value.shape[0], int):
            return None
        a, b = value.shape[1:]
        batch, rows, columns = layout.dims
        plain, turned = (spans(rows, a, b) and spans(columns, b, 1)), (spans(rows, b, 1) and spans(columns, a, b))
        if not spans(batch, ids.meta["val"].shape[0], a * b) or plain == turned:
            return None
        return cls(node, x, factors, ids, turned)

    @property
    def copied(self) -> int | None:
        """Bytes of the factors that are gathered; None if nobody knows how many sequences there are."""
        sequences = hints(self.ids.meta["val"].shape)
        value = self.factors.meta["val"]
        return None if sequences is None else sequences[0] * prod(map(int, value.shape[1:])) * value.dtype.itemsize

    def replace(self) -> None:
        """Puts the operation in the place of the product."""
        emit = Emitter(self.node)
        weight = self.factors if self.turned else emit(aten.permute.default, self.factors, [0, 2, 1])
        adapters, rows, columns = map(int, weight.meta["val"].shape)
        sequences, tokens = emit.sizes(self.x, (0, 1))
        last = emit(aten.add.Tensor, self.ids, adapters)
        ids = emit(aten.where.self, emit(aten.lt.Scalar, self.ids, 0), last, self.ids)  # negative ones count from the end
        each = emit(aten.expand.default, emit(aten.unsqueeze.default, ids, 1), [sequences, tokens])
        flat = emit(aten.reshape.default, each, [-1, 1])
        x = emit(aten.reshape.default, self.x, [-1, columns])
        y: Any = emit(torch.ops.gossamer.routed_product.default, x, flat, weight, None, None)
        self.node.replace_all_uses_with(emit(aten.reshape.default, y, [sequences, tokens, rows]))


def _gather(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The matrices and the numbers of those that a node takes, one after the other."""
    given = arguments(node)
    if node.target is aten.index.Tensor and len(given[1]) == 1:
        source, ids = given[0], given[1][0]
    elif node.target is aten.index_select.default and given[1] == 0:
        source, _, ids = given
    else:
        return None, None
    found = ids is not None and source.meta["val"].dim() == 3 and ids.meta["val"].dim() == 1
    return (source, ids) if found else (None, None)
