"""Cycles that kernels of convolutions take for one image, by a model of what bounds them. Its numbers are fitted to measured
times.
"""

from dataclasses import dataclass
from math import prod

from gossamer.dialects.window import Sizes, Window
from gossamer.passes.framework.family import Matrix

ROW = 24.0  # of a row of a block: its start and end
FAR_LOAD = 0.4  # more of a vector that comes from the second cache, not from the first
_STORE = 8.0  # of a vector of results through the epilogue
_RESUMED = 3.0  # of a vector of sums that a block takes up and leaves
_PACKED, _GATHERED = 3.0, 16.0  # of a vector of images that is copied, and of one whose pixels do not follow each other
_PLANE, _TAP = 60.0, 0.7  # of a channel of a depthwise convolution, and of a tap for each vector of its pixels


@dataclass(frozen=True)
class Nonzero:
    """Cycles of a nonzero: `once`, and `vector` for each vector of pixels."""

    once: float
    vector: float

    def of(self, vectors: int) -> float:
        """Those for a tile of so many vectors."""
        return self.once + self.vector * vectors


_POINTWISE = Nonzero(1.3, 0.7)
_ACROSS_LINES = Nonzero(1.3, 1.07)  # vectors as long as a cache line, of which those of taps lie in two
_ALIGNED = Nonzero(1.5, 0.5)  # the same where none does


def nonzero_cycles(bits: int, pointwise: bool, aligned: bool) -> Nonzero:
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
    block = ROW + (_RESUMED * v if window.across else 0.0)
    rows = matrix.rows / window.groups * (block * -(-channels // window.channels) + _STORE * v)
    nonzero = nonzero_cycles(matrix.bits, window.pointwise, aligned=window.across > 0)
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
