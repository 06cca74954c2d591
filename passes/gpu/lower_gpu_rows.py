"""lower-gpu-rows: lowers a `kernel.gather_rows` (SpMM, SpMV) to GPU kernels, a warp for each row, a block for each long one.

before   %y = "kernel.gather_rows"(%a, %x) ({epilogue}) {lanes = 32, vectors = 8} : (tensor<?x?xf32, #CSR>, ...) -> ...
after    gpu.func @region_r32(...)                       // 32 rows a block; _r8 for few rows, to occupy more blocks
           each warp, for each of its rows with at most 512 entries; then all warps, for a part of each longer row:
             for each 128 columns of x:                  // 64 or 32 where that fits x better
               for each 32 entries: store where their rows of x begin, and their values, to the warp's part of shared memory
                 scf.for %p, 4 at a time: vector.fma(value, x[coordinate, the lane's 4 columns], sums)
               the sums through the epilogue into y; the parts of a long row are first added up in shared memory

With less than 16 columns, down to the one of SpMV, each lane has an entry instead, and the sums are added up across the warp.
Rows are dealt to blocks in their order, and blocks to multiprocessors that are free. So only rows that are much longer than
others need balancing. Rows of x are read in vectors of 16 bytes where their length allows. The transposed product is this one
with the arrays of the transposed matrix in CSR, so that sums are complete, and the same at every call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, math, memref, scf, vector

from gossamer.dialects.launch import Launch
from gossamer.passes.loops.buffers import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.epilogue import Epilogue, reader
from gossamer.passes.loops.gpu_threads import (
    WARP,
    Place,
    add_kernel,
    below,
    by_width,
    divides,
    load,
    shared,
    store,
    sync_warp,
    total,
    when,
)
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, vector_of, widened, zeros

_WARPS = 8
_LONG = 512  # a row with more entries is divided among all warps of a block
_FEW = 16  # number of columns from which on each lane has columns of x, not entries
_TOGETHER = 4  # entries whose loads are in flight at once
_ENTRY = 16  # bytes of an entry in shared memory: where a row of x begins, and the value
_ENTRIES = _WARPS * WARP * _ENTRY  # bytes of the entries of a block
_SHAPES = ((32, 1), (8, 4))  # rows of a block, and blocks that share the columns


@dataclass(frozen=True)
class LowerGpuRows:
    """Lowers every kernel.gather_rows."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.gather_rows"):
            with op.location:
                function, rows = op.parent.opview, _Rows(op.opview)
                for count, parts in _SHAPES:
                    launch = Launch(count, parts, _WARPS * WARP, _ENTRIES + rows.sums_bytes)
                    add_kernel(function, f"r{count}", launch, partial(_emit, rows, launch))
                function.operation.erase()


class _Rows:
    """y[m, n] = epilogue(sum_p values[p] x[coordinates[p], n]) over the entries p of row m."""

    def __init__(self, op: Any) -> None:
        block = op.epilogue.blocks[0]
        self.epilogue = Epilogue(block)
        reads = [inner.operation for inner in block.operations if inner.operation.name == "kernel.read"]
        self.reads = {read.results[0]: buffer_of(read.operands[0]) for read in reads}
        self.buffers = [*sparse_buffers_of(op.a), buffer_of(op.x), storage_of(op.operation).output]
        element = ir.MemRefType(self.buffers[-1].type).element_type
        lane_bytes = 16 // byte_width(element) * byte_width(Scalars(element).wide)
        self.sums_bytes = _WARPS * WARP * lane_bytes  # bytes of the parts of a long row


def _emit(rows: _Rows, launch: Launch, arguments: dict[ir.Value, ir.Value]) -> None:
    reads = {value: arguments[buffer] for value, buffer in rows.reads.items()}
    _Kernel([arguments[buffer] for buffer in rows.buffers], reads, rows.epilogue, launch).emit()


