"""The ops of the kernel dialect for convolutions of points: `kernel.convolve_points`, the gradient of its weight, and
`kernel.match_keys`, which finds the pairs.

A convolution's map lists pairs of rows by the offset of the window that leads from one to the other:

inputs, outputs   [pairs] of i32: a row of what is read and one of what is written; those of an offset come one after the
                  other, in the order of `rows`; no offset has a row of either twice
rows              [M] of i32: every row that is written, once, in an order in which neighbours are near each other
positions         [offsets, tiles + 1] of i32: where the pairs begin that write to each TILE of `rows`, and where the last end
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, verified

TILE = 256
"""Rows that are written by one thread, offset after offset: with 64 channels of f32 they stay in a second-level cache, and
there are enough pairs for an offset's weights to be read from the first."""

_RANKS = {"x": 2, "gradient": 2, "weight": 3, "bias": 1, "inputs": 1, "outputs": 1, "rows": 1, "positions": 2, "result": 2}


def _problem(op: Any) -> str | None:
    floats = set()
    for name, rank in (_RANKS if op.operation.name == "kernel.convolve_points" else {**_RANKS, "result": 3}).items():
        value = getattr(op, name, None)
        if value is None:
            continue
        tensor = ir.RankedTensorType(value.type)
        integers = name in ("inputs", "outputs", "rows", "positions")
        if tensor.rank != rank or tensor.encoding is not None or isinstance(tensor.element_type, ir.IntegerType) != integers:
            return f"has {name} {tensor}, must be {rank}-dimensional, of {'integers' if integers else 'floats'}"
        if not integers:
            floats.add(str(tensor.element_type))
    return None if floats in ({"f32"}, {"f64"}) else f"computes with {' and '.join(sorted(floats))}, must be f32 or f64 alone"


def _match_problem(op: Any) -> str | None:
    types = [ir.RankedTensorType(value.type) for value in (op.keys, op.shifts, op.into, op.out, op.counts)]
    if [t.rank for t in types] != [1, 1, 2, 2, 1] or any(not isinstance(t.element_type, ir.IntegerType) for t in types):
        return "takes vectors of keys and shifts to two matrices and a vector, all of integers"
    if types[0].element_type != types[1].element_type:
        return f"shifts keys of {types[0].element_type} by {types[1].element_type}"
    return None


class ConvolvePointsOp(KernelOp, name="convolve_points", traits=[ext.Pure]):
    """y[o] = bias + the sum over the pairs (i, o) of every offset k of x[i] weight[k].

    x [N, C], weight [offsets, C, D], bias [D], y [M, D]
    """

    x: ext.Operand[Any]
    weight: ext.Operand[Any]
    bias: ext.Operand[Any]
    inputs: ext.Operand[Any]
    outputs: ext.Operand[Any]
    rows: ext.Operand[Any]
    positions: ext.Operand[Any]
    result: ext.Result[Any]

    verify_invariants = verified(_problem)


class ConvolvePointsGradOp(KernelOp, name="convolve_points_grad", traits=[ext.Pure]):
    """The gradient of the weight of kernel.convolve_points for that of y: w[k] = the sum over the pairs (i, o) of offset k of
    x[i]ᵀ gradient[o].

    x [N, C], gradient [M, D], w [offsets, C, D]
    """

    x: ext.Operand[Any]
    gradient: ext.Operand[Any]
    inputs: ext.Operand[Any]
    outputs: ext.Operand[Any]
    positions: ext.Operand[Any]
    result: ext.Result[Any]

    verify_invariants = verified(_problem)


class MatchKeysOp(KernelOp, name="match_keys", traits=[ext.Pure]):
    """For each shift s the pairs of places with keys[into[s, n]] = keys[out[s, n]] + shifts[s], n < counts[s], ascending.

    keys [N], ascending, none twice; shifts [S]; into and out [S, N], undefined from counts[s] on; counts [S]
    """

    keys: ext.Operand[Any]
    shifts: ext.Operand[Any]
    into: ext.Result[Any]
    out: ext.Result[Any]
    counts: ext.Result[Any]

    verify_invariants = verified(_match_problem)
