"""Writes numbers into a graph that tracing has put beside it, as tensors: those of torch.tensor(2.0) in a model's code.

    lift_fresh_copy(%_tensor_constant0)    →    full([], 2.0)

So a weight that is computed from such a number does not have it as a leaf. Inductor cannot pass constants of a graph to regions
(torch 2.13).
"""

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.inputs import constants

aten = torch.ops.aten


def spell_out_numbers(graph: fx.Graph) -> None:
    """Replaces constants without dimensions by operations that make them."""
    for node, value in constants(graph).items():
        for user in [user for user in node.users if user.target is aten.lift_fresh_copy.default and value.dim() == 0]:
            number = Emitter(user)(
                aten.full.default, [], value.item(), dtype=value.dtype, device=value.device, pin_memory=False
            )
            user.replace_all_uses_with(number)
            graph.erase_node(user)
