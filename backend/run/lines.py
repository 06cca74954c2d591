"""Lines of a value, by their numbers along one dimension: some taken out of it, or put back among constants.

    gossamer::pick_lines(x, index, dim)                   →  x[..., index, ...]
    gossamer::spread_lines(small, index, fill, size, dim) →  what has these lines of `small`, and others of `fill`, or zeros

The result lies in memory as the operand does: the dimensions in the same order, from the outermost on.
"""

from torch import Tensor

from gossamer.backend.graph.nodes import hint
from gossamer.runtime.operations import Operation


def _pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    order = outside_in(x)
    return x.permute(order).index_select(order.index(dim), index).permute(inverse(order))


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
    order = outside_in(small)
    sizes = [size if n == dim else small.shape[n] for n in order]
    return small.new_empty(sizes).permute(inverse(order))


def outside_in(x: Tensor) -> list[int]:
    """Its dimensions, from the outermost on; as in a contiguous tensor where strides are unknown."""
    strides, sizes = ([hint(n) for n in each] for each in (x.stride(), x.shape))
    if None in strides or None in sizes:
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=lambda n: (sizes[n] != 1, -(strides[n] or 0), n))


def inverse(order: list[int]) -> list[int]:
    """The places of dimensions 0, 1, … in an order."""
    return [order.index(n) for n in range(len(order))]


def _fake_pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return _like(x, index.shape[0], dim)


def _fake_spread(small: Tensor, index: Tensor, fill: Tensor | None, size: int, dim: int) -> Tensor:
    return _like(small, size, dim)


pick_lines = Operation("pick_lines(Tensor x, Tensor index, int dim) -> Tensor", _pick, _pick, _fake_pick).register()
spread_lines = Operation(
    "spread_lines(Tensor small, Tensor index, Tensor? fill, int size, int dim) -> Tensor", _spread, _spread, _fake_spread
).register()
