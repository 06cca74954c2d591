"""Weights whose nonzeros would lie in blocks if rows and columns came in another order: they are packed in that order, and the
columns of x and of the result are reordered around the kernel.

The order is that of a walk from each line to the one that is most like it (Jaccard similarity of where their nonzeros are),
so that lines with nonzeros in the same places end up side by side. A few lines are compared with all others first: in weights
pruned one by one they are no more alike than chance makes them, and nothing else is done. After "SMaT", Okanovic et al. 2024.
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
"""Similarity to its nearest lines that a line has if it is part of a block."""

_SAMPLE, _NEAREST = 32, 3
"""Lines that are looked at first, and the lines that each is expected to resemble."""

_DENSEST = 0.5
"""Density beyond which blocks do not pay."""

_LONGEST = 1 << 13
"""Lines beyond which comparing them all takes too long."""


def in_blocks(contraction: Contraction, leaves: list[torch.Tensor]) -> Contraction:
    """The contraction with its weight reordered, if that makes blocks which pay; else itself.

    `leaves` are the values that the weight is computed from.
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
    """Orders of the rows and of the columns of a bool matrix in which nonzeros may lie in blocks; None if none are alike."""
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
    alike[torch.arange(len(chosen)), chosen] = -1  # not with themselves
    return float(alike.topk(_NEAREST).values.mean(1).median()) >= _ALIKE


def _similarity(lines: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Common nonzeros over all nonzeros of each line and each other."""
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
