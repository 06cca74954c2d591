"""drop-copies: turns copies into new memory into clones. Joint graphs have such copies for writes into a view in place.

    %s = new_empty_strided(%g, [12, 70, 70], [4900, 70, 1])
    %c = copy(%s, %g)                                             →    %c = clone(%g)

Autograd copies the gradient of `scores += bias` twice like this. All other passes look through clones, and Inductor removes
needless ones.
"""

import torch
from torch import fx

from gossamer.backend.devices.device_kernel import contiguous_strides
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import equal_sizes, same_dtype, same_shape
from gossamer.backend.report.report import Decision

aten = torch.ops.aten


class DropCopies:
    """Replaces a copy into memory of the same type and sizes by a clone of its source."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns no decisions, because this pass makes nothing sparse."""
        changed = False
        for node in graph.find_nodes(op="call_function", target=aten.copy.default):
            into, source = node.args[:2]
            if not (isinstance(source, fx.Node) and same_shape(into, source) and same_dtype(into, source)):
                continue
            before, after = into.meta["val"], node.meta["val"]
            if before.device != source.meta["val"].device:
                continue
            if equal_sizes(source.meta["val"].stride(), after.stride()):
                layout = torch.preserve_format
            elif equal_sizes(after.stride(), contiguous_strides(after.shape)):
                layout = torch.contiguous_format
            else:
                continue
            node.replace_all_uses_with(Emitter(node)(aten.clone.default, source, memory_format=layout))
            changed = True
        if changed:
            graph.eliminate_dead_code()
        return []
