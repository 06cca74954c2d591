"""drop-ones: products with the number one are their other factor.

    %m = mul(%x, 1.0)      →    %x

Copy it to a room of backend/ and add a line to backend/graph_passes.py, at the place where it has to run.
"""

import torch
from torch import fx

from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import same_dtype
from gossamer.backend.report.report import Decision

aten = torch.ops.aten


class DropOnes:
    """A value replaces its product with one."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """No decision: nothing is made sparse here. A pass that makes something sparse returns what it decided, and why."""
        for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            value, factor = node.args
            if factor == 1 and isinstance(value, fx.Node) and same_dtype(value, node):
                node.replace_all_uses_with(value)
                graph.erase_node(node)
        return []
