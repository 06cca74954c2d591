"""How the kernel of a convolution goes over images (vectors of a tile, channels of a block), and the cycles that it takes then
for one, by a model of what bounds it. Its numbers are fitted to measured times.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.regions.cost import matrix_of
from gossamer.dialects.window import Sizes, Window
from gossamer.passes.framework.family import Matrix
from gossamer.passes.framework.registers import registers

_COLUMNS = 3  # of taps that have phases of their own, at most
_NEAR = 0.9  # of the nearest cache that x may fill
_ROW = 24.0  # cycles of a row of a block: its start and end
_FAR_LOAD = 0.4  # more cycles of a vector that comes from the second cache, not from the first
_STORE = 8.0  # cycles of a vector of results through the epilogue
_RESUMED = 3.0  # cycles of a vector of sums that a block takes up and leaves
_PACKED, _GATHERED = 3.0, 16.0  # cycles of a vector of images that is copied, and of one whose pixels lie apart
_PLANE, _TAP = 60.0, 0.7  # cycles of a channel of a depthwise convolution, and of a tap for each vector of its pixels


@dataclass(frozen=True)
class _Nonzero:
    """Cycles of a nonzero: `once`, and `vector` for each vector of pixels."""

    once: float
    vector: float

    def of(self, vectors: int) -> float:
        """Those for a tile of so many vectors."""
        return self.once + self.vector * vectors


_POINTWISE = _Nonzero(1.3, 0.7)
_ACROSS_LINES = _Nonzero(1.3, 1.07)  # vectors as long as a cache line, of which those of taps lie in two
_ALIGNED = _Nonzero(1.5, 0.5)  # the same where none does


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
        if c.weight.density * channels * vectors * _FAR_LOAD > (near - blocks) * (_ROW + 2 * vectors):
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
    most = _most_vectors(bits) if pointwise else registers(bits) // 4
    if needed <= most:
        return needed if needed < 3 or pointwise else max(4, needed)
    if pointwise:
        return min(range(4, min(most, 8) + 1), key=lambda v: (-(-needed // v) * v, -v))
    nonzero = _nonzero_cycles(bits, pointwise, aligned=False)
    return min(range(4, most + 1), key=lambda v: -(-needed // v) * nonzero.of(v))


def _most_vectors(bits: int) -> int:
    """Those of sums that registers hold beside what they are made of."""
    return (registers(bits) - 6) // 2


def _nonzero_cycles(bits: int, pointwise: bool, aligned: bool) -> _Nonzero:
    """Those on vectors of `bits`; `aligned` says that images lie once for each column of taps."""
    if aligned:
        return _ALIGNED
    return _POINTWISE if pointwise or bits < 512 else _ACROSS_LINES


def depthwise_cycles(matrix: Matrix, window: Window, height: int, width: int) -> float:
    """Per channel what is set up; per vector of pixels its taps, bound by multiply-adds or loads, and the epilogue."""
    across = -(-width // matrix.lanes)
    return matrix.rows * (_PLANE + across * height * (_STORE + _TAP * window.stride[2] * window.taps))


def kernel_cycles(matrix: Matrix, window: Window, results: Sizes) -> float:
    """Per tile of v vectors: nnz c(v), bound by loads; for each row of a block its start and end; for each row of the weight v
    vectors through the epilogue; and what is packed of each channel. A tile has the rows and channels of one group."""
    v, lanes = window.vectors, matrix.lanes
    channels = matrix.columns // window.taps
    read = channels * window.kernel[0] * sum(window.vectors_of(phase, lanes) for phase in window.phases)
    pack = read * (_GATHERED if window.gathers(lanes) else _PACKED)
    block = _ROW + (_RESUMED * v if window.across else 0.0)
    rows = matrix.rows / window.groups * (block * -(-channels // window.channels) + _STORE * v)
    nonzero = _nonzero_cycles(matrix.bits, window.pointwise, aligned=window.across > 0)
    each = matrix.nonzeros / window.groups * nonzero.of(v) + rows + pack
    return _tiles(window, lanes, results) * window.groups * each


def _tiles(window: Window, lanes: int, results: Sizes) -> int:
    """Those of an image or volume."""
    depth, high, wide = results
    if window.pointwise:
        return -(-prod(results) // (window.vectors * lanes))
    if window.strip is None:
        return depth * -(-window.span // (window.vectors * lanes))
    return depth * -(-high // window.strip[0]) * -(-wide // (window.strip[1] * lanes))
