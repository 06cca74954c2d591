"""silu-gradients: the gradient of silu as a product with its derivative.

    %1 = mul(%gradient, sigmoid(%x))             →    %1 = mul(sigmoid(%x), %d)
    %2 = mul(%1, %d)                                  %2 = mul(%gradient, %1)            with %d = 1 + x (1 - sigmoid(x))

Then the derivative can be computed where %x is, in the forward pass (regions/grow_region.py). It is finite where it was:
sigmoid is at most 1.
"""

from typing import ClassVar, cast

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.fusable import constant_of, is_elementwise
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import in_training, only_user, same_dtype, same_shape
from gossamer.backend.report.report import Decision

aten = torch.ops.aten


class SiluGradients:
    """Gradients of silu become products with one matrix."""

    name: ClassVar[str] = "silu-gradients"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """No decision: sparse-weights decides about what this makes."""
        for node in list(graph.nodes) if in_training(graph) else ():
            for inner, derivative in _factors(node):
                pairs = _factors(inner) if only_user(inner) is node else []
                found = next((pair for pair in pairs if _is_logistic(pair[1], derivative)), None)
                if found is not None:
                    gradient, logistic = found
                    emit = Emitter(node)
                    product = emit(aten.mul.Tensor, gradient, emit(aten.mul.Tensor, logistic, derivative))
                    node.replace_all_uses_with(product)
                    break
        graph.eliminate_dead_code()
        return []


def _factors(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The factors of a product of two matrices, in both orders."""
    if node.target is not aten.mul.Tensor or not all(isinstance(factor, fx.Node) for factor in node.args):
        return []
    left, right = cast(tuple[fx.Node, fx.Node], node.args)
    return [(left, right), (right, left)]


def _is_logistic(factor: fx.Node, derivative: fx.Node) -> bool:
    """Whether a factor is the sigmoid of that which the derivative is computed from."""
    if factor.target is not aten.sigmoid.default or not (same_shape(factor, derivative) and same_dtype(factor, derivative)):
        return False
    x, pending = factor.args[0], [derivative]
    while pending:
        node = pending.pop()
        if node is x or constant_of(node) is not None:
            continue
        if not is_elementwise(node):
            return False
        pending += node.all_input_nodes
    return True
