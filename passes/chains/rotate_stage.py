"""The body of a chain's rotation stage. It rotates heads by the angles of their tokens, two columns at a time.

    y[h, i][t] = x[h, i][t] cos[i][t] - x[h, j][t] sin[i][t]            i < rotated / 2, j = i + rotated / 2
    y[h, j][t] = x[h, j][t] cos[j][t] + x[h, i][t] sin[j][t]

It copies the columns of a head that are not rotated.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.chains.frame import Frame
from gossamer.passes.chains.plan_chain import columns
from gossamer.passes.loops.vectors import index, loop


def emit_rotation(op: Any, frame: Frame) -> None:
    """Emits heads [low, high) of a kernel.rotate."""
    size, rotated, offset = (ir.IntegerAttr(a).value for a in (op.head_size, op.rotated, op.offset))
    result, half, shared = op.operation.results[0], rotated // 2, columns(op.cos) < rotated
    with loop(frame.low, frame.high, index(1)) as heads:
        target = arith.muli(heads.induction_variable, index(size))
        source = arith.addi(index(offset), target)
        with loop(index(0), index(half), index(1)) as pairs:
            i = pairs.induction_variable
            j = arith.addi(i, index(half))
            for v in range(frame.vectors):
                low, high = (frame.load(op.x, arith.addi(source, n), v) for n in (i, j))
                c, s = (frame.load(table, i, v) for table in (op.cos, op.sin))
                d, t = (c, s) if shared else (frame.load(table, j, v) for table in (op.cos, op.sin))
                frame.store(arith.subf(arith.mulf(low, c), arith.mulf(high, s)), result, arith.addi(target, i), v)
                frame.store(vector.fma(high, d, arith.mulf(low, t)), result, arith.addi(target, j), v)
        with loop(index(rotated), index(size), index(1)) as kept:
            n = kept.induction_variable
            for v in range(frame.vectors):
                frame.store(frame.load(op.x, arith.addi(source, n), v), result, arith.addi(target, n), v)
