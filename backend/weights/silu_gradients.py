"""silu-gradients: the gradient of silu becomes a product with the derivative of silu.

    %1 = mul(%gradient, sigmoid(%x))             →    %1 = mul(sigmoid(%x), %d)
    %2 = mul(%1, %d)                                  %2 = mul(%gradient, %1)            with %d = 1 + x (1 - sigmoid(x))

Then a region can compute the derivative in the forward pass, with %x (regions/grow_region.py). No value becomes infinite by
the new order, because sigmoid is at most 1.
"""

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.patterns import Hole, Named, match, sigmoid
from gossamer.backend.report.report import Decision

aten = torch.ops.aten

_GRADIENT = (Hole("gradient") * Named("logistic", sigmoid(Hole("x")))) * Hole("derivative")


class SiluGradients:
    """Gradients of silu become products with one matrix, the derivative."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Makes no decision. sparse-weights decides about the new products."""
        for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            of_silu = str(node.meta.get("original_aten")) == "aten.silu_backward.default"
            found = match(_GRADIENT, node) if of_silu else None
            if found is not None:
                emit = Emitter(node)
                derivative = emit(aten.mul.Tensor, found["logistic"], found["derivative"])
                node.replace_all_uses_with(emit(aten.mul.Tensor, found["gradient"], derivative))
        graph.eliminate_dead_code()
        return []
