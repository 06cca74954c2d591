"""lower-gustavson: lowers a `kernel.multiply_rows` to one pass over the rows, each summed in a dense accumulator.

before   %c = "kernel.multiply_rows"(%a, %b) : (tensor<?x?xf32, #CSR>, tensor<?x?xf32, #CSR>) -> tensor<?x?xf32, #CSR>
         return %c
after    work[i + 1] = work[i] + the multiply-adds of row i
         room[i + 1] = room[i] + the most entries that row i can have       // or their number, if that is too much memory
         scf.parallel (%part) = ...                                         // rows of equal work
           for each row i, entry (i, k) of a, entry (k, j) of b
             coordinates[end] = j, end += sums[j] is absent
             sums[j] += a[i, k] * b[k, j]
           sort the coordinates of the row                  // by ranks, by a pass over all columns, or by a set
           values[...] = sums[j] for each of them, and sums[j] is absent again
         move the parts together, and add up the entries of each row to positions
         results = [address of positions, rows + 1, address of coordinates, entries, address of values, entries]

The method is Gustavson's (1978), with the list of a row's columns by Gilbert, Moler and Schreiber (1992).

"Absent" is -0.0. Adding a number to it gives that number, and no sum is -0.0, because 0.0 is added to each. So no row needs to
clear the sums, and no branch depends on where entries are. The result stores sums that happen to be zero.

The caller gives the memory (see ask_for_memory.py); its function is the first word of the list of results. A row has at most as
many entries as multiply-adds, and as columns. If there is room for this many in all rows, one pass is enough, because pages
that are not written take no memory. Else a first pass counts the entries.

There are three ways to sort a row of n entries. Short rows are sorted by the ranks of their columns (see column_ranks), and so
are rows for which that takes fewer steps, n^2 / 16, than a set may take, columns / 4096. Other rows with at least every fourth
column are sorted by a pass over the columns between their first and last, the remaining ones by a set (see column_set).

Runs on functions whose storage is exposed with the arrays of open operands (expose-storage{arrays=true}).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, math, memref, scf

from gossamer.dialects.format import Format
from gossamer.passes.loops.ask_for_memory import array_in, given
from gossamer.passes.loops.buffers import sparse_buffers_of
from gossamer.passes.loops.queries import sole_user, walk
from gossamer.passes.loops.row_shares import first_row, parts_of, share_of
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, parallel, rolled
from gossamer.passes.sorting.column_ranks import ColumnRanks
from gossamer.passes.sparse_rows.column_set import AT_ONCE, ColumnSet, filled

_LINE = 64  # bytes
# Counting the entries first is not worthwhile for less room than this.
_ROOMY = 16  # entries of room for each entry and row of the factors
_LITTLE = 1 << 23  # entries of room in all
_PASSED = 4  # a pass over a column takes a quarter of the time that a set takes for an entry


@dataclass(frozen=True)
class LowerGustavson:
    """Lower the product of a function, which returns it."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.multiply_rows"):
            with op.location:
                _Product(op.opview).lower()
            op.erase()


