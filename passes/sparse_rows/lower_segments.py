"""lower-segments: lowers `kernel.segment_reduce` and `kernel.segment_map` to one parallel loop over segments.

before   %m = "kernel.segment_reduce"(%positions) ({ x }) {kind = "max"}
         %e = "kernel.segment_map"(%positions) ({ exp(x - m) }) {each = "entry"}
         %t = "kernel.segment_reduce"(%positions) ({ e }) {kind = "add"}
         %y = "kernel.segment_map"(%positions) ({ e / t }) {each = "entry"}
after    scf.parallel (%part) = ...                      // segments that begin in the part's share of the entries
           for each segment
             if it fits into a vector: read x once; m, e, t and y are registers
             else                      a loop for each reduction and for the result; e is stored in the memory of y

All ops of a function have the same segments, and the last op is its result. Runs on functions whose storage is exposed
(expose-storage).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.buffers import Storage, buffer_of, storage_of
from gossamer.passes.loops.epilogue import on_lanes
from gossamer.passes.loops.queries import all_ops, defining, dims, public_functions
from gossamer.passes.loops.row_shares import parts_of, rows_of
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, parallel, vector_of
from gossamer.passes.sparse_rows.segment_reductions import OPS, Reduction, number, of_entries

_VECTORS = 2  # an entry takes about as long as so many vectors of multiply-adds


@dataclass(frozen=True)
class LowerSegments:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            ops = [op for op in all_ops(function.operation) if op.name in OPS]
            if ops:
                with ops[-1].location:
                    _lower(ops, self.bits)


def _lower(ops: list[ir.Operation], bits: int) -> None:
    last, storage = ops[-1], storage_of(ops[-1])
    if len({op.operands[0] for op in ops}) > 1:
        raise CompileError(f"{last.name} at {last.location}: the ops of a function must go over the same positions")
    widest = max(byte_width(ir.RankedTensorType(op.results[0].type).element_type) for op in ops)
    lanes = bits // (8 * widest)
    with ir.InsertionPoint(last):
        positions = buffer_of(last.operands[0])
        segments = arith.subi(memref.dim(positions, index(0)), index(1))
        entries = load_index(positions, segments)
        parts = parts_of(entries, index(_VECTORS), storage.threads)
        with parallel(parts) as part, loop(*rows_of(positions, segments, entries, part, parts), index(1)) as rows:
            segment = rows.induction_variable
            begin, end = (load_index(positions, at) for at in (segment, arith.addi(segment, index(1))))
            short = arith.cmpi(arith.CmpIPredicate.ule, arith.subi(end, begin), index(lanes))
            choice = scf.IfOp(short, has_else=True)
            for block, kind in ((choice.then_block, _Segment), (choice.else_block, _LongSegment)):
                with ir.InsertionPoint(block):
                    kind(ops, storage, lanes, segment, begin, end).emit()
                    scf.YieldOp([])
    storage.erase()
    for op in reversed(ops[:-1]):
        op.erase()


class _Segment:
    """A segment that fits into a vector."""

    is_kept = False
    kept: frozenset[ir.Operation] = frozenset()  # the op, if any, whose values are stored in the memory of the result

    def __init__(
        self, ops: list[ir.Operation], storage: Storage, lanes: int, segment: ir.Value, begin: ir.Value, end: ir.Value
    ) -> None:
        self.ops, self.out, self.lanes = ops, storage.output, lanes
        self.segment, self.begin, self.end = segment, begin, end
        self.scalars: dict[ir.Operation, ir.Value] = {}  # the results with one value for each segment

    def emit(self) -> None:
        """Computes and stores the result."""
        for op in self.ops:
            if op.name == "kernel.segment_reduce":
                self.scalars[op] = self._reduce(op)
            elif not of_entries(op):
                self.scalars[op] = vector.extract(self.body(op, 1, self._of_segment), [], [0])
        last = self.ops[-1]
        if of_entries(last):
            self._store(last)
        else:
            memref.store(self.scalars[last], self.out, [self.segment])

    @cached_property
    def _only(self) -> "_Chunk":
        return _Chunk(self, self.begin)

    def _reduce(self, op: ir.Operation) -> ir.Value:
        reduction = Reduction(op, self.lanes)
        return reduction.across(self._only.selected(op, reduction))

    def _store(self, op: ir.Operation) -> None:
        self._only.store(op)

    def _of_segment(self, read: ir.Operation, type_: ir.VectorType) -> ir.Value:
        return vector.broadcast(type_, self.scalar(read))

    def scalar(self, read: ir.Operation) -> ir.Value:
        """Returns the value of a read that has one value for each segment."""
        source = defining(read.operands[0])
        if source in self.scalars:
            return self.scalars[source]
        return memref.load(buffer_of(read.operands[0]), [self.segment])

    @staticmethod
    def body(op: ir.Operation, lanes: int, read: Callable[[ir.Operation, ir.VectorType], ir.Value]) -> ir.Value:
        """Emits the body of an op on vectors."""
        *body, end = [inner.operation for inner in op.regions[0].blocks[0].operations]
        return on_lanes(body, {}, end.operands[0], lanes, read)


class _LongSegment(_Segment):
    """A segment of any length. Each op that reads its entries becomes a loop."""

    def emit(self) -> None:
        *others, last = self.ops
        type_ = last.results[0].type
        if of_entries(last):
            self.kept = frozenset([op for op in others if of_entries(op) and op.results[0].type == type_][:1])
        super().emit()

    def _reduce(self, op: ir.Operation) -> ir.Value:
        reduction = Reduction(op, self.lanes)
        with loop(self.begin, self.end, index(self.lanes), [reduction.start()]) as chunks:
            chunk = _Chunk(self, chunks.induction_variable)
            scf.YieldOp([reduction.combine(chunks.inner_iter_args[0], chunk.selected(op, reduction))])
        self.is_kept |= not self.kept.isdisjoint(chunk.values)
        return reduction.across(chunks.results[0])

    def _store(self, op: ir.Operation) -> None:
        with loop(self.begin, self.end, index(self.lanes)) as chunks:
            _Chunk(self, chunks.induction_variable).store(op)


class _Chunk:
    """As many entries of a segment as a vector holds, from `at` on."""

    def __init__(self, segment: _Segment, at: ir.Value) -> None:
        self.segment, self.at = segment, at
        self.mask = mask_of(segment.lanes, arith.subi(segment.end, at))
        self.values: dict[ir.Operation, ir.Value] = {}
        self.loaded: dict[ir.Value, ir.Value] = {}

    def selected(self, op: ir.Operation, reduction: Reduction) -> ir.Value:
        """Returns the values that a reduction combines. Lanes beyond the end of the segment have the neutral element."""
        return arith.select(self.mask, self.segment.body(op, self.segment.lanes, self._read), reduction.start())

    def store(self, op: ir.Operation) -> None:
        """Stores the result of an op."""
        vector.maskedstore(self.segment.out, [self.at], self.mask, self._value(op))

    def _value(self, op: ir.Operation) -> ir.Value:
        """Returns the values of an op at these entries."""
        segment = self.segment
        if op not in self.values:
            if op in segment.kept and segment.is_kept:
                self.values[op] = self._load(segment.out)
            else:
                self.values[op] = segment.body(op, segment.lanes, self._read)
                if op in segment.kept:
                    self.store(op)
        return self.values[op]

    def _read(self, read: ir.Operation, type_: ir.VectorType) -> ir.Value:
        tensor = read.operands[0]
        if dims(ir.AffineMapAttr(read.attributes["map"]).value) == [0]:
            return vector.broadcast(type_, self.segment.scalar(read))
        source = defining(tensor)
        return self._value(source) if source is not None and source.name in OPS else self._load(buffer_of(tensor))

    def _load(self, buffer: ir.Value) -> ir.Value:
        if buffer not in self.loaded:
            type_ = vector_of(self.segment.lanes, ir.MemRefType(buffer.type).element_type)
            zero = arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, number(type_.element_type, 0)))
            self.loaded[buffer] = vector.maskedload(type_, buffer, [self.at], self.mask, zero)
        return self.loaded[buffer]
