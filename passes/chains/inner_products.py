"""Emits elements of products with dense matrices (`kernel.inner`) in a tile: several features, all tokens of the tile at once.

scf.for %k                         // over the features that are summed; unrolled, it would spill vectors
  x[k][tokens]                     // one load for each vector of tokens
  w[n, k] into all lanes           // one load for each feature, from the unpacked matrix
  multiply-adds                    // features x vectors of sums
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import memref, scf, vector

from gossamer.passes.chains.frame import Frame
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.vectors import byte_width, index, rolled, widened, zeros


def features_at_once(frame: Frame) -> int:
    """Returns how many features have their sums for a tile in registers, a power of 2, so that it divides the lanes or is a
    multiple of them."""
    bits = frame.lanes * 8 * byte_width(frame.vec.element_type)
    return 1 << (max(1, registers(bits) // 2 // frame.vectors).bit_length() - 1)


def emit_inner(op: Any, features: Sequence[ir.Value], frame: Frame) -> list[ir.Value]:
    """Returns a vector for each feature and vector of tokens. The vectors of a feature follow each other."""
    (factor,), reduction = frame.outside[op.w], ir.IntegerAttr(op.reduction).value
    size, count = ir.MemRefType(factor.type).shape[reduction], len(features) * frame.vectors
    with rolled(index(0), index(size), [zeros(frame.vec)] * count) as steps:
        k, sums = steps.induction_variable, list(steps.inner_iter_args)
        xs = [frame.load(op.x, k, v) for v in range(frame.vectors)]
        for number, n in enumerate(features):
            at = [n, k] if reduction == 1 else [k, n]
            w = vector.broadcast(frame.vec, widened(memref.load(factor, at), frame.vec.element_type))
            for v, x in enumerate(xs):
                place = number * frame.vectors + v
                sums[place] = vector.fma(w, x, sums[place])
        scf.YieldOp(sums)
    return list(steps.results)