class _Product:
    """c[i, j] = sum_k a[i, k] b[k, j]"""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.function = op.operation.parent.opview
        self.a, self.b = sparse_buffers_of(op.a), sparse_buffers_of(op.b)
        # The sizes of b's levels are the last before workspace and threads.
        *_, self.columns, _workspace, _threads = self.function.entry_block.arguments
        result = ir.RankedTensorType(op.result.type)
        self.element, self.format = result.element_type, Format.parse(str(result.encoding))

    def lower(self) -> None:
        results = self._results()
        with ir.InsertionPoint(self.op):
            giver = memref.load(results, [index(0)])
            self.rows = arith.subi(memref.dim(self.a[0], index(0)), index(1))
            self.ends = arith.addi(self.rows, index(1))
            with given(giver, [arith.muli(self.ends, index(8))] * 2) as memory:
                self.work, self.room = (array_in(each, ir.IndexType.get(), self.ends) for each in memory)
                self._bound()
                self.parts = parts_of(memref.load(self.work, [self.rows]), index(1), self.threads)
                with given(giver, [arith.muli(self.parts, self._scratch_size())]) as (self.scratch,):
                    self._count_if_wide()
                    room = self._begin(self.rows, self.parts)
                    types = _integer(self.format.pos_width), _integer(self.format.crd_width), self.element
                    sizes = self.ends, room, room
                    bytes_ = [arith.muli(size, index(_bytes(type_))) for size, type_ in zip(sizes, types, strict=True)]
                    with given(giver, bytes_) as memory:
                        arrays = [array_in(*each) for each in zip(memory, types, sizes, strict=True)]
                        self.positions, self.coordinates, self.values = arrays
                        entries = self._fill()
                        for number, (array, size) in enumerate(zip(arrays, (self.ends, entries, entries), strict=True)):
                            at = memref.extract_aligned_pointer_as_index(array)
                            memref.store(at, results, [index(2 * number)])
                            memref.store(size, results, [index(2 * number + 1)])

    def _count_if_wide(self) -> None:
        """Counts the entries of each row, if room for the most entries that there can be is too large."""
        factors = arith.addi(memref.dim(self.a[1], index(0)), memref.dim(self.b[1], index(0)))
        enough = arith.maxui(arith.muli(arith.addi(factors, self.rows), index(_ROOMY)), index(_LITTLE))
        wide = arith.cmpi(arith.CmpIPredicate.ugt, memref.load(self.room, [self.rows]), enough)
        with ir.InsertionPoint(scf.IfOp(wide).then_block):
            self._parallel(self._count)
            self._add_up(self.room)
            scf.YieldOp([])

    def _fill(self) -> ir.Value:
        """Computes the arrays of the result. Returns the number of entries, even if it does not fit the type of positions."""
        self._parallel(self._compute)
        entries = self._add_up(self.positions)
        with parallel(index(2)) as number:
            choice = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, number, index(0)), has_else=True)
            for block, array in ((choice.then_block, self.coordinates), (choice.else_block, self.values)):
                with ir.InsertionPoint(block):
                    with loop(index(1), self.parts, index(1)) as parts:
                        self._move(array, parts.induction_variable)
                    scf.YieldOp([])
        return entries

    def _scratch_size(self) -> ir.Value:
        """Returns the bytes of scratch memory of a part."""
        sums, columns, ranks = self._scratch_sizes()
        return arith.addi(arith.addi(sums, columns), ranks)

    def _scratch_sizes(self) -> list[ir.Value]:
        """Returns the bytes of the sums, the set of columns and the ranks of a part, each in whole cache lines."""
        sums = arith.muli(self.columns, index(_bytes(self.element)))
        ranks = ColumnRanks.size(self.columns, _integer(self.format.crd_width))
        return [_whole_lines(size) for size in (sums, ColumnSet.size(self.columns), ranks)]

    def _of_part(self, part: ir.Value) -> tuple[ir.Value, ColumnSet, ColumnRanks]:
        """Returns the sums of a part, all of them absent, its set of columns, and its memory for ranks."""
        sums, columns, _ = self._scratch_sizes()
        offset = arith.muli(part, self._scratch_size())
        behind_sums = arith.addi(offset, sums)
        behind_columns = arith.addi(behind_sums, columns)
        ranks = ColumnRanks(self.columns, _integer(self.format.crd_width), self.scratch, behind_columns)
        absent = filled(arith.constant(self.element, -0.0), self.columns, self.scratch, offset)
        return absent, ColumnSet(self.columns, self.scratch, behind_sums), ranks

    def _bound(self) -> None:
        """Computes work[i], the multiply-adds of the rows before i, and room[i], the most entries that they can have."""
        entries = arith.addi(memref.dim(self.a[1], index(0)), self.rows)
        parts = parts_of(entries, index(1), self.threads)
        with parallel(parts) as part:
            low, high = (
                first_row(self.a[0], self.rows, share_of(entries, at, parts), rows_count=True)
                for at in (part, arith.addi(part, index(1)))
            )
            with loop(low, high, index(1)) as rows:
                row = rows.induction_variable
                begin, end = self._entries(self.a, row)
                with loop(begin, end, index(1), [index(0)]) as sources:
                    source = load_index(self.a[1], sources.induction_variable)
                    first, last = self._entries(self.b, source)
                    scf.YieldOp([arith.addi(sources.inner_iter_args[0], arith.subi(last, first))])
                memref.store(sources.results[0], self.work, [arith.addi(row, index(1))])
        for buffer in (self.work, self.room):
            memref.store(index(0), buffer, [index(0)])
        with loop(index(0), self.rows, index(1), [index(0)] * 2) as rows:
            at, (before, room) = arith.addi(rows.induction_variable, index(1)), rows.inner_iter_args
            work = memref.load(self.work, [at])
            after = arith.addi(before, work), arith.addi(room, arith.minui(work, self.columns))
            for value, buffer in zip(after, (self.work, self.room), strict=True):
                memref.store(value, buffer, [at])
            scf.YieldOp(list(after))

    def _parallel(self, body: Callable[[ir.Value, ir.Value, ir.Value], None]) -> None:
        """Emits body(part, first row, row after the last) for all parts, in parallel."""
        with parallel(self.parts) as part:
            body(part, *self._rows_of(part))

    def _rows_of(self, part: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the rows [low, high) of a part."""
        total, after = memref.load(self.work, [self.rows]), arith.addi(part, index(1))
        low, high = (first_row(self.work, self.rows, share_of(total, at, self.parts), rows_count=False) for at in (part, after))
        # Rows without work at the end belong to the last part.
        return low, arith.select(arith.cmpi(arith.CmpIPredicate.eq, after, self.parts), self.rows, high)

    def _begin(self, row: ir.Value, part: ir.Value) -> ir.Value:
        """Returns the place where the room of a part begins whose first row is `row`.

        Between parts there are AT_ONCE places, because a set may write behind the last column.
        """
        return arith.addi(memref.load(self.room, [row]), arith.muli(part, index(AT_ONCE)))

    def _count(self, part: ir.Value, low: ir.Value, high: ir.Value) -> None:
        """Counts the entries of each row i into room[i + 1]."""
        _, columns, _ = self._of_part(part)
        with loop(low, high, index(1)) as rows:
            row = rows.induction_variable
            begin, end = self._entries(self.a, row)
            with loop(begin, end, index(1), self._no_columns()) as entries:
                first, last = self._entries(self.b, load_index(self.a[1], entries.induction_variable))
                with loop(first, last, index(1), entries.inner_iter_args) as others:
                    column = load_index(self.b[1], others.induction_variable)
                    columns.insert(column)
                    scf.YieldOp(_widened(others.inner_iter_args, column))
                scf.YieldOp(others.results)
            memref.store(columns.count(*entries.results), self.room, [arith.addi(row, index(1))])

    def _compute(self, part: ir.Value, low: ir.Value, high: ir.Value) -> None:
        """Computes the entries of each row, one row after the other from the begin of the part's room, and their numbers."""
        sums, columns, ranks = self._of_part(part)
        with loop(low, high, index(1), [self._begin(low, part)]) as rows:
            row, first = rows.induction_variable, rows.inner_iter_args[0]
            end = self._collect(row, sums, first)
            count = arith.subi(end, first)
            way = scf.IfOp(ColumnRanks.pay(self.columns, count), has_else=True)
            with ir.InsertionPoint(way.then_block):
                ranks.find(self.coordinates, first, count)
                with ranks.each(count) as (column, rank):
                    at = arith.addi(first, rank)
                    memref.store(_as_stored(self.coordinates, column), self.coordinates, [at])
                    self._take(sums, column, at)
                scf.YieldOp([])
            with ir.InsertionPoint(way.else_block):
                with loop(first, end, index(1), self._no_columns()) as entries:
                    column = load_index(self.coordinates, entries.induction_variable)
                    scf.YieldOp(_widened(entries.inner_iter_args, column))
                least, most = entries.results
                dense = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(most, least), arith.muli(count, index(_PASSED)))
                dense_or_not = scf.IfOp(dense, has_else=True)
                with ir.InsertionPoint(dense_or_not.then_block):
                    self._pass_over(sums, least, most, first)
                    scf.YieldOp([])
                with ir.InsertionPoint(dense_or_not.else_block):
                    self._put_in_order(columns, least, most, first, end)
                    with rolled(first, end) as entries:
                        self._take(sums, load_index(self.coordinates, entries.induction_variable), entries.induction_variable)
                    scf.YieldOp([])
                scf.YieldOp([])
            memref.store(_as_stored(self.positions, arith.subi(end, first)), self.positions, [arith.addi(row, index(1))])
            scf.YieldOp([end])

    def _collect(self, row: ir.Value, sums: ir.Value, start: ir.Value) -> ir.Value:
        """Adds up a row. Writes its columns, in the order in which they occur, to `coordinates` from `start` on.

        Returns the place where they end.
        """
        begin, end = self._entries(self.a, row)
        with rolled(begin, end, [start]) as entries:
            p = entries.induction_variable
            weight = memref.load(self.a[2], [p])
            low, high = self._entries(self.b, load_index(self.a[1], p))
            with rolled(low, high, [*entries.inner_iter_args]) as others:
                q, (at,) = others.induction_variable, others.inner_iter_args
                column = load_index(self.b[1], q)
                before = memref.load(sums, [column])
                memref.store(_as_stored(self.coordinates, column), self.coordinates, [at])
                after = math.fma(weight, memref.load(self.b[2], [q]), before)
                memref.store(arith.addf(after, arith.constant(self.element, 0.0)), sums, [column])
                scf.YieldOp([arith.addi(at, arith.subi(index(1), self._is_there(before)))])
            scf.YieldOp(others.results)
        return entries.results[0]

    def _pass_over(self, sums: ir.Value, least: ir.Value, most: ir.Value, first: ir.Value) -> None:
        """Writes the sums that are not absent, from column `least` to `most`, and these columns, from place `first` on."""
        with rolled(least, arith.addi(most, index(1)), [first]) as columns:
            column, (at,) = columns.induction_variable, columns.inner_iter_args
            there = self._is_there(memref.load(sums, [column]))
            memref.store(_as_stored(self.coordinates, column), self.coordinates, [at])
            self._take(sums, column, at)
            scf.YieldOp([arith.addi(at, there)])

    def _is_there(self, total: ir.Value) -> ir.Value:
        """Returns 1 for a sum, 0 for an absent one, as an index."""
        bits = ir.IntegerType.get_signless(ir.FloatType(self.element).width)
        absent = arith.bitcast(bits, arith.constant(self.element, -0.0))
        there = arith.cmpi(arith.CmpIPredicate.ne, arith.bitcast(bits, total), absent)
        return arith.index_castui(ir.IndexType.get(), there)

    def _put_in_order(self, columns: ColumnSet, least: ir.Value, most: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Sorts the coordinates [begin, end). They are all different, and `least` and `most` are the first and last of them."""
        with rolled(begin, end) as entries:
            columns.insert(load_index(self.coordinates, entries.induction_variable))
        columns.write(least, most, self.coordinates, begin)

    def _take(self, sums: ir.Value, column: ir.Value, at: ir.Value) -> None:
        """Moves the sum of a column to the values, and makes it absent."""
        memref.store(memref.load(sums, [column]), self.values, [at])
        memref.store(arith.constant(self.element, -0.0), sums, [column])

    def _entries(self, matrix: Sequence[ir.Value], row: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the bounds of the entries of a row."""
        return load_index(matrix[0], row), load_index(matrix[0], arith.addi(row, index(1)))

    def _no_columns(self) -> list[ir.Value]:
        """Returns the first and last column of an empty set: bounds that any column widens."""
        return [self.columns, index(0)]

    def _add_up(self, counts: ir.Value) -> ir.Value:
        """Turns counts[i + 1], the entries of row i, into the end of row i. Returns their sum."""
        memref.store(_as_stored(counts, index(0)), counts, [index(0)])
        with loop(index(0), self.rows, index(1), [index(0)]) as rows:
            at = arith.addi(rows.induction_variable, index(1))
            end = arith.addi(rows.inner_iter_args[0], load_index(counts, at))
            memref.store(_as_stored(counts, end), counts, [at])
            scf.YieldOp([end])
        return rows.results[0]

    def _move(self, array: ir.Value, part: ir.Value) -> None:
        """Moves the elements that a part has written to an array behind those of the part before it."""
        low, high = self._rows_of(part)
        begin, end = load_index(self.positions, low), load_index(self.positions, high)
        shift = arith.subi(self._begin(low, part), begin)
        with loop(begin, end, index(1)) as entries:
            p = entries.induction_variable
            memref.store(memref.load(array, [arith.addi(p, shift)]), array, [p])

    def _results(self) -> ir.Value:
        """Makes the function return nothing. Gives it an argument before workspace and threads: the list of results."""
        block, location = self.function.entry_block, self.op.location
        returned = sole_user(self.op.result)
        assert returned is not None
        *_, workspace, threads = block.arguments
        results = block.add_argument(ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], ir.IndexType.get()), location)
        for old in (workspace, threads):
            old.replace_all_uses_with(block.add_argument(old.type, location))
        for number in (5, 4):
            block.erase_argument(len(block.arguments) - number)
        self.threads = block.arguments[len(block.arguments) - 1]
        types = [argument.type for argument in block.arguments]
        self.function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, []))
        with ir.InsertionPoint(returned):
            func.ReturnOp([])
        returned.erase()
        return results


def _widened(bounds: Sequence[ir.Value], column: ir.Value) -> list[ir.Value]:
    """Returns the first and last column of a set and one more column."""
    return [arith.minui(bounds[0], column), arith.maxui(bounds[1], column)]


def _integer(width: int) -> ir.Type:
    return ir.IntegerType.get_signless(width) if width else ir.IndexType.get()


def _as_stored(buffer: ir.Value, value: ir.Value) -> ir.Value:
    """Returns an index in the element type of a buffer."""
    type_ = ir.MemRefType(buffer.type).element_type
    return value if isinstance(type_, ir.IndexType) else arith.index_castui(type_, value)


def _bytes(type_: ir.Type) -> int:
    return 8 if isinstance(type_, ir.IndexType) else byte_width(type_)


def _whole_lines(size: ir.Value) -> ir.Value:
    return arith.muli(arith.ceildivui(size, index(_LINE)), index(_LINE))
