"""lower-rows: lowers a `kernel.gather_rows` to loops over the rows of the sparse matrix, in parts of equal work.

before   %y = "kernel.gather_rows"(%a, %x) ({epilogue}) {lanes = 16, vectors = 16, ahead = 1} : (tensor<?x?xf32, #CSR>, ...
after    for each 256 columns of x
           scf.parallel (%part) = ...                     // the part's share of rows and entries
             func.call @region_columns16(...)             // or _columns15 ... 1, _half for the last columns
           for each part that begins within a row: that row of y += the part's sums of it, through the epilogue
         func.func private @region_columns16(...)
           for each row, scf.for %p = positions[row] to positions[row + 1] iter_args(16 vectors of sums)
             vector.fma(values[p], x[coordinates[p], columns ...], sums)
           the sums through the epilogue into y        // the last vector masked; without the epilogue if the row goes on

If x is larger than the caches near the core, its rows are prefetched some entries ahead (see prefetch.py). Few columns take
half vectors, of which fewer cross a cache line. A row has few entries, and their number is unpredictable, so its loop is not
unrolled. But a single sum takes two entries at a time, because a multiply-add waits for the previous one.

A part begins with a row, unless that row alone is longer than a part. Then the row is cut, so that hubs of a power-law graph
keep all threads busy. The sums of a part for a row that began before it go to the workspace, and are added in the order of the
parts. So results depend only on the number of threads. A vector x, or a matrix of one column, takes @region_column, which reads
element by element, or @region_column_gathered if rows are long and the target `gathers` (on Zen 3, gathers take twice as long).
If the number of columns of y is known, only the functions that it needs are made.

Runs on functions whose storage is exposed with the arrays of open operands (expose-storage{arrays=true}).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.loops.buffers import Storage, buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.epilogue import Epilogue, reader
from gossamer.passes.loops.prefetch import far
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import first_row, parts_of, share_of
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import (
    byte_width,
    call_narrowest,
    index,
    load_index,
    loop,
    mask_of,
    parallel,
    reserve_workspace,
    vector_of,
    zeros,
)
from gossamer.passes.sparse_rows.row_reader import ColumnReader, Entries, GatheringReader, Reader, VectorReader

_HALVED = 64  # only vectors of this many bytes have a function for half of them
_LONG = 12  # average entries of a row from which elements of a single column are gathered by vectors


@dataclass(frozen=True)
class LowerRows:
    """Lower every kernel.gather_rows."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.gather_rows"):
            with op.location:
                _Rows(module, op.opview).lower()


@dataclass(frozen=True)
class _Edge:
    """The begin of a part: an entry of a row. The row is `cut` if it has entries before it."""

    row: ir.Value
    entry: ir.Value
    cut: ir.Value


@dataclass(frozen=True)
class _Place:
    """The place where sums of a row are stored: the view `out` of y, from its column `at` on, which is `column` of y.

    `mask` is that of the last vector; without one there is a single column.
    """

    out: ir.Value
    row: ir.Value
    at: ir.Value
    column: ir.Value
    mask: ir.Value | None


