"""Whether channels should lie behind each other in all of a graph, as the sparse kernels have them.

By itself Inductor has channels innermost in all images, as oneDNN likes them. What is gained by the layers of a graph that
become sparse is set against what those lose that stay dense, whose images are reordered on the way in and out.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from gossamer.backend.convolution.convolution import Convolution, dense_us, gain_of
from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.nodes import hint

aten = torch.ops.aten

Judgement = tuple[str | None, float | None]
"""Why a convolution stays dense, None if a kernel of ours takes it, and the predicted gain."""

_FEW_CHANNELS = 4  # images as they come: oneDNN reads those as they are


def planar_pays(graph: fx.Graph, judged: Sequence[tuple[Convolution, Judgement]]) -> bool:
    """Whether sparse convolutions gain more than the dense ones lose."""
    taken = [found for found, (reason, _) in judged if reason is None]
    ours = {found.node for found in taken}
    gained = sum(dense_us(found) * (1 - 1 / gain_of(found)) for found in taken if not found.depthwise)
    lost = 0.0
    for node in graph.nodes:
        if node.target is aten.convolution.default and node not in ours:
            sizes = [[hint(n) or 1 for n in value.meta["val"].shape] for value in (node.args[0], node)]
            given = node.meta["val"]
            if sizes[0][1] > _FEW_CHANNELS and given.is_cpu:
                lost += device_of(given.device).transpose_us(sum(map(prod, sizes)) * given.itemsize)
    return gained > lost / torch.get_num_threads()
