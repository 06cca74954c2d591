"""The ops of the kernel dialect for convolutions of points: `kernel.convolve_points`, the gradient of its weight, and
`kernel.match_keys`, which finds the pairs.

A convolution's map lists pairs of rows by the offset of the window that leads from one to the other:

inputs, outputs   a row of what is read and one of what is written; those of an offset come one after the other, in the order
                  of `rows`; no offset has a row of either twice
rows              every row that is written, once, in an order in which neighbours are near each other
positions         where the pairs begin that write to each TILE of `rows`, and where the last end
"""

from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp

TILE = 256
"""Rows that are written by one thread, offset after offset: with 64 channels of f32 they stay in a second-level cache, and
there are enough pairs for an offset's weights to be read from the first."""

_PAIRS = "inputs: i[pairs], outputs: i[pairs]"
_POSITIONS = "positions: i[offsets tiles+1]"


class ConvolvePointsOp(KernelOp, name="convolve_points", traits=[ext.Pure]):
    """y[o] = bias + the sum over the pairs (i, o) of every offset k of x[i] weight[k]."""

    takes = (
        f"x: W[read channels], weight: W[offsets channels filters], bias: W[filters], {_PAIRS}, rows: i[sites], {_POSITIONS}"
    )
    gives = "result: W[sites filters]"


class ConvolvePointsGradOp(KernelOp, name="convolve_points_grad", traits=[ext.Pure]):
    """The gradient of the weight of kernel.convolve_points for that of y: w[k] = the sum over the pairs (i, o) of offset k of
    x[i]ᵀ gradient[o]."""

    takes = f"x: W[read channels], gradient: W[sites filters], {_PAIRS}, {_POSITIONS}"
    gives = "result: W[offsets channels filters]"


class MatchKeysOp(KernelOp, name="match_keys", traits=[ext.Pure]):
    """For each shift s the pairs of places with keys[into[s, n]] = keys[out[s, n]] + shifts[s], n < counts[s], ascending.

    The keys are ascending, none is there twice; into and out are undefined from counts[s] on.
    """

    takes = "keys: I[keys], shifts: I[shifts]"
    gives = "into: i[shifts keys], out: i[shifts keys], counts: i[shifts]"
