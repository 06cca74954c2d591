"""lower-gpu-segments: lowers `kernel.segment_reduce` and `kernel.segment_map` to a GPU kernel, a warp for each segment.

before   %m = "kernel.segment_reduce"(%positions) ({ x }) {kind = "max"}
         %e = "kernel.segment_map"(%positions) ({ exp(x - m) }) {each = "entry"}
         %t = "kernel.segment_reduce"(%positions) ({ e }) {kind = "add"}
         %y = "kernel.segment_map"(%positions) ({ e / t }) {each = "entry"}
after    gpu.func @region_e256(...)                      // or, if the result is one value a segment, @region_s8
           each warp, for each segment that begins in its 32 entries (or its one segment):
             scf.for %p step 32 iter_args(m): max(m, x[p + lane]);              combine m across the lanes
             scf.for %p step 32 iter_args(t): t + exp(x[p + lane] - m);         add t up across the lanes
             scf.for %p step 32: y[p + lane] = exp(x[p + lane] - m) / t

All ops of a function have the same segments, and the last op is its result (in the example, softmax over the rows of a sparse
matrix). Values of entries are computed again at each use, which takes less time than memory. Values of segments are in
registers. Elements must be floats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.launch import Launch
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.epilogue import on_lanes
from gossamer.passes.loops.gpu_threads import WARP, Place, across, add_kernel, below, last_at_most, sync_warp, when
from gossamer.passes.loops.queries import all_ops, defining, dims, public_functions
from gossamer.passes.loops.vectors import index, load_index, loop
from gossamer.passes.sparse_rows.segment_reductions import OPS, Reduction, of_entries

_WARPS = 8


@dataclass(frozen=True)
class LowerGpuSegments:
    """Lowers the segment ops of every public function to one kernel."""

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            ops = [op for op in all_ops(function.operation) if op.name in OPS]
            if ops:
                with ops[-1].location:
                    _lower(function, ops)


def _lower(function: ir.OpView, ops: list[ir.Operation]) -> None:
    last = ops[-1]
    if len({op.operands[0] for op in ops}) > 1:
        raise CompileError(f"{last.name} at {last.location}: the ops of a function must go over the same positions")
    if any(not isinstance(ir.RankedTensorType(op.results[0].type).element_type, ir.FloatType) for op in ops):
        raise CompileError(f"{last.name} at {last.location}: GPUs compute with floats only")
    tokens, suffix = (_WARPS * WARP, "e256") if of_entries(last) else (_WARPS, "s8")
    launch = Launch(tokens, 1, _WARPS * WARP, 0)
    add_kernel(function, suffix, launch, partial(_emit, ops, launch))
    function.operation.erase()


def _emit(ops: list[ir.Operation], launch: Launch, arguments: dict[ir.Value, ir.Value]) -> None:
    """Emits a loop over the segments of this warp."""
    positions, place = arguments[buffer_of(ops[-1].operands[0])], Place(launch)
    segments = arith.subi(memref.dim(positions, index(0)), index(1))
    if of_entries(ops[-1]):
        first = arith.addi(place.first, arith.muli(place.warp, index(WARP)))
        low, high = (_begun_before(positions, segments, at) for at in (first, arith.addi(first, index(WARP))))
    else:
        low = arith.minui(arith.addi(place.first, place.warp), segments)
        high = arith.minui(arith.addi(low, index(1)), segments)
    with loop(low, high, index(1)) as rows:
        segment = rows.induction_variable
        begin, end = (load_index(positions, at) for at in (segment, arith.addi(segment, index(1))))
        _Segment(ops, arguments, place, segment, begin, end).emit()


def _begun_before(positions: ir.Value, segments: ir.Value, entry: ir.Value) -> ir.Value:
    """Returns how many segments begin before an entry."""
    is_first = arith.cmpi(arith.CmpIPredicate.eq, entry, index(0))
    before = arith.subi(entry, arith.select(is_first, index(0), index(1)))
    return arith.select(is_first, index(0), arith.minui(arith.addi(last_at_most(positions, before), index(1)), segments))


class _Segment:
    """Emits the results of a segment. The lanes of a warp take its entries, 32 at a time."""

    def __init__(
        self,
        ops: list[ir.Operation],
        arguments: dict[ir.Value, ir.Value],
        place: Place,
        segment: ir.Value,
        begin: ir.Value,
        end: ir.Value,
    ) -> None:
        self.ops, self.arguments, self.place = ops, arguments, place
        self.segment, self.begin, self.end = segment, begin, end
        self.out = arguments[storage_of(ops[-1]).output]
        self.of_segment: dict[ir.Operation, ir.Value] = {}  # results with one value for the segment, in all lanes

    def emit(self) -> None:
        """Computes and stores the result."""
        for op in self.ops:
            if op.name == "kernel.segment_reduce":
                self.of_segment[op] = self._reduced(op)
            elif not of_entries(op):
                self.of_segment[op] = self._body(op, index(0))
        last = self.ops[-1]
        if of_entries(last):
            self._loop([], lambda p, exists, _: self._store(last, p, exists))
        else:
            with when(arith.cmpi(arith.CmpIPredicate.eq, self.place.lane, index(0))):
                memref.store(vector.extract(self.of_segment[last], [], [0]), self.out, [self.segment])

    def _reduced(self, op: ir.Operation) -> ir.Value:
        reduction = Reduction(op, 1)

        def step(p: ir.Value, exists: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            return [arith.select(exists, reduction.combine(carried[0], self._body(op, p)), carried[0])]

        (found,) = self._loop([reduction.start()], step)
        sync_warp()  # the lanes must meet before they exchange their values
        whole = across(vector.extract(found, [], [0]), reduction.combine)
        return vector.broadcast(reduction.type, whole)

    def _loop(
        self, start: list[ir.Value], step: Callable[[ir.Value, ir.Value, list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """Emits a loop over 32 entries at a time, and returns the carried values.

        Its body is step(this lane's entry, whether the lane has one, carried values). A lane without one gets the last entry.
        """
        with loop(self.begin, self.end, index(WARP), start) as chunks:
            p = arith.addi(chunks.induction_variable, self.place.lane)
            safe = arith.minui(p, arith.subi(self.end, index(1)))
            carried = step(safe, below(p, self.end), list(chunks.inner_iter_args))
            if start:
                scf.YieldOp(carried)
        return list(chunks.results)

    def _store(self, op: ir.Operation, p: ir.Value, exists: ir.Value) -> list[ir.Value]:
        value = vector.extract(self._body(op, p), [], [0])
        with when(exists):
            memref.store(value, self.out, [p])
        return []

    def _body(self, op: ir.Operation, p: ir.Value) -> ir.Value:
        """Returns the value of an op at entry p, as a vector of one element."""

        def read(inner: ir.Operation, type_: ir.VectorType) -> ir.Value:
            source = defining(inner.operands[0])
            if source in self.of_segment:
                return self.of_segment[source]
            if source is not None and source.name in OPS:
                return self._body(source, p)
            (d,) = dims(ir.AffineMapAttr(inner.attributes["map"]).value)
            at = self.segment if d == 0 else p
            return vector.broadcast(type_, memref.load(self.arguments[buffer_of(inner.operands[0])], [at]))

        *body, end = [inner.operation for inner in op.regions[0].blocks[0].operations]
        return on_lanes(body, {}, end.operands[0], 1, read)
