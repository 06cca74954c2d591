"""bytes-as-floats: products of int8 are computed in float32 where that is predicted to be faster.

    float32(_int_mm(int8(round(%x)), %w))      →      mm(round(%x), float32(%w))

Processors without dot products of bytes, such as those with AVX2 only, take longer for bytes than for floats. Sums are exact up
to 2^24, which takes more than 1000 nonzeros in a row. Larger ones are rounded, as they would be on becoming float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import VIEWS, arguments
from gossamer.backend.graph.patterns import CONVERTS
from gossamer.backend.regions.contractions import Contraction, contraction_at, find
from gossamer.backend.regions.cost import predicted
from gossamer.backend.regions.decide import judge, refusal
from gossamer.backend.report.report import Decision

aten, prims = torch.ops.aten, torch.ops.prims


class BytesAsFloats:
    """All products of int8 in a graph that have a kernel become products of float32, or none: a chain has one type."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Makes no decision. sparse-weights decides about the new products."""
        options = context.options
        if options.min_gain == 0 or options.schedule != "auto":
            return []
        values = {node: static.tensor for node, static in context.inputs.match(graph).items()}
        made = [_Floats.of(each, values) for each in find(graph, values) if _may_become_floats(each)]
        made = [each for each in made if judge(each.floats, options)[0] is None]
        if made and _us([each.floats for each in made]) < _us([each.integers for each in made]):
            for each in made:
                each.replace()
        graph.eliminate_dead_code()
        return []


@dataclass(frozen=True)
class _Floats:
    """A product of int8, and the product of floats that may take its place."""

    integers: Contraction
    floats: Contraction

    @classmethod
    def of(cls, integers: Contraction, values: dict[fx.Node, torch.Tensor]) -> "_Floats":
        emit = Emitter(integers.node)
        x, weight = integers.node.args
        product = emit(aten.mm.default, _as_floats(emit, x), _as_floats(emit, weight))
        floats = contraction_at(product, values)
        assert floats is not None
        return cls(integers, floats)

    def replace(self) -> None:
        for user in list(self.integers.node.users):
            user.replace_all_uses_with(self.floats.node)


def _may_become_floats(product: Contraction) -> bool:
    """Whether a kernel computes a product of int8 on a CPU, and everybody reads it as float32."""
    node = product.node
    able = product.quantized and node.target is aten._int_mm.default and refusal(product) is None
    return able and bool(node.users) and all(each.target in CONVERTS and _is_f32(each) for each in node.users)


def _us(products: Sequence[Contraction]) -> float:
    return sum(predicted(each, each.tokens).sparse_us for each in products)


def _as_floats(emit: Emitter, given: Any) -> fx.Node:
    """Emits a value of int8 as float32, behind its views. Rounded floats need no conversion to int8."""
    views, node = [], given
    while node.target in VIEWS:
        views.append(node)
        node = arguments(node)[0]
    source = node.args[0] if node.target in CONVERTS else None
    found = source if isinstance(source, fx.Node) and _is_f32(source) and _is_rounded(source) else None
    made = emit(prims.convert_element_type.default, node, torch.float32) if found is None else found
    for view in reversed(views):
        made = emit(view.target, made, *view.args[1:], **view.kwargs)
    return made


def _is_rounded(node: fx.Node) -> bool:
    """Whether floats are integers, perhaps with bounds."""
    while node.target in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
        node = arguments(node)[0]
    return node.target is aten.round.default


def _is_f32(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype is torch.float32)
