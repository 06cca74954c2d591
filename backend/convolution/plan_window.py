"""How a kernel goes over images: vectors of a tile, and channels of a block, for this machine."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.convolution.kernel_cycles import FAR_LOAD, ROW, kernel_cycles, nonzero_cycles
from gossamer.backend.regions.cost import matrix_of
from gossamer.dialects.window import Window
from gossamer.passes.framework.family import Matrix

_COLUMNS = 3  # of taps that have phases of their own, at most
_NEAR = 0.9  # of the nearest cache that x may fill


def planned(convolution: Convolution) -> Window:
    """The window with its blocks of channels and its tile for this machine."""
    c, matrix = convolution, matrix_of(convolution)
    return min((_in_rows(c, matrix), *_in_columns(c, matrix)), key=lambda window: kernel_cycles(matrix, window, c.results))


def _in_rows(c: Convolution, matrix: Matrix) -> Window:
    """With images as they are, one row after the other."""
    vectors = _vectors(_needed(c, matrix.lanes), matrix.bits, c.window.pointwise)
    window = replace(c.window, vectors=vectors)
    channels, each = c.channels // window.groups, _channel_bytes(window, matrix)
    if not window.pointwise:
        blocks = -(-channels // max(1, matrix.l1d // (2 * each)))
    else:
        blocks, near = (-(-channels // max(1, int(share * matrix.l1d / each))) for share in (2, _NEAR))
        if c.weight.density * channels * vectors * FAR_LOAD > (near - blocks) * (ROW + 2 * vectors):
            blocks = near
    return _in_blocks(window, channels, blocks)


def _in_columns(c: Convolution, matrix: Matrix) -> Iterator[Window]:
    """With images once for each column of taps, all that are read of a block in the nearest cache."""
    _, high, wide = c.results
    channels, most = c.channels // c.window.groups, _most_vectors(matrix.bits)
    known = c.window.images != (0, 0, 0) and not c.window.pointwise
    if not known or matrix.bits < 512 or c.window.stride[2] > 2 or c.window.kernel[2] > _COLUMNS:
        return
    across = -(-wide // matrix.lanes)  # whole rows: lines that two tiles share would be read and written twice
    across = -(-across // -(-across // most))
    for rows in range(1, min(high, most // across) + 1):
        window = replace(c.window, vectors=rows * across, across=across)
        near = int(_NEAR * matrix.l1d / _channel_bytes(window, matrix))
        if near:
            yield _in_blocks(window, channels, -(-channels // near))


def _in_blocks(window: Window, channels: int, blocks: int) -> Window:
    least = 1 if window.taps > 1 else 2  # columns of a block of the weight
    return replace(window, channels=max(least, -(-channels // blocks)))


def _channel_bytes(window: Window, matrix: Matrix) -> int:
    """Those that a tile reads of a channel."""
    return window.kernel[0] * len(window.phases) * window.width(matrix.lanes) * matrix.bits // 8 // matrix.lanes


def _needed(convolution: Convolution, lanes: int) -> int:
    """Vectors that an image would fill; of one whose size is open, along what a tile is longer."""
    window, (_, high, wide) = convolution.window, convolution.results
    if window.pointwise:
        return -(-prod(convolution.results) // lanes)
    if window.strip is None:
        return -(-window.span // lanes)
    return high if window.kernel[1] > 1 else -(-wide // lanes)


def _vectors(needed: int, bits: int, pointwise: bool) -> int:
    """How many in registers for images of so many: all of them, or else as many as take least time with what is left over.

    Many vectors of a k x k window would have a block of few channels.
    """
    most = _most_vectors(bits) if pointwise else 8 if bits == 512 else 4
    if needed <= most:
        return needed if needed < 3 or pointwise else max(4, needed)
    if pointwise:
        return min(range(4, min(most, 8) + 1), key=lambda v: (-(-needed // v) * v, -v))
    nonzero = nonzero_cycles(bits, pointwise, aligned=False)
    return min(range(4, most + 1), key=lambda v: -(-needed // v) * nonzero.of(v))


def _most_vectors(bits: int) -> int:
    """Those of sums that registers hold beside what they are made of."""
    return ((32 if bits == 512 else 16) - 6) // 2
