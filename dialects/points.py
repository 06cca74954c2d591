"""The ops of the kernel dialect for convolutions of points: `kernel.convolve_points`, the gradient of its weight, and
`kernel.match_keys`, which finds the pairs.

A convolution's map lists pairs of an input row and an output row, sorted by the offset of the window between them:

inputs, outputs   the rows of each pair. The pairs of an offset follow each other, in the order of `rows`. Within an offset, no
                  row occurs twice in inputs, nor in outputs.
rows              every output row, once, in an order that keeps neighbouring points together
positions         for each offset and each TILE of `rows`, the first pair that writes to it; then the end of the last
"""

from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp

TILE = 256
"""Number of rows that one thread writes, offset after offset. With 64 channels of f32 they stay in the second-level cache, and
an offset has enough pairs for its weights to stay in the first-level one."""

_PAIRS = "inputs: i[pairs], outputs: i[pairs]"
_POSITIONS = "positions: i[offsets tiles+1]"


class ConvolvePointsOp(KernelOp, name="convolve_points", traits=[ext.Pure]):
    """y[o] = bias + the sum over the pairs (i, o) of every offset k of x[i] weight[k]."""

    takes = (
        f"x: W[read channels], weight: W[offsets channels filters], bias: W[filters], {_PAIRS}, rows: i[sites], {_POSITIONS}"
    )
    gives = "result: W[sites filters]"


class ConvolvePointsGradOp(KernelOp, name="convolve_points_grad", traits=[ext.Pure]):
    """The gradient of the weight of kernel.convolve_points from that of y: w[k] = the sum over the pairs (i, o) of offset k of
    x[i]ᵀ gradient[o]."""

    takes = f"x: W[read channels], gradient: W[sites filters], {_PAIRS}, {_POSITIONS}"
    gives = "result: W[offsets channels filters]"


class MatchKeysOp(KernelOp, name="match_keys", traits=[ext.Pure]):
    """Finds for each shift s the pairs of places with keys[into[s, n]] = keys[out[s, n]] + shifts[s], n < counts[s], ascending.

    The keys ascend, and none occurs twice. Elements of `into` and `out` from counts[s] on are undefined.
    """

    takes = "keys: I[keys], shifts: I[shifts]"
    gives = "into: i[shifts keys], out: i[shifts keys], counts: i[shifts]"
