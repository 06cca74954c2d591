"""Which convolutions of a graph become ours, once all channels lie behind each other, and whether that pays.

By itself Inductor has channels innermost in all images, as oneDNN likes them; sparse kernels have pixels innermost. Where one
reads what the other wrote, images are reordered. So convolutions are judged together: next to sparse layers, one that by itself
would gain nothing is ours too, if it takes less time than oneDNN and the reordering, and what all of them take then is compared
with what they take dense.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import fx

from gossamer.backend.convolution.convolution import Judgement, dense_us, ours_us
from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.nodes import hint

aten = torch.ops.aten

_FEW_CHANNELS = 4  # images as they come: oneDNN reads those as they are
_COPIES = 4  # that torch makes, one element after the other


def together(graph: fx.Graph, judged: Sequence[Judgement], min_gain: float) -> list[Judgement]:
    """The judgements about all that could be ours, as parts of one graph."""
    able = [each for each in judged if each.able]
    others = {node for node in graph.nodes if node.target is aten.convolution.default} - {each.found.node for each in able}
    dense, ours = 0.0, sum(map(_reordering_us, others))
    taken = set[fx.Node]()
    for each in able:
        found = each.found
        alone, here = dense_us(found), ours_us(found)
        apart = alone + _reordering_us(found.node)
        dense, ours = dense + alone, ours + min(here, apart)
        if here <= apart:
            taken.add(found.node)
    pays = dense > min_gain * ours and any(each.reason is None and not each.found.depthwise for each in able)
    return [_judged_again(each, pays, each.found.node in taken, dense / ours if ours else 1.0) for each in judged]


def _judged_again(judgement: Judgement, pays: bool, taken: bool, gain: float) -> Judgement:
    if not judgement.able:
        return judgement
    if not pays:
        reason = f"too little for its graph, whose convolutions together would gain {gain:.2g}x"
        return replace(judgement, reason=judgement.reason or reason)
    if not taken:
        return replace(judgement, reason=judgement.reason or "dense and reordered it is faster")
    return replace(judgement, reason=None)


def _reordering_us(node: fx.Node) -> float:
    """Microseconds to reorder what a dense convolution reads and writes."""
    x, y = (value.meta["val"] for value in (node.all_input_nodes[0], node))
    sizes = [[hint(n) or 1 for n in value.shape] for value in (x, y)]
    if not y.is_cpu:
        return 0.0
    read = 0 if sizes[0][1] < _FEW_CHANNELS else prod(sizes[0])
    return device_of(y.device).transpose_us(_COPIES * (read + prod(sizes[1])) * y.itemsize) / torch.get_num_threads()
