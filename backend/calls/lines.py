"""Lines of a value, by their numbers along one dimension: some taken out of it, or put back among constants.

    gossamer::pick_lines(x, index, dim)                   →  x[..., index, ...]
    gossamer::spread_lines(small, index, fill, size, dim) →  what has these lines of `small`, and others of `fill`, or zeros

The result lies in memory as the operand does, channels innermost or not.
"""

import torch
from torch import Tensor

from gossamer.runtime.operations import Operation

_INNERMOST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    order = _order(x)
    if order is None:
        return x.index_select(dim, index)
    return x.permute(order).index_select(order.index(dim), index).permute(_inverse(order))


def _spread(small: Tensor, index: Tensor, fill: Tensor | None, size: int, dim: int) -> Tensor:
    out = _like(small, size, dim)
    if fill is None:
        out.zero_()
    else:
        out.copy_(fill)
    if dim != out.dim() - 1:
        return out.index_copy_(dim, index, small)
    return out.scatter_(dim, index.expand_as(small), small)  # twice as fast along the last dimension


def _like(small: Tensor, size: int, dim: int) -> Tensor:
    """Memory for as many lines."""
    order = _order(small) or list(range(small.dim()))
    sizes = [size if n == dim else small.shape[n] for n in order]
    return small.new_empty(sizes).permute(_inverse(order))


def _order(x: Tensor) -> list[int] | None:
    """Its dimensions from the outermost on, if those are others than in a contiguous tensor."""
    form = _INNERMOST.get(x.dim())
    if form is None or x.is_contiguous() or not x.is_contiguous(memory_format=form):
        return None
    return [0, *range(2, x.dim()), 1]


def _inverse(order: list[int]) -> list[int]:
    return [order.index(n) for n in range(len(order))]


def _fake_pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return _like(x, index.shape[0], dim)


def _fake_spread(small: Tensor, index: Tensor, fill: Tensor | None, size: int, dim: int) -> Tensor:
    return _like(small, size, dim)


pick_lines = Operation("pick_lines(Tensor x, Tensor index, int dim) -> Tensor", _pick, _pick, _fake_pick).register()
spread_lines = Operation(
    "spread_lines(Tensor small, Tensor index, Tensor? fill, int size, int dim) -> Tensor", _spread, _spread, _fake_spread
).register()