class _Rows:
    """y[m, n] = epilogue(sum_p values[p] x[coordinates[p], n]) over the entries p of row m.

    width    columns of y; None if they are only known at run time
    cuts     whether rows may be cut: not if y would round partial sums
    raw      whether a cut row has sums in y that go through the epilogue once they are complete
    """

    def __init__(self, module: ir.Module, op: Any) -> None:
        self.module, self.op = module, op
        self.storage: Storage = storage_of(op.operation)
        self.lanes, self.vectors, self.level, self.gathers = (
            ir.IntegerAttr(each).value for each in (op.lanes, op.vectors, op.ahead, op.gathers)
        )
        out = ir.MemRefType(self.storage.output.type)
        self.scalars, self.vector_x = Scalars(out.element_type), out.rank == 1
        self.positions, self.coordinates, self.values = sparse_buffers_of(op.a)
        self.x = buffer_of(op.x)
        self.vec, self.sums = (vector_of(self.lanes, t) for t in (self.scalars.element, self.scalars.wide))
        dynamic = ir.ShapedType.get_dynamic_size()
        self.width = 1 if self.vector_x else None if out.is_dynamic_dim(1) else out.shape[1]
        block = op.epilogue.blocks[0]
        self.epilogue, self.cuts = Epilogue(block), self.scalars.wide == self.scalars.element
        self.raw = self.cuts and self.epilogue.result != self.epilogue.sum
        reads = [inner.operation for inner in block.operations if inner.operation.name == "kernel.read"]
        self.reads = {read.results[0]: buffer_of(read.operands[0]) for read in reads}
        strided = ir.Attribute.parse("strided<[?, 1], offset: ?>")
        self.view = ir.MemRefType.get([dynamic, dynamic], self.scalars.element, strided)
        self.carried = self.vectors * self.lanes * byte_width(self.scalars.element)

    def lower(self) -> None:
        variants = {count * lanes: self._of_vectors(count, lanes) for count, lanes in self._shapes()}
        single = self._of_one_column() if self.width in (None, 1) else []
        reserve_workspace(self.module, self.carried)
        with ir.InsertionPoint(self.op):
            self.rows = memref.dim(self.storage.output, index(0))
            self.columns = index(1) if self.vector_x else memref.dim(self.storage.output, index(1))
            self.entries = memref.dim(self.values, index(0))
            self.parts = parts_of(self.entries, arith.ceildivui(self.columns, index(self.lanes)), self.storage.threads)
            with loop(index(0), self.columns, index(self.vectors * self.lanes)) as tiles:
                first = tiles.induction_variable
                with parallel(self.parts) as part:
                    self._part(variants, single, first, part)
                if self.cuts:
                    with loop(index(1), self.parts, index(1)) as parts:
                        self._merge(first, parts.induction_variable)
        self.storage.erase()

    def _shapes(self) -> list[tuple[int, int]]:
        """Returns (vectors of columns, lanes) of each function that is needed, the widest first."""
        half = self.lanes // 2 if self.lanes * byte_width(self.scalars.wide) == _HALVED else 0
        if self.width is None:
            return [(n, self.lanes) for n in range(self.vectors, 0, -1)] + [(1, half)] * (half > 0)
        full, left = divmod(self.width, self.vectors * self.lanes) if self.width > 1 else (0, 0)
        rest = (1, half) if left <= half else (-(-left // self.lanes), self.lanes)
        return sorted({*[(self.vectors, self.lanes)] * (full > 0), *[rest] * (left > 0)}, reverse=True)

    def _part(self, variants: dict[int, func.FuncOp], single: list[func.FuncOp], first: ir.Value, part: ir.Value) -> None:
        """Emits one part of the product, for the columns of x from the first one on."""
        begin, end = self._edge(part), self._edge(arith.addi(part, index(1)))
        left = arith.subi(self.columns, first)
        arrays = [self.positions, self.coordinates, self.values, self.x, *self.reads.values()]
        long = arith.cmpi(arith.CmpIPredicate.uge, self.entries, arith.muli(self.rows, index(_LONG)))

        def one_column(arguments: list[ir.Value]) -> None:
            if len(single) == 1:
                func.CallOp(single[0], arguments)
                return
            with _either(long) as blocks:
                for block, function in zip(blocks, reversed(single), strict=True):
                    with ir.InsertionPoint(block):
                        func.CallOp(function, arguments)

        def call(out: ir.Value, low: ir.Value, high: ir.Value, complete: ir.Value) -> None:
            arguments = [*arrays, out, first, low, high, begin.entry, end.entry, *[complete] * self.raw]
            if single and variants:
                with _either(arith.cmpi(arith.CmpIPredicate.eq, self.columns, index(1))) as (alone, several):
                    with ir.InsertionPoint(alone):
                        one_column(arguments)
                    with ir.InsertionPoint(several):
                        call_narrowest(left, variants, arguments)
            elif single:
                one_column(arguments)
            elif variants:
                call_narrowest(left, variants, arguments)

        with _only_if(begin.cut):
            call(self._carried(part), begin.row, arith.addi(begin.row, index(1)), index(0))
        low = arith.addi(begin.row, arith.index_castui(ir.IndexType.get(), begin.cut))
        high = arith.addi(end.row, arith.index_castui(ir.IndexType.get(), end.cut))
        call(self._columns_of_y(first), low, high, end.row)

    def _merge(self, first: ir.Value, part: ir.Value) -> None:
        """Adds a part's sums of the row within which it begins. The last such part of a row completes it."""
        edge, end = self._edge(part), self._edge(arith.addi(part, index(1)))
        goes_on = arith.andi(end.cut, arith.cmpi(arith.CmpIPredicate.eq, end.row, edge.row))
        complete = arith.addi(edge.row, arith.select(goes_on, index(0), index(1)))
        with _only_if(edge.cut):
            more, out = self._carried(part), self._columns_of_y(first)
            columns = arith.minui(arith.subi(self.columns, first), index(self.vectors * self.lanes))
            with loop(index(0), columns, index(self.lanes)) as steps:
                at = steps.induction_variable
                mask = mask_of(self.lanes, arith.subi(columns, at))
                parts = [vector.maskedload(self.vec, each, [edge.row, at], mask, zeros(self.vec)) for each in (out, more)]
                place = _Place(out, edge.row, at, arith.addi(first, at), mask)
                self._store([arith.addf(*parts)], place, self.reads, complete if self.raw else None)

    def _edge(self, part: ir.Value) -> _Edge:
        """Returns where a part begins, which is where the previous one ends. Parts have equal numbers of entries plus rows,
        because a row costs as much as an entry."""
        work = arith.addi(self.entries, self.rows)
        begun = share_of(work, part, self.parts)
        row = first_row(self.positions, self.rows, begun, rows_count=True)
        if not self.cuts:
            return _Edge(row, load_index(self.positions, row), arith.constant(ir.IntegerType.get_signless(1), 0))
        above = arith.subi(row, arith.minui(row, index(1)))
        start, stop = load_index(self.positions, above), load_index(self.positions, row)
        within = arith.subi(begun, above)  # the share without the rows above: a number of entries
        long = arith.cmpi(arith.CmpIPredicate.ugt, arith.muli(arith.subi(stop, start), self.parts), work)
        inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.ugt, within, start), arith.cmpi(arith.CmpIPredicate.ult, within, stop)
        )
        cut = arith.andi(long, inside)
        return _Edge(arith.select(cut, above, row), arith.select(cut, within, stop), cut)

    def _columns_of_y(self, first: ir.Value) -> ir.Value:
        """Returns a view of the columns of y from the first one on."""
        return self._viewed(self.storage.output, first, self.columns)

    def _carried(self, part: ir.Value) -> ir.Value:
        """Returns a view like one of y whose rows are all the same row of the workspace."""
        length = index(self.carried // byte_width(self.scalars.element))
        place = arith.muli(part, index(self.carried))
        row = ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], self.scalars.element)
        return self._viewed(memref.view(row, self.storage.workspace, place, [length]), index(0), index(0))

    def _viewed(self, buffer: ir.Value, offset: ir.Value, stride: ir.Value) -> ir.Value:
        open_ = ir.ShapedType.get_dynamic_size()
        return memref.ReinterpretCastOp(
            self.view, buffer, [offset], [self.rows, self.columns], [stride], [open_], [open_, open_], [open_, 1]
        ).result

    def _of_vectors(self, count: int, lanes: int) -> func.FuncOp:
        """Returns a function for up to `count` vectors of `lanes` columns."""

        def emit(entries: Entries, first: ir.Value, add_rows: Callable[[Reader], None]) -> None:
            left = arith.subi(memref.dim(entries.x, index(1)), arith.addi(first, index((count - 1) * lanes)))
            mask = mask_of(lanes, arith.minui(left, index(lanes)))
            with _either(far(entries.x)) as blocks:
                for block, ahead in zip(blocks, (self.level, None), strict=True):
                    with ir.InsertionPoint(block):
                        add_rows(VectorReader(entries, first, count, lanes, mask, ahead))

        return self._function(f"_columns{count}" if lanes == self.lanes else "_half", emit)

    def _of_one_column(self) -> list[func.FuncOp]:
        """Returns the functions for one column: one reads element by element; another one gathers vectors, if that pays."""
        single = self._function("_column", lambda entries, _, add_rows: add_rows(ColumnReader(entries, entries.column())))
        if not self.gathers:
            return [single]
        gathered = self._function(
            "_column_gathered",
            lambda entries, _, add_rows: add_rows(GatheringReader(entries, entries.column(), self.lanes)),
        )
        return [single, gathered]

    def _function(self, suffix: str, emit: Callable[[Entries, ir.Value, Callable[[Reader], None]], None]) -> func.FuncOp:
        """Returns a function of the arrays, a view of y, its first column, rows [low, high) and entries [begin, end).

        `emit` gets the entries, the first column, and a function that adds up all rows with a reader. If sums may be raw, the
        function has one more argument: rows before it are complete.
        """
        parent = self.op.operation.parent.opview
        buffers = [self.positions, self.coordinates, self.values, self.x, *self.reads.values()]
        types = [*(buffer.type for buffer in buffers), self.view, *[ir.IndexType.get()] * (5 + self.raw)]
        with ir.InsertionPoint(parent):
            function = func.FuncOp(parent.name.value + suffix, (types, []), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            positions, *given = function.entry_block.arguments
            entries, others = Entries(self.scalars, *given[:3]), given[3:]
            reads = dict(zip(self.reads, others, strict=False))
            out, first, low, high, begin, end, *complete = others[len(reads) :]

            def add_rows(reader: Reader) -> None:
                with loop(low, high, index(1)) as rows:
                    row = rows.induction_variable
                    start = arith.maxui(load_index(positions, row), begin)
                    stop = arith.minui(load_index(positions, arith.addi(row, index(1))), end)
                    place = _Place(out, row, index(0), first, reader.mask)
                    self._store(reader.row(start, stop), place, reads, *complete or [None])

            emit(entries, first, add_rows)
            func.ReturnOp([])
        return function

    def _store(self, sums: list[ir.Value], place: _Place, reads: dict[ir.Value, ir.Value], complete: ir.Value | None) -> None:
        """Stores sums of a row into y. If `complete` is given, only rows before it go through the epilogue."""
        if complete is None:
            self._put(self._finished(sums, place, reads), place)
            return
        with _either(arith.cmpi(arith.CmpIPredicate.ult, place.row, complete)) as (whole, cut):
            with ir.InsertionPoint(whole):
                self._put(self._finished(sums, place, reads), place)
            with ir.InsertionPoint(cut):
                self._put(sums, place)

    def _finished(self, sums: list[ir.Value], place: _Place, reads: dict[ir.Value, ir.Value]) -> list[ir.Value]:
        """Applies the epilogue to sums. A scalar becomes a vector of one."""
        if place.mask is None:
            sums = [vector.broadcast(vector_of(1, self.scalars.wide), sums[0])]
        finished = []
        for number, each in enumerate(sums):
            mask = place.mask if number == len(sums) - 1 else None
            column = arith.addi(place.column, index(number * self.lanes))
            finished.append(self.epilogue.whole(each, reader(reads, [place.row, column], partial(_load, mask))))
        return finished

    def _put(self, values: list[ir.Value], place: _Place) -> None:
        if place.mask is None:
            value = values[0]
            if isinstance(value.type, ir.VectorType):
                value = vector.extract(value, [], [0])
            memref.store(value, place.out, [place.row, index(0)])
            return
        columns = [arith.addi(place.at, index(number * self.lanes)) for number in range(len(values))]
        for value, column in zip(values[:-1], columns[:-1], strict=True):
            vector.store(value, place.out, [place.row, column])
        vector.maskedstore(place.out, [place.row, columns[-1]], place.mask, values[-1])


def _load(mask: ir.Value | None, type_: ir.VectorType, buffer: ir.Value, at: list[ir.Value]) -> ir.Value:
    """Loads a vector that an epilogue reads."""
    return vector.load(type_, buffer, at) if mask is None else vector.maskedload(type_, buffer, at, mask, zeros(type_))


@contextmanager
def _either(condition: ir.Value) -> Iterator[tuple[ir.Block, ir.Block]]:
    """Makes an scf.if. Yields its two blocks, and ends them."""
    choice = scf.IfOp(condition, has_else=True)
    blocks = choice.then_block, choice.else_block
    yield blocks
    for block in blocks:
        with ir.InsertionPoint(block):
            scf.YieldOp([])


@contextmanager
def _only_if(condition: ir.Value) -> Iterator[None]:
    """Makes an scf.if, with the insertion point inside."""
    with ir.InsertionPoint(scf.IfOp(condition).then_block):
        yield
        scf.YieldOp([])
