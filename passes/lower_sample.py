"""lower-sample: a `kernel.sample` becomes a walk over the stored entries of its pattern, with a loop for each reduced index.

before   %v = "kernel.sample"(%s, %x, %y) {indexing_maps = [(i, j, k) -> (i, j), (i, j, k) -> (i, k), (i, j, k) -> (k, j)]}
           : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>, tensor<?x?xf32>) -> tensor<?xf32>
after    sparse_tensor.foreach in %s init(%c0) do {
         ^bb0(%i, %j, %value, %p):
           %sum = scf.for %k iter_args(%total) { %total + x[%i, %k] * y[%k, %j] }
           memref.store %sum, %out[%p]
           sparse_tensor.yield %p + 1
         }

Works for patterns in every format that MLIR can walk, and is the reference for schedules of SDDMM. Runs on functions whose
storage is exposed (expose-storage). Narrow floats are summed in f32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf
from torch_mlir.dialects import sparse_tensor as st

from gossamer.dialects.kernel import affine_maps
from gossamer.passes.queries import dims, walk
from gossamer.passes.scalars import Scalars
from gossamer.passes.storage import buffer_of, storage_of
from gossamer.passes.vectors import index, loop


@dataclass(frozen=True)
class LowerSample:
    """Lower all of them."""

    name: ClassVar[str] = "lower-sample"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample"):
            with op.location:
                _lower(op.opview)


def _lower(sample: Any) -> None:
    storage = storage_of(sample.operation)
    pattern = ir.RankedTensorType(sample.pattern.type)
    own, *maps = [dims(m) for m in affine_maps(sample.indexing_maps)]
    buffers = [buffer_of(factor) for factor in sample.factors]
    with ir.InsertionPoint(sample):
        # Outside of the walk: MLIR's bufferization leaves these as they are.
        sizes = {d: memref.dim(b, index(axis)) for b, m in zip(buffers, maps, strict=True) for axis, d in enumerate(m)}
        reduced = [sizes[d] for d in sorted(sizes) if d not in own]
        walked = st.ForeachOp([ir.IndexType.get()], sample.pattern, [index(0)])
        arguments = [*[ir.IndexType.get()] * pattern.rank, pattern.element_type, ir.IndexType.get()]
        body = ir.Block.create_at_start(walked.region, arguments, [sample.location] * len(arguments))
        with ir.InsertionPoint(body):
            *coordinates, _value, entry = body.arguments
            scalars = Scalars(ir.MemRefType(storage.output.type).element_type)
            total = _sum(scalars, buffers, maps, list(coordinates), reduced, scalars.zero())
            memref.store(scalars.narrowed(total), storage.output, [entry])
            st.YieldOp([arith.addi(entry, index(1))])
    storage.erase()


def _sum(
    scalars: Scalars,
    buffers: Sequence[ir.Value],
    maps: Sequence[Sequence[int | None]],
    at: list[ir.Value],
    sizes: Sequence[ir.Value],
    total: ir.Value,
) -> ir.Value:
    """total + the sum of the products of all buffers at the coordinates `at` and at all that the sizes leave open."""
    if not sizes:
        loaded = [memref.load(b, [at[d] for d in m if d is not None]) for b, m in zip(buffers, maps, strict=True)]
        return scalars.add(total, scalars.product([scalars.widened(v) for v in loaded]))
    with loop(index(0), sizes[0], index(1), [total]) as inner:
        part = _sum(scalars, buffers, maps, [*at, inner.induction_variable], sizes[1:], inner.inner_iter_args[0])
        scf.YieldOp([part])
    return inner.results[0]
