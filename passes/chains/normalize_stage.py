"""The body of a chain's normalization stage. It divides each head by its root mean square.

y[h, i][t] = x[h, i][t] / sqrt(sum_j x[h, j][t]^2 / size + eps) * weight[i]
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.passes.chains.frame import Frame
from gossamer.passes.loops.vectors import index, loop, splat_of, widened, zeros


def emit_norm(op: Any, frame: Frame) -> None:
    """Emits heads [low, high) of a kernel.normalize."""
    size, offset = (ir.IntegerAttr(a).value for a in (op.head_size, op.offset))
    vec, vectors, (weight,) = frame.vec, range(frame.vectors), frame.outside[op.weight]
    share, eps, one = (splat_of(vec, number) for number in (1 / size, ir.FloatAttr(op.eps).value, 1.0))
    with loop(frame.low, frame.high, index(1)) as heads:
        target = arith.muli(heads.induction_variable, index(size))
        source = arith.addi(index(offset), target)
        with loop(index(0), index(size), index(1), [zeros(vec)] * frame.vectors) as squares:
            given = [frame.load(op.x, arith.addi(source, squares.induction_variable), v) for v in vectors]
            scf.YieldOp([vector.fma(x, x, sum_) for x, sum_ in zip(given, squares.inner_iter_args, strict=True)])
        roots = [math.sqrt(vector.fma(total, share, eps)) for total in squares.results]
        scales = [arith.divf(one, root) for root in roots]
        with loop(index(0), index(size), index(1)) as columns:
            i = columns.induction_variable
            factor = vector.broadcast(vec, widened(memref.load(weight, [i]), vec.element_type))
            for v, scale in zip(vectors, scales, strict=True):
                x = arith.mulf(frame.load(op.x, arith.addi(source, i), v), scale)
                frame.store(arith.mulf(x, factor), op.operation.results[0], arith.addi(target, i), v)
