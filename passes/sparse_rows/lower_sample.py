"""lower-sample: lowers a `kernel.sample` to a walk over the entries of its pattern, with a loop for each reduced dimension.

before   %v = "kernel.sample"(%s) ({
           %0 = "kernel.read"(%x) {map = (i, j, k) -> (i, k)}
           %1 = "kernel.read"(%y) {map = (i, j, k) -> (k, j)}
           %2 = arith.mulf %0, %1
           "kernel.yield"(%2)
         }) {reduced = 1} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
after    sparse_tensor.foreach in %s init(%c0) do {
         ^bb0(%i, %j, %value, %p):
           %sum = scf.for %k iter_args(%total) { %total + x[%i, %k] * y[%k, %j] }
           memref.store %sum, %out[%p]
           sparse_tensor.yield %p + 1
         }

Works for patterns in every format that MLIR can walk, and is the reference for schedules of SDDMM. Runs on functions whose
storage is exposed (expose-storage). Values of the body are summed in their type, and the sum is narrowed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf
from torch_mlir.dialects import sparse_tensor as st

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import dims, walk
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import index, loop


@dataclass(frozen=True)
class LowerSample:
    """Lower every kernel.sample."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample"):
            with op.location:
                _lower(op.opview)


def _lower(sample: Any) -> None:
    storage = storage_of(sample.operation)
    pattern = ir.RankedTensorType(sample.pattern.type)
    *body, end = [op.operation for op in sample.body.blocks[0].operations]
    reads = [op for op in body if op.name == "kernel.read"]
    buffers = {op: buffer_of(op.operands[0]) for op in reads}
    maps = {op: dims(ir.AffineMapAttr(op.attributes["map"]).value) for op in reads}
    with ir.InsertionPoint(sample):
        # The sizes are computed outside of the walk, which MLIR bufferizes later.
        sizes = {d: memref.dim(buffers[op], index(axis)) for op in reads for axis, d in enumerate(maps[op])}
        reduced = range(pattern.rank, pattern.rank + ir.IntegerAttr(sample.reduced).value)
        if any(d not in sizes for d in reduced):
            raise CompileError(f"kernel.sample at {sample.location}: nothing is read along a reduced dimension")
        scalars = Scalars(ir.MemRefType(storage.output.type).element_type)

        def at(coordinates: Sequence[ir.Value]) -> ir.Value:
            values: dict[ir.Value, ir.Value] = {}
            for op in body:
                if op in maps:
                    place = [coordinates[d] if d is not None else index(0) for d in maps[op]]
                    values[op.results[0]] = memref.load(buffers[op], place)
                else:
                    clone = op.clone()
                    for number, operand in enumerate(op.operands):
                        clone.operands[number] = values.get(operand, operand)
                    values.update(zip(op.results, clone.results, strict=True))
            return values.get(end.operands[0], end.operands[0])

        def total(coordinates: list[ir.Value], open_: Sequence[int], start: ir.Value) -> ir.Value:
            """Returns start plus the sum of the body over the dimensions in `open_`."""
            if not open_:
                return scalars.add(start, at(coordinates))
            with loop(index(0), sizes[open_[0]], index(1), [start]) as inner:
                scf.YieldOp([total([*coordinates, inner.induction_variable], open_[1:], inner.inner_iter_args[0])])
            return inner.results[0]

        walked = st.ForeachOp([ir.IndexType.get()], sample.pattern, [index(0)])
        arguments = [*[ir.IndexType.get()] * pattern.rank, pattern.element_type, ir.IndexType.get()]
        block = ir.Block.create_at_start(walked.region, arguments, [sample.location] * len(arguments))
        with ir.InsertionPoint(block):
            *coordinates, _value, entry = block.arguments
            result = total(list(coordinates), reduced, scalars.zero())
            memref.store(scalars.narrowed(result), storage.output, [entry])
            st.YieldOp([arith.addi(entry, index(1))])
    storage.erase()
