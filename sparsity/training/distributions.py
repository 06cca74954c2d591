"""Distributions say how dense each layer is, so that all layers together have a given density.

"uniform"              all layers are equally dense
"global"               the most salient elements of all layers together are kept (Frankle and Carbin, 2019)
"erdos-renyi"          in proportion to (n_in + n_out) / (n_in n_out) (Mocanu et al., 2018)
"erdos-renyi-kernel"   the same, with the sides of a convolution's kernel in sum and product (Evci et al., 2020, section 3 (1))
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gossamer.dialects.option_check import check_name

DISTRIBUTIONS = ("uniform", "global", "erdos-renyi", "erdos-renyi-kernel")


def densities(how: str, shapes: Sequence[tuple[int, ...]], density: float, scores: Sequence[Tensor] = ()) -> list[float]:
    """Returns the density of each layer.

    shapes  the shapes of the weights, outputs x inputs x sides of the kernel
    scores  for "global": the scores of all elements, below 0 for elements that cannot be kept
    """
    if how == "uniform":
        return [density] * len(shapes)
    if how == "global":
        together = torch.cat([each.flatten() for each in scores])
        kept = torch.zeros_like(together, dtype=torch.bool)
        kept[together.topk(round(density * together.numel()), sorted=False).indices] = True
        return [float(part.float().mean()) for part in kept.split([each.numel() for each in scores])]
    check_name("distribution", how, DISTRIBUTIONS)
    sides = [shape if how.endswith("kernel") else shape[:2] for shape in shapes]
    return _in_proportion([sum(side) / prod(side) for side in sides], [prod(shape) for shape in shapes], density)


def _in_proportion(shares: Sequence[float], sizes: Sequence[int], density: float) -> list[float]:
    """Returns epsilon * share for each layer. Layers that would be above 1, the largest first, become dense instead."""
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(sizes)) if i not in full]
        wanted = density * sum(sizes) - sum(sizes[i] for i in full)
        scale = wanted / sum(shares[i] * sizes[i] for i in rest) if rest else 0.0
        over = [i for i in rest if scale * shares[i] > 1]
        if not over:
            return [1.0 if i in full else max(0.0, scale * shares[i]) for i in range(len(sizes))]
        full.add(max(over, key=shares.__getitem__))
