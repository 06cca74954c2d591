"""Reorders the rows and columns of weights whose nonzeros then form blocks. The weight is packed in the new order.
replace_region.py reorders the columns of x and of the result around the kernel.

Lines are rows or columns. The order is a walk from each line to the most similar one that is left (Jaccard similarity of the
positions of nonzeros). So lines with nonzeros in the same places become neighbours. At first, a few lines are compared with all
others. In weights with unstructured pruning they are similar only by chance, and the search ends. After "SMaT", Okanovic et al.
2024.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial

import torch

from gossamer.backend.devices.device import find_device
from gossamer.backend.graph.weight_expressions import Weight, run
from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.regions.contractions import Contraction, Order
from gossamer.backend.regions.cost import permuting_pays
from gossamer.runtime.packers.nonzeros import nonzero_mask

_ALIKE = 0.6
"""The least average similarity of a line in a block to its most similar lines."""

_SAMPLE, _NEAREST = 32, 3
"""The number of lines that are compared at first, and the number of lines that each must resemble."""

_DENSEST = 0.5
"""Blocks of denser weights gain nothing."""

_LONGEST = 1 << 13
"""Comparing more lines with each other takes too long."""


def in_blocks(contraction: Contraction, leaves: list[torch.Tensor]) -> Contraction:
    """Returns the contraction with a reordered weight if its blocks make it faster. Otherwise returns the contraction itself.

    leaves  the values that the weight is computed from
    """
    weight = contraction.weight
    device = find_device(weight.device)
    if (
        contraction.side != "right"
        or contraction.quantized
        or weight.pattern.block
        or weight.density > _DENSEST
        or device is None
        or not device.reorders
    ):
        return contraction
    mask = nonzero_mask(run(weight.evaluate, leaves)).cpu()
    orders = block_orders(mask)
    if orders is None:
        return contraction
    rows, columns = orders
    pattern = Pattern.of(mask[rows][:, columns])
    by_product = orders if weight.transposed else (columns, rows)
    reordered = dataclasses.replace(contraction, weight=_reordered(weight, rows, columns, pattern), orders=by_product)
    return reordered if pattern.block is not None and permuting_pays(contraction, reordered) else contraction


def block_orders(mask: torch.Tensor) -> tuple[Order, Order] | None:
    """Returns orders of a bool matrix's rows and columns in which nonzeros may form blocks, or None if no lines are similar."""
    found = [_walk(lines) if _some_are_alike(lines) else None for lines in (mask.float(), mask.t().float())]
    if all(order is None for order in found):
        return None
    rows, columns = (torch.arange(n) if order is None else order for order, n in zip(found, mask.shape, strict=True))
    return rows, columns


def _some_are_alike(lines: torch.Tensor) -> bool:
    count = len(lines)
    if not _NEAREST < count <= _LONGEST:
        return False
    chosen = torch.arange(0, count, -(-count // _SAMPLE))
    alike = _similarity(lines[chosen], lines)
    alike[torch.arange(len(chosen)), chosen] = -1  # a line is not compared with itself
    return float(alike.topk(_NEAREST).values.mean(1).median()) >= _ALIKE


def _similarity(lines: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns the Jaccard similarity of each line and each other line: common nonzeros over all nonzeros of both."""
    common = lines @ others.t()
    return common / (lines.sum(1)[:, None] + others.sum(1) - common).clamp(min=1)


def _walk(lines: torch.Tensor) -> Order:
    alike = _similarity(lines, lines)
    order = torch.empty(len(lines), dtype=torch.int64)
    current = 0
    for step in range(len(lines)):
        order[step] = current
        alike[:, current] = -1
        current = int(alike[current].argmax())
    return order


def _reordered(weight: Weight, rows: Order, columns: Order, pattern: Pattern) -> Weight:
    content = hashlib.sha256(rows.numpy().tobytes() + columns.numpy().tobytes()).hexdigest()[:16]
    evaluate = partial(_in_order, weight.evaluate, rows, columns)
    return dataclasses.replace(weight, evaluate=evaluate, key=f"{weight.key} in order {content}", pattern=pattern, groups=None)


def _in_order(evaluate: Callable[..., torch.Tensor], rows: Order, columns: Order, *leaves: torch.Tensor) -> torch.Tensor:
    return evaluate(*leaves).index_select(0, rows).index_select(1, columns)
