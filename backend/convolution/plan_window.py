"""Plans the tiles and blocks of a convolution's kernel, with a model of its cycles.

A tile is some vectors of output pixels, a block some channels of the weight. The constants of the model are fitted to measured
times. find_convolutions.py plans each window, and cost.py predicts with the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.regions.cost import matrix_of
from gossamer.dialects.window import Sizes, Window
from gossamer.passes.framework.family import Matrix
from gossamer.passes.framework.registers import registers

_COLUMNS = 3  # the most columns of taps for which images are copied once each
_NEAR = 0.9  # share of the first-level cache that x may fill
_ROW = 24.0  # cycles to start and end a row of a block
_FAR_LOAD = 0.4  # additional cycles to load a vector from the second-level cache
_STORE = 8.0  # cycles of the epilogue for a vector of results
_RESUMED = 3.0  # cycles to load and store a vector of sums for a block
_PACKED, _GATHERED = 3.0, 16.0  # cycles to copy a vector of images, and one whose pixels are not adjacent
_PLANE, _TAP = 60.0, 0.7  # cycles of a depthwise convolution for a channel, and for a tap of each vector of pixels


@dataclass(frozen=True)
class _Nonzero:
    """Cycles of a nonzero: `once`, and `vector` for each vector of pixels."""

    once: float
    vector: float

    def of(self, vectors: int) -> float:
        """Returns the cycles for a tile of so many vectors."""
        return self.once + self.vector * vectors


_POINTWISE = _Nonzero(1.3, 0.7)
_ACROSS_LINES = _Nonzero(1.3, 1.07)  # a vector is as long as a cache line, and those of most taps lie in two lines
_ALIGNED = _Nonzero(1.5, 0.5)  # such vectors, each in one line


def planned(convolution: Convolution) -> Window:
    """Returns the window with the tile and the blocks of channels that are predicted to be fastest on this machine."""
    c, matrix = convolution, matrix_of(convolution)
    return min((_in_rows(c, matrix), *_in_columns(c, matrix)), key=lambda window: kernel_cycles(matrix, window, c.results))


def _in_rows(c: Convolution, matrix: Matrix) -> Window:
    """Returns a window over images as they are, one row after the other."""
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
    """Yields windows that copy images once for each column of taps, with all that a block reads in the first-level cache."""
    _, high, wide = c.results
    channels, most = c.channels // c.window.groups, _most_vectors(matrix.bits)
    known = c.window.images != (0, 0, 0) and not c.window.pointwise
    if not known or matrix.bits < 512 or c.window.stride[2] > 2 or c.window.kernel[2] > _COLUMNS:
        return
    across = -(-wide // matrix.lanes)  # whole rows, because two tiles would both read and write a line that they share
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
    """Returns the bytes that a tile reads of a channel."""
    return window.kernel[0] * len(window.phases) * window.width(matrix.lanes) * matrix.bits // 8 // matrix.lanes


def _needed(convolution: Convolution, lanes: int) -> int:
    """Returns how many vectors an image fills. With unknown sizes, counts only along the longer side of a tile."""
    window, (_, high, wide) = convolution.window, convolution.results
    if window.pointwise:
        return -(-prod(convolution.results) // lanes)
    if window.strip is None:
        return -(-window.span // lanes)
    return high if window.kernel[1] > 1 else -(-wide // lanes)


def _vectors(needed: int, bits: int, pointwise: bool) -> int:
    """Returns how many vectors of sums a tile keeps in registers, for images of `needed` vectors.

    These are all vectors if they fit, else the number that takes the least time, with a last tile that may be partly empty. It
    is smaller for k x k windows, because more vectors leave space for fewer channels in a block.
    """
    most = _most_vectors(bits) if pointwise else registers(bits) // 4
    if needed <= most:
        return needed if needed < 3 or pointwise else max(4, needed)
    if pointwise:
        return min(range(4, min(most, 8) + 1), key=lambda v: (-(-needed // v) * v, -v))
    nonzero = _nonzero_cycles(bits, pointwise, aligned=False)
    return min(range(4, most + 1), key=lambda v: -(-needed // v) * nonzero.of(v))


def _most_vectors(bits: int) -> int:
    """Returns how many vectors of sums fit into registers beside their operands."""
    return (registers(bits) - 6) // 2


def _nonzero_cycles(bits: int, pointwise: bool, aligned: bool) -> _Nonzero:
    """Returns the cycles of a nonzero with vectors of `bits`. `aligned`: images are copied once for each column of taps."""
    if aligned:
        return _ALIGNED
    return _POINTWISE if pointwise or bits < 512 else _ACROSS_LINES


def depthwise_cycles(matrix: Matrix, window: Window, height: int, width: int) -> float:
    """Returns the cycles for an image: a setup for each channel; taps and the epilogue for each vector of pixels."""
    across = -(-width // matrix.lanes)
    return matrix.rows * (_PLANE + across * height * (_STORE + _TAP * window.stride[2] * window.taps))


def kernel_cycles(matrix: Matrix, window: Window, results: Sizes) -> float:
    """Returns the cycles for an image. A tile of v vectors, which has the rows and channels of one group, takes:

    nnz c(v) for its nonzeros, bound by loads; the start and end of each row of a block; the epilogue of v vectors for each row
    of the weight; and the packing of each channel.
    """
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
    """Returns the number of tiles of an image or volume."""
    depth, high, wide = results
    if window.pointwise:
        return -(-prod(results) // (window.vectors * lanes))
    if window.strip is None:
        return depth * -(-window.span // (window.vectors * lanes))
    return depth * -(-high // window.strip[0]) * -(-wide // (window.strip[1] * lanes))
