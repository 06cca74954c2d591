"""unsigned-products: products of uint8 and int8 that stand for products of int8 become products of int8 again.

    _int_mm(uint8(int32(%x) + 128), %w) - 128 * sum(%w, 0)      →      _int_mm(%x, %w)

The results are equal bit for bit. torchao writes such products on CPUs, for their instructions. Gossamer's kernels add the 128
themselves when they pack x.
"""

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import density
from gossamer.backend.graph.nodes import SPREADS, VIEWS, arguments
from gossamer.backend.graph.patterns import CONVERTS, Behind, Call, Hole, Named, Pattern, match
from gossamer.backend.report.report import Decision

aten = torch.ops.aten


def _before(views: Container[Any], node: fx.Node) -> fx.Node:
    """Returns the source of a chain of views."""
    while node.target in views:
        node = arguments(node)[0]
    return node


def _source(dtype: torch.dtype, node: fx.Node) -> fx.Node | None:
    """Returns the value before a conversion to a type, and before views of it. Returns None if there is no conversion."""
    node = _before(VIEWS, node)
    source: Any = node.args[0] if node.target in CONVERTS and node.meta["val"].dtype is dtype else None
    return source


def _in(dtype: torch.dtype, x: Pattern) -> Pattern:
    return Behind(partial(_source, dtype), x)


def _is_int8(of: Any) -> bool:
    return isinstance(of, fx.Node) and of.meta["val"].dtype is torch.int8


_WEIGHT = Hole("weight")
_UNSIGNED = Call((aten._int_mm.default,), (_in(torch.uint8, _in(torch.int32, Hole("x", _is_int8)) + 128), _WEIGHT))
_SUMS = Named("sums", Call((aten.sum.dim_IntList,), (_WEIGHT, (0,)), and_more=True))
_CORRECTED = _UNSIGNED - Behind(partial(_before, SPREADS), _SUMS * 128)


class UnsignedProducts:
    """Products of uint8 and int8 become products of int8."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Makes no decision. sparse-weights decides about the new products."""
        statics = context.inputs.match(graph)
        for node in graph.find_nodes(op="call_function", target=aten.sub.Tensor):
            found = match(_CORRECTED, node)
            if found is None or found["sums"].meta["val"].dtype is not torch.int32:
                continue
            weight = found["weight"]
            turned = weight.target in (aten.t.default, aten.permute.default)
            static = statics.get(weight.args[0] if turned else weight)
            if static is not None and density(static.tensor) < 1:
                emit = Emitter(node)
                x = emit(aten.reshape.default, found["x"], [-1, weight.meta["val"].shape[0]])
                node.replace_all_uses_with(emit(aten._int_mm.default, x, weight))
        graph.eliminate_dead_code()
        return []