class _Kernel:
    """Emits the body of one kernel."""

    def __init__(
        self, buffers: Sequence[ir.Value], reads: dict[ir.Value, ir.Value], epilogue: Epilogue, launch: Launch
    ) -> None:
        self.reads, self.epilogue = reads, epilogue
        self.positions, self.coordinates, self.values, *dense = buffers
        self.x, self.out = (_view(memory, 2) for memory in dense)
        self.place = Place(launch)
        self.element = ir.MemRefType(self.out.type).element_type
        self.sum_type = Scalars(self.element).wide
        self.i64 = ir.IntegerType.get_signless(64)
        self.entries = shared(0, [_WARPS, WARP, 2], self.i64)
        self.rows, self.columns = (memref.dim(self.out, index(d)) for d in range(2))
        self.flat = _view(self.x, 1)

    def emit(self) -> None:
        last = arith.minui(arith.addi(self.place.first, index(self.place.launch.tokens)), self.rows)

        def wide(width: int) -> ir.Value:
            return arith.andi(divides(width, self.columns), below(index(_FEW * width), self.columns))

        few = scf.IfOp(below(self.columns, index(_FEW)), has_else=True)
        with ir.InsertionPoint(few.then_block):
            self._all_rows(last, _Entries(self))
            scf.YieldOp([])
        with ir.InsertionPoint(few.else_block):
            by_width(self.element, wide, [], lambda width: self._all_rows(last, _Columns(self, width)))
            scf.YieldOp([])

    def _all_rows(self, last: ir.Value, lanes: "_Lanes") -> list[ir.Value]:
        """Multiplies the block's rows: first the short ones, by a warp each, then any long ones, by all warps together.

        The second pass is skipped if the block has too few entries for a long row.
        """
        place, end = self.place, self._bounds(arith.subi(last, index(1)))[1]
        some_long = below(index(_LONG), arith.subi(end, self._bounds(place.first)[0]))
        with loop(index(0), arith.select(some_long, index(2), index(1)), index(1)) as passes:
            together = arith.cmpi(arith.CmpIPredicate.eq, passes.induction_variable, index(1))
            first = arith.select(together, place.first, arith.addi(place.first, place.warp))
            with loop(first, last, arith.select(together, index(1), index(_WARPS))) as rows:
                row = rows.induction_variable
                begin, end = self._bounds(row)
                is_long = below(index(_LONG), arith.subi(end, begin))
                with when(arith.cmpi(arith.CmpIPredicate.eq, is_long, together)):
                    self._row(lanes, row, begin, end, together)
        return []

    def _row(self, lanes: "_Lanes", row: ir.Value, begin: ir.Value, end: ir.Value, together: ir.Value) -> None:
        """Multiplies a row with this block's tiles of columns, one after the other.

        If the warps work `together`, each one sums up its share of the row, in whole rounds of 32 entries.
        """
        place, step = self.place, lanes.columns * self.place.launch.blocks
        share = arith.ceildivui(arith.subi(end, begin), index(_WARPS * WARP))
        low = arith.addi(begin, arith.muli(place.warp, arith.muli(share, index(WARP))))
        low = arith.select(together, arith.minui(low, end), begin)
        high = arith.select(together, arith.minui(arith.addi(low, arith.muli(share, index(WARP))), end), end)
        with loop(arith.muli(place.chunk, index(lanes.columns)), self.columns, index(step)) as tiles:
            tile = tiles.induction_variable
            sums = lanes.sums(low, high, tile)
            choice = scf.IfOp(together, [sums.type], has_else=True)
            with ir.InsertionPoint(choice.then_block):
                scf.YieldOp([self._added(lanes, sums)])
            with ir.InsertionPoint(choice.else_block):
                scf.YieldOp([sums])
            is_first = arith.cmpi(arith.CmpIPredicate.eq, place.warp, index(0))
            with when(arith.select(together, is_first, arith.constant(is_first.type, 1))):
                lanes.store(row, tile, choice.results[0])

    def _added(self, lanes: "_Lanes", sums: ir.Value) -> ir.Value:
        """Returns the total of all warps' sums of a row."""
        parts = shared(_ENTRIES, [_WARPS, WARP * lanes.width], self.sum_type)
        at = arith.muli(self.place.lane, index(lanes.width))
        store(sums, parts, [self.place.warp, at])
        gpu.barrier()
        added = [load(ir.VectorType(sums.type), parts, [index(warp), at]) for warp in range(_WARPS)]
        gpu.barrier()
        return reduce(arith.addf, added)

    def finished(self, sums: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        """Returns the epilogue's result for sums of a row, for the columns from `column` on."""
        return self.epilogue.whole(sums, reader(self.reads, [row, column], load))

    def _bounds(self, row: ir.Value) -> tuple[ir.Value, ir.Value]:
        return load_index(self.positions, row), load_index(self.positions, arith.addi(row, index(1)))


class _Columns:
    """Row sums where each lane has `width` neighbouring columns of x."""

    def __init__(self, kernel: _Kernel, width: int) -> None:
        self.kernel, self.width, self.columns = kernel, width, width * WARP
        self.read, self.vec = vector_of(width, kernel.element), vector_of(width, kernel.sum_type)

    def sums(self, begin: ir.Value, end: ir.Value, tile: ir.Value) -> ir.Value:
        """Returns the sums of the entries [begin, end) for the columns from `tile` on."""
        kernel, place = self.kernel, self.kernel.place
        column = arith.addi(tile, arith.muli(place.lane, index(self.width)))
        column = arith.minui(column, arith.subi(kernel.columns, index(self.width)))
        with loop(begin, end, index(WARP), [zeros(self.vec)]) as rounds:
            first = rounds.induction_variable
            p = arith.minui(arith.addi(first, place.lane), arith.subi(end, index(1)))
            origin = arith.muli(load_index(kernel.coordinates, p), kernel.columns)
            value = _as_word(widened(memref.load(kernel.values, [p]), kernel.sum_type))
            pair = [arith.index_cast(kernel.i64, origin), value]
            store(vector.from_elements(vector_of(2, kernel.i64), pair), kernel.entries, [place.warp, place.lane, index(0)])
            sync_warp()
            count = arith.minui(arith.subi(end, first), index(WARP))
            sums = self._entries(count, column, rounds.inner_iter_args[0])
            sync_warp()
            scf.YieldOp([sums])
        return rounds.results[0]

    def _entries(self, count: ir.Value, column: ir.Value, sums: ir.Value) -> ir.Value:
        """Returns the sums plus the first `count` entries of the warp's shared memory, added several at a time, then singly."""
        whole = arith.subi(count, arith.remui(count, index(_TOGETHER)))
        for low, high, together in ((index(0), whole, _TOGETHER), (whole, count, 1)):
            with loop(low, high, index(together), [sums]) as steps:
                at = [arith.addi(steps.induction_variable, index(i)) for i in range(together)]
                factors = [self._factors(number, column) for number in at]
                added = steps.inner_iter_args[0]
                for value, x in factors:
                    added = vector.fma(vector.broadcast(self.vec, value), widened(x, self.vec), added)
                scf.YieldOp([added])
            sums = steps.results[0]
        return sums

    def _factors(self, number: ir.Value, column: ir.Value) -> tuple[ir.Value, ir.Value]:
        kernel = self.kernel
        pair = load(vector_of(2, kernel.i64), kernel.entries, [kernel.place.warp, number, index(0)])
        origin = arith.index_cast(ir.IndexType.get(), vector.extract(pair, [], [0]))
        return _from_word(vector.extract(pair, [], [1]), kernel.sum_type), load(
            self.read, kernel.flat, [arith.addi(origin, column)]
        )

    def store(self, row: ir.Value, tile: ir.Value, sums: ir.Value) -> None:
        """Stores the sums of a row for the columns from `tile` on into y."""
        column = arith.addi(tile, arith.muli(self.kernel.place.lane, index(self.width)))
        with when(below(column, self.kernel.columns)):
            store(self.kernel.finished(sums, row, column), self.kernel.out, [row, column])


class _Entries:
    """Row sums for one column of x, where each lane has entries of the row."""

    width = columns = 1

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel = kernel

    def sums(self, begin: ir.Value, end: ir.Value, tile: ir.Value) -> ir.Value:
        """Returns the sum of the entries [begin, end) for the column `tile`, in all lanes."""
        kernel = self.kernel
        with loop(begin, end, index(WARP * _TOGETHER), [arith.constant(kernel.sum_type, 0.0)]) as rounds:
            added, last = rounds.inner_iter_args[0], arith.subi(end, index(1))
            lanes = [arith.addi(rounds.induction_variable, index(i * WARP)) for i in range(_TOGETHER)]
            for p in [arith.addi(lane, kernel.place.lane) for lane in lanes]:
                safe = arith.minui(p, last)
                x = memref.load(kernel.x, [load_index(kernel.coordinates, safe), tile])
                factors = (widened(v, kernel.sum_type) for v in (memref.load(kernel.values, [safe]), x))
                added = arith.select(below(p, end), math.fma(*factors, added), added)
            scf.YieldOp([added])
        return vector.broadcast(vector_of(1, kernel.sum_type), total(rounds.results[0]))

    def store(self, row: ir.Value, tile: ir.Value, sums: ir.Value) -> None:
        """Stores the sum of a row for the column `tile` into y."""
        with when(arith.cmpi(arith.CmpIPredicate.eq, self.kernel.place.lane, index(0))):
            result = self.kernel.finished(sums, row, tile)
            memref.store(vector.extract(result, [], [0]), self.kernel.out, [row, tile])
        sync_warp()  # the lanes must meet again before they exchange sums


def _view(memory: ir.Value, rank: int) -> ir.Value:
    """Returns a contiguous matrix as a vector (rank 1), or a vector as a matrix of one column (rank 2)."""
    type_ = ir.MemRefType(memory.type)
    if type_.rank == rank:
        return memory
    size = memref.dim(memory, index(0))
    if type_.rank == 2:
        size = arith.muli(size, memref.dim(memory, index(1)))
    dynamic, ones = ir.ShapedType.get_dynamic_size(), [1] * (rank - 1)
    strided = ir.Attribute.parse(f"strided<{[1, *ones]}>")
    view = ir.MemRefType.get([dynamic, *ones], type_.element_type, strided)
    return memref.reinterpret_cast(view, memory, [], [size], [], [0], [dynamic, *ones], [1, *ones])


_Lanes = _Columns | _Entries


def _as_word(value: ir.Value) -> ir.Value:
    """Returns the bits of an f32 or f64 as an i64."""
    width = ir.FloatType(value.type).width
    bits = arith.bitcast(ir.IntegerType.get_signless(width), value)
    return bits if width == 64 else arith.extui(ir.IntegerType.get_signless(64), bits)


def _from_word(word: ir.Value, type_: ir.Type) -> ir.Value:
    """Returns the float with these bits, the inverse of `_as_word`."""
    width = ir.FloatType(type_).width
    return arith.bitcast(type_, word if width == 64 else arith.trunci(ir.IntegerType.get_signless(width), word))
