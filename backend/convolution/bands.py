"""Splits a pointwise convolution that a depthwise one follows into bands of channels (see `row_of_kernels`).

The depthwise convolution then finds each band in the cache. Other convolutions are not split, because they pack their images
with zeros around them, and would do so again for each band. The kernel of a band knows the sizes of images, and does not pack
them.
"""

from dataclasses import replace
from math import prod

import torch
from torch import fx

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.graph.nodes import in_training, only_user
from gossamer.backend.regions.grow_region import Region

aten = torch.ops.aten

_LARGE = 1 << 20  # bytes of an image that a core's cache does not hold any more
_BAND = 512 << 10  # the most bytes of a band


def band_rows(found: Convolution, region: Region) -> int | None:
    """Returns how many channels a band has; None if the convolution is not split."""
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
    """Returns the convolution and its region for so many rows of the weight, to compile the kernel of a band."""
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
