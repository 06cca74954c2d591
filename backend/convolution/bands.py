"""Pointwise convolutions that a depthwise one follows, by bands of channels (see `row_of_kernels`).

What other convolutions read is packed with zeros around it, which would be done again for each band. A kernel for a band is
told the sizes of images, so that it need not pack them.
"""

from dataclasses import replace
from math import prod

import torch
from torch import fx

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.graph.nodes import in_training, only_user
from gossamer.backend.regions.grow_region import Region

aten = torch.ops.aten

_LARGE = 1 << 20  # bytes of an image beyond what the cache of a core holds
_BAND = 512 << 10  # bytes of a band at most


def band_rows(found: Convolution, region: Region) -> int | None:
    """How many channels a band has, where a depthwise convolution reads the result; None where all are computed at once."""
    user, shape = only_user(region.output), region.output.meta["val"].shape[1:]
    if user is not None and user.target is aten.constant_pad_nd.default:
        user = only_user(user)
    if user is None or user.target is not aten.convolution.default or in_training(user.graph):
        return None
    depthwise = user.args[0] in (region.output, *region.output.users) and user.args[8] == found.m
    in_one_block = found.window.pointwise and found.window.groups == 1 and found.channels <= found.window.channels
    if not depthwise or not in_one_block or not all(isinstance(n, int) for n in shape):
        return None
    plane = prod(shape[1:]) * region.output.meta["val"].dtype.itemsize
    fitting = [n for n in range(1, found.m) if found.m % n == 0 and n * plane <= _BAND]
    return max(fitting) if found.m * plane > _LARGE and fitting else None


def of_rows(found: Convolution, region: Region, rows: int) -> tuple[Convolution, Region]:
    """The same convolution for so many rows of its weight, as its kernel is compiled."""
    graph = fx.Graph()
    copies = dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(region.body.graph, copies))
    for node, copy in copies.items():
        shape = node.meta.get("shape")
        if shape is not None:
            own = {"x": shape, "w": (rows, *shape[1:])}.get(node.name)
            copy.meta = {**node.meta, "shape": own or tuple(rows if n == found.m else n for n in shape)}
    window = replace(found.window, images=found.results)
    return replace(found, m=rows, window=window), replace(region, body=fx.GraphModule({}, graph, "Region"))
