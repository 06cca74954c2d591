"""Two operations that pick slices of a tensor along one dimension, and that put such slices back among constants.

    gossamer::pick_lines(x, index, dim)                          →  x[..., index, ...], with the memory order of x
    gossamer::spread_lines(small, index, fill, size, dim, order) →  at `index` the slices of `small`, elsewhere `fill` or zeros

order  the dimensions of the result, from the outermost in memory on. A `small` with a single slice does not tell them.
"""

from torch import Tensor

from gossamer.backend.graph.nodes import hint
from gossamer.runtime.operations import Operation


def _pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    order = outside_in(x)
    return x.permute(order).index_select(order.index(dim), index).permute(inverse(order))


def _spread(small: Tensor, index: Tensor, fill: Tensor | None, size: int, dim: int, order: list[int]) -> Tensor:
    out = _empty(small, size, dim, order)
    if fill is None:
        out.zero_()
    else:
        out.copy_(fill)
    if dim != out.dim() - 1:
        return out.index_copy_(dim, index, small)
    return out.scatter_(dim, index.expand_as(small), small)  # twice as fast along the last dimension


def _empty(x: Tensor, size: int, dim: int, order: list[int]) -> Tensor:
    """Allocates a tensor like x that has this size along one dimension."""
    sizes = [size if n == dim else x.shape[n] for n in order]
    return x.new_empty(sizes).permute(inverse(order))


def outside_in(x: Tensor) -> list[int]:
    """Returns the dimensions of x, from the outermost in memory on.

    If strides are unknown, or x repeats elements (`expand`), assumes a contiguous tensor, as torch's convolutions do.
    """
    strides = [hint(n) for n in x.stride()]
    if None in strides or any(stride == 0 and hint(size) != 1 for stride, size in zip(strides, x.shape, strict=True)):
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=lambda n: (-(strides[n] or 0), n))


def inverse(order: list[int]) -> list[int]:
    """Returns the places of dimensions 0, 1, … in an order."""
    return [order.index(n) for n in range(len(order))]


def _fake_pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return _empty(x, index.shape[0], dim, outside_in(x))


pick_lines = Operation("pick_lines(Tensor x, Tensor index, int dim) -> Tensor", _pick, _pick, _fake_pick).register()
spread_lines = Operation(
    "spread_lines(Tensor small, Tensor index, Tensor? fill, int size, int dim, int[] order) -> Tensor", _spread, _spread,
    lambda small, index, fill, size, dim, order: _empty(small, size, dim, order),
).register()  # fmt: skip
