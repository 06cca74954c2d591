"""unsigned-products: products of int8 that were made unsigned for the instructions of CPUs become what they stand for.

    _int_mm(uint8(int32(%x) + 128), %w) - 128 * sum(%w, 0)      →      _int_mm(%x, %w)

Bit for bit the same. torchao writes it so on CPUs; kernels of ours add the 128 where they pack x.
"""

from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import density
from gossamer.backend.graph.nodes import SPREADS, VIEWS
from gossamer.backend.report.report import Decision

aten, prims = torch.ops.aten, torch.ops.prims

_MIDDLE = 128


class UnsignedProducts:
    """Products of uint8 and int8 become products of int8."""

    name: ClassVar[str] = "unsigned-products"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """No decision: sparse-weights decides about what this makes."""
        statics = context.inputs.match(graph)
        for node in list(graph.nodes):
            if node.target is aten.sub.Tensor and not node.kwargs:
                product, correction = node.args
                signed = _signed(product)
                if signed is None or not _corrects(correction, product.args[1]):
                    continue
                weight = statics.get(_stored(product.args[1]))
                if weight is not None and density(weight.tensor) < 1:
                    emit = Emitter(node)
                    x = emit(aten.reshape.default, signed, [-1, product.args[1].meta["val"].shape[0]])
                    node.replace_all_uses_with(emit(aten._int_mm.default, x, product.args[1]))
        graph.eliminate_dead_code()
        return []


def _signed(product: object) -> fx.Node | None:
    """The int8 whose unsigned form a product has as its left factor."""
    if not isinstance(product, fx.Node) or product.target is not aten._int_mm.default:
        return None
    added = _converted(product.args[0], torch.uint8)
    if added is None or added.target is not aten.add.Tensor or added.args[1] != _MIDDLE or added.kwargs:
        return None
    x = _converted(added.args[0], torch.int32)
    return x if x is not None and x.meta["val"].dtype is torch.int8 else None


def _stored(matrix: fx.Node) -> fx.Node:
    """What a matrix is, maybe, the transpose of."""
    source: Any = matrix.args[0] if matrix.target in (aten.t.default, aten.permute.default) else matrix
    return source


def _corrects(node: object, weight: object) -> bool:
    """Whether a node is 128 times the sums of a matrix's columns, in int32."""
    while isinstance(node, fx.Node) and node.target in SPREADS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor or node.args[1] != _MIDDLE:
        return False
    total = node.args[0]
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList:
        return False
    return total.args[0] is weight and total.args[1] == [0] and total.meta["val"].dtype is torch.int32


def _converted(node: object, dtype: torch.dtype) -> fx.Node | None:
    """What was converted to a type, views aside."""
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target not in (aten._to_copy.default, prims.convert_element_type.default):
        return None
    source = node.args[0]
    return source if node.meta["val"].dtype is dtype and isinstance(source, fx.Node) else None
