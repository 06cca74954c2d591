"""Elements of products with dense matrices (`kernel.inner`) in a tile: several features, all tokens of the tile at once.

scf.for %k                         // of the features that are summed over
  x[k][tokens]                     // one load a vector of tokens
  w[n, k] into all lanes           // one load a feature, of the matrix as it lies in memory
  multiply-adds                    // features x vectors of sums
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.chains.frame import Frame
from gossamer.passes.loops.inner_loop import added_up, sets_of
from gossamer.passes.loops.vectors import byte_width, index, loop, widened, zeros

_LATENCY = 8
"""Sums that are added to in turns: a multiply-add takes four cycles, and two begin in each."""
_REGISTERS = {512: 16}
"""Sums in registers, by the bits of a vector; half of all registers."""


def emit_inner(op: Any, features: Sequence[ir.Value], frame: Frame) -> list[ir.Value]:
    """A vector for each of these features and each vector of tokens, which come faster."""
    bits = frame.lanes * 8 * byte_width(frame.vec.element_type)
    together = max(1, _REGISTERS.get(bits, 8) // frame.vectors)
    parts = (features[at : at + together] for at in range(0, len(features), together))
    return [total for part in parts for total in _emit_part(op, part, frame)]


def _emit_part(op: Any, features: Sequence[ir.Value], frame: Frame) -> list[ir.Value]:
    (factor,), reduction = frame.outside[op.w], ir.IntegerAttr(op.reduction).value
    size, count = ir.MemRefType(factor.type).shape[reduction], len(features) * frame.vectors
    ways = max(1, _LATENCY // count)
    ways = ways if size % ways == 0 else 1
    with loop(index(0), index(size), index(ways), sets_of([zeros(frame.vec)] * count, ways)) as steps:
        sums = list(steps.inner_iter_args)
        for way in range(ways):
            k = arith.addi(steps.induction_variable, index(way)) if way else steps.induction_variable
            xs = [frame.load(op.x, k, v) for v in range(frame.vectors)]
            for number, n in enumerate(features):
                at = [n, k] if reduction == 1 else [k, n]
                w = vector.broadcast(frame.vec, widened(memref.load(factor, at), frame.vec.element_type))
                for v, x in enumerate(xs):
                    place = way * count + number * frame.vectors + v
                    sums[place] = vector.fma(w, x, sums[place])
        scf.YieldOp(sums)
    return added_up(list(steps.results), count)
