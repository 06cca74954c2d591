"""lower-gpu-dots: lowers a `kernel.sample` (SDDMM) that is scheduled by rows to a GPU kernel, eight lanes for each entry.

before   %v = "kernel.sample"(%s) ({
           %0 = "kernel.read"(%x) {map = (i, j, k) -> (i, k)}
           %1 = "kernel.read"(%y) {map = (i, j, k) -> (j, k)}
           %2 = arith.mulf %0, %1
           "kernel.yield"(%2)
         }) {reduced = 1, lanes = 32, together = 4} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
after    gpu.func @region_e256(...)                       // a thread block has 256 entries, a warp 32
           each lane: find the row of its entry by bisection in the positions; store row and column to shared memory
           scf.for %step = 0 to 8 step 4                   // eight lanes compute 8 entries, 4 at a time
             scf.for %k step 8 lanes x width ... iter_args(4 vectors of sums): sums += x[row, k ...] * y[column, k ...]
             add up the 4 sums over the eight lanes; lanes %step to %step + 3 keep one each
           each lane stores the value of its entry

All warps have the same number of entries, wherever row bounds lie. Rows of x and y are read in vectors of 16 bytes where their
length allows, in narrower ones otherwise. Products beyond the end of k are not added. Entries past the last one repeat it, and
are not stored. Narrow floats are summed in f32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.launch import Launch
from gossamer.passes.loops.buffers import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.epilogue import on_lanes
from gossamer.passes.loops.gpu_threads import (
    WARP,
    Place,
    add_kernel,
    below,
    by_width,
    divides,
    divmod_by,
    last_at_most,
    load,
    shared,
    store,
    sync_warp,
    total,
    when,
)
from gossamer.passes.loops.queries import dims, walk
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of, zeros

_WARPS = 8
_LANES = 8  # lanes that compute an entry together
_ENTRY = 16  # bytes of an entry in shared memory: row and column
_LAUNCH = Launch(_WARPS * WARP, 1, _WARPS * WARP, _WARPS * WARP * _ENTRY)


@dataclass(frozen=True)
class LowerGpuDots:
    """Lowers every kernel.sample."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample"):
            with op.location:
                sample = _Sample(op.opview)
                function = op.parent.opview
                add_kernel(function, f"e{_LAUNCH.tokens}", _LAUNCH, partial(_emit, sample))
                function.operation.erase()


class _Sample:
    """values[p] = sum_k body(i, j, k) for the entries p = (i, j) of a CSR matrix."""

    def __init__(self, op: Any) -> None:
        self.together = ir.IntegerAttr(op.attributes["together"]).value
        if _LANES % self.together:
            raise CompileError(f"together = {self.together} does not divide the {_LANES} entries of a group of lanes")
        self.output = storage_of(op.operation).output
        self.pattern = sparse_buffers_of(op.pattern)
        *self.body, end = [inner.operation for inner in op.body.blocks[0].operations]
        self.result = end.operands[0]
        reads = [inner for inner in self.body if inner.name == "kernel.read"]
        self.buffers = {read: buffer_of(read.operands[0]) for read in reads}
        self.maps = {read: dims(ir.AffineMapAttr(read.attributes["map"]).value) for read in reads}
        self.element = ir.MemRefType(self.output.type).element_type
        self.scalars = Scalars(self.element)
        self.along = [read for read, places in self.maps.items() if places[-1:] == [2]]
        if not self.along:
            raise CompileError(f"kernel.sample at {op.location}: nothing is read along the reduced dimension")


def _emit(sample: _Sample, arguments: dict[ir.Value, ir.Value]) -> None:
    _Kernel(sample, arguments).emit()


class _Kernel:
    """Emits the body of the kernel."""

    def __init__(self, sample: _Sample, arguments: dict[ir.Value, ir.Value]) -> None:
        self.sample, self.scalars = sample, sample.scalars
        self.buffers = {read: arguments[buffer] for read, buffer in sample.buffers.items()}
        self.positions, self.coordinates, _ = (arguments[buffer] for buffer in sample.pattern)
        self.out = arguments[sample.output]
        self.place = Place(_LAUNCH)
        self.group, self.lane = divmod_by(self.place.lane, _LANES)
        self.i64 = ir.IntegerType.get_signless(64)
        self.entries = shared(0, [_WARPS * WARP, 2], self.i64)
        self.reduced = memref.dim(self.buffers[sample.along[0]], index(len(sample.maps[sample.along[0]]) - 1))

    def emit(self) -> None:
        entry, count = arith.addi(self.place.first, self.place.thread), memref.dim(self.out, index(0))
        safe = arith.minui(entry, arith.subi(count, index(1)))
        pair = [
            arith.index_cast(self.i64, at) for at in (last_at_most(self.positions, safe), load_index(self.coordinates, safe))
        ]
        store(vector.from_elements(vector_of(2, self.i64), pair), self.entries, [self.place.thread, index(0)])
        sync_warp()
        fits = lambda width: divides(width, self.reduced)
        (value,) = by_width(self.sample.element, fits, [self.scalars.wide], lambda width: [self._values(width)])
        with when(below(entry, count)):
            memref.store(self.scalars.narrowed(value), self.out, [entry])

    def _values(self, width: int) -> ir.Value:
        """Returns in each lane the value of one entry of its group: lane i of a group has the group's i-th entry."""
        together, wide = self.sample.together, vector_of(width, self.scalars.wide)
        group = arith.subi(self.place.thread, self.lane)
        with loop(index(0), index(_LANES), index(together), [self.scalars.zero()]) as steps:
            numbers = [arith.addi(steps.induction_variable, index(i)) for i in range(together)]
            entries = [self._entry(arith.addi(group, number)) for number in numbers]
            with loop(index(0), self.reduced, index(_LANES * width), [zeros(wide)] * together) as ks:
                k = arith.addi(ks.induction_variable, arith.muli(self.lane, index(width)))
                exists = below(k, self.reduced)
                safe = arith.minui(k, arith.subi(self.reduced, index(width)))
                products = [self._product([*entry, safe], width) for entry in entries]
                sums = zip(ks.inner_iter_args, products, strict=True)
                scf.YieldOp([arith.select(exists, self.scalars.add(old, product), old) for old, product in sums])
            mine = steps.inner_iter_args[0]
            for number, sums in zip(numbers, ks.results, strict=True):
                found = total(vector.reduction(self.scalars.wide, vector.CombiningKind.ADD, sums), _LANES)
                mine = arith.select(arith.cmpi(arith.CmpIPredicate.eq, self.lane, number), found, mine)
            scf.YieldOp([mine])
        return steps.results[0]

    def _entry(self, number: ir.Value) -> list[ir.Value]:
        """Loads the row and column of an entry of this block."""
        pair = load(vector_of(2, self.i64), self.entries, [number, index(0)])
        return [arith.index_cast(ir.IndexType.get(), vector.extract(pair, [], [i])) for i in range(2)]

    def _product(self, at: list[ir.Value], width: int) -> ir.Value:
        """Emits the body for `width` neighbours along k."""

        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            where = [at[d] for d in self.sample.maps[op] if d is not None]
            if op not in self.sample.along:
                return vector.broadcast(type_, memref.load(self.buffers[op], where))
            return load(type_, self.buffers[op], where)

        return on_lanes(self.sample.body, {}, self.sample.result, width, read)
