"""lower-gustavson: a `kernel.multiply_rows` becomes one pass over the rows, each collected in a dense accumulator.

before   %c = "kernel.multiply_rows"(%a, %b) : (tensor<?x?xf32, #CSR>, tensor<?x?xf32, #CSR>) -> tensor<?x?xf32, #CSR>
         return %c
after    work[i + 1] = work[i] + the multiply-adds of row i
         room[i + 1] = room[i] + the entries that row i can have at most    // of all rows, where that is not much; else counted
         scf.parallel (%part) = ...                                         // rows of equal work
           for each row i, entry (i, k) of a, entry (k, j) of b
             sums[j] += a[i, k] * b[k, j], bit j of a set of columns := 1
           for each j of the set, ascending: coordinates[end], values[end] = j, sums[j]; both cleared; end += 1
         the parts moved together, positions from the entries of each row
         results = [address of positions, rows + 1, address of coordinates, entries, address of values, entries]

Gustavson (1978). The set has two levels of 64 bits a word, so that going over it takes a row's entries and 1/4096 of the
columns, and gives them in order. Results are counted by what they store, zeros included; memory from malloc is the caller's to
free, as with expose-specifiers. A row has no more entries than multiply-adds, and than columns: where all of them have room,
memory that is not written to takes none, and one pass will do. Else a first one counts the entries.

Runs on functions whose storage is exposed with the arrays of open operands (expose-storage{arrays=true}).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, func, math, memref, scf

from gossamer.dialects.format import Format
from gossamer.passes.queries import sole_user, walk
from gossamer.passes.row_parts import first_row, parts_of, share_of
from gossamer.passes.scalars import Scalars
from gossamer.passes.storage import sparse_buffers_of
from gossamer.passes.vectors import index, load_index, loop

_Step = Callable[[ir.Value, ir.Value], ir.Value]
_BITS = 64
_ROOMY = 16  # entries of room for each entry of the factors that are not worth counting


@dataclass(frozen=True)
class LowerGustavson:
    """Lower the product of a function, which returns it."""

    name: ClassVar[str] = "lower-gustavson"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.multiply_rows"):
            with op.location:
                _Product(op.opview).lower()


class _Product:
    """c[i, j] = sum_k a[i, k] b[k, j]"""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.function = op.operation.parent.opview
        self.a, self.b = sparse_buffers_of(op.a), sparse_buffers_of(op.b)
        # The sizes of b's levels are the last before workspace and threads.
        *_, self.columns, _workspace, self.threads = self.function.entry_block.arguments
        result = ir.RankedTensorType(op.result.type)
        self.element, self.scalars = result.element_type, Scalars(result.element_type)
        self.format = Format.parse(str(result.encoding))
        self.word = ir.IntegerType.get_signless(_BITS)

    def lower(self) -> None:
        with ir.InsertionPoint(self.op):
            self.rows = arith.subi(memref.dim(self.a[0], index(0)), index(1))
            self.work, self.room = (_allocated(ir.IndexType.get(), arith.addi(self.rows, index(1))) for _ in range(2))
            self._bound()
            self.parts = parts_of(memref.load(self.work, [self.rows]), index(1), self.threads)
            factors = arith.addi(memref.dim(self.a[1], index(0)), memref.dim(self.b[1], index(0)))
            enough = arith.muli(arith.addi(factors, self.rows), index(_ROOMY))
            wide = arith.cmpi(arith.CmpIPredicate.ugt, memref.load(self.room, [self.rows]), enough)
            with ir.InsertionPoint(scf.IfOp(wide).then_block):
                self._parallel(self._count)
                self._add_up(self.room)
                scf.YieldOp([])
            total = memref.load(self.room, [self.rows])
            self.positions = _allocated(_integer(self.format.pos_width), arith.addi(self.rows, index(1)))
            self.coordinates = _allocated(_integer(self.format.crd_width), total)
            self.values = _allocated(self.element, total)
            self._parallel(self._compute)
            self._add_up(self.positions)
            with loop(index(1), self.parts, index(1)) as parts:
                self._move(parts.induction_variable)
            for buffer in (self.work, self.room):
                memref.dealloc(buffer)
        self._return()

    def _bound(self) -> None:
        """work[i] = the multiply-adds of the rows before i, room[i] = the entries they can have."""
        for buffer in (self.work, self.room):
            memref.store(index(0), buffer, [index(0)])
        with loop(index(0), self.rows, index(1), [index(0)] * 2) as rows:
            row, (before, room) = rows.induction_variable, rows.inner_iter_args
            begin, end = (load_index(self.a[0], at) for at in (row, arith.addi(row, index(1))))
            with loop(begin, end, index(1), [before]) as entries:
                source = load_index(self.a[1], entries.induction_variable)
                low, high = (load_index(self.b[0], at) for at in (source, arith.addi(source, index(1))))
                scf.YieldOp([arith.addi(entries.inner_iter_args[0], arith.subi(high, low))])
            work = entries.results[0]
            room = arith.addi(room, arith.minui(arith.subi(work, before), self.columns))
            for value, buffer in ((work, self.work), (room, self.room)):
                memref.store(value, buffer, [arith.addi(row, index(1))])
            scf.YieldOp([work, room])

    def _parallel(self, body: Callable[[ir.Value, ir.Value], None]) -> None:
        """body(first row, row after the last) for all parts."""
        parallel = scf.ParallelOp([], [index(0)], [self.parts], [index(1)], [])
        block = ir.Block.create_at_start(parallel.region, [ir.IndexType.get()], [self.op.location])
        with ir.InsertionPoint(block):
            body(*self._rows_of(block.arguments[0]))
            scf.ReduceOp([], 0)

    def _rows_of(self, part: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The rows of a part."""
        total, after = memref.load(self.work, [self.rows]), arith.addi(part, index(1))
        low, high = (first_row(self.work, self.rows, share_of(total, at, self.parts), 0) for at in (part, after))
        # Rows without work at the end belong to the last part.
        return low, arith.select(arith.cmpi(arith.CmpIPredicate.eq, after, self.parts), self.rows, high)

    def _sets(self) -> tuple[ir.Value, ir.Value]:
        """An empty set of columns: its words, and which of them are not 0."""
        words = arith.ceildivui(self.columns, index(_BITS))
        return _cleared(self.word, words), _cleared(self.word, arith.ceildivui(words, index(_BITS)))

    def _count(self, low: ir.Value, high: ir.Value) -> None:
        """The entries of each row to the place of room after its own."""
        inner, outer = self._sets()

        def count(word: ir.Value, so_far: ir.Value) -> ir.Value:
            found = arith.index_castui(ir.IndexType.get(), math.ctpop(memref.load(inner, [word])))
            memref.store(arith.constant(self.word, 0), inner, [word])
            return arith.addi(so_far, found)

        with loop(low, high, index(1)) as rows:
            row = rows.induction_variable
            with self._products(row) as (_, q):
                self._insert(outer, self._insert(inner, load_index(self.b[1], q)))
            memref.store(self._all(outer, index(0), count), self.room, [arith.addi(row, index(1))])
        for buffer in (inner, outer):
            memref.dealloc(buffer)

    def _compute(self, low: ir.Value, high: ir.Value) -> None:
        """The entries of each row, one row behind the other from where the first has its room, and how many they are."""
        sums, (inner, outer) = _cleared(self.element, self.columns), self._sets()

        def hand_over(column: ir.Value, end: ir.Value) -> ir.Value:
            memref.store(_as_stored(self.coordinates, column), self.coordinates, [end])
            memref.store(memref.load(sums, [column]), self.values, [end])
            memref.store(self.scalars.zero(), sums, [column])
            return arith.addi(end, index(1))

        with loop(low, high, index(1), [memref.load(self.room, [low])]) as rows:
            row, first = rows.induction_variable, rows.inner_iter_args[0]
            with self._products(row) as (weight, q):
                column = load_index(self.b[1], q)
                memref.store(math.fma(weight, memref.load(self.b[2], [q]), memref.load(sums, [column])), sums, [column])
                self._insert(outer, self._insert(inner, column))
            end = self._all(outer, first, lambda word, so_far: self._each(inner, word, so_far, hand_over))
            memref.store(_as_stored(self.positions, arith.subi(end, first)), self.positions, [arith.addi(row, index(1))])
            scf.YieldOp([end])
        for buffer in (sums, inner, outer):
            memref.dealloc(buffer)

    @contextmanager
    def _products(self, row: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """For each entry (i, k) of a row of a and entry (k, j) of b: the value of the former, the place of the latter."""
        begin, end = (load_index(self.a[0], at) for at in (row, arith.addi(row, index(1))))
        with loop(begin, end, index(1)) as entries:
            p = entries.induction_variable
            weight, source = memref.load(self.a[2], [p]), load_index(self.a[1], p)
            low, high = (load_index(self.b[0], at) for at in (source, arith.addi(source, index(1))))
            with loop(low, high, index(1)) as others:
                yield weight, others.induction_variable

    def _all(self, words: ir.Value, start: ir.Value, do: _Step) -> ir.Value:
        """end = do(number, end) for each number in a set, which is emptied."""
        with loop(index(0), memref.dim(words, index(0)), index(1), [start]) as steps:
            scf.YieldOp([self._each(words, steps.induction_variable, steps.inner_iter_args[0], do)])
        return steps.results[0]

    def _insert(self, words: ir.Value, number: ir.Value) -> ir.Value:
        """Put a number into a set; the word that it is in."""
        at = arith.shrui(number, index(_BITS.bit_length() - 1))
        place = arith.index_castui(self.word, arith.andi(number, index(_BITS - 1)))
        bit = arith.shli(arith.constant(self.word, 1), place)
        memref.store(arith.ori(memref.load(words, [at]), bit), words, [at])
        return at

    def _each(self, words: ir.Value, at: ir.Value, end: ir.Value, do: _Step) -> ir.Value:
        """end = do(number, end) for each number in a word of a set, which is emptied."""
        zero = arith.constant(self.word, 0)
        kinds = [self.word, ir.IndexType.get()]
        word = memref.load(words, [at])
        memref.store(zero, words, [at])
        left = scf.WhileOp(kinds, [word, end])
        with ir.InsertionPoint(ir.Block.create_at_start(left.before, kinds, [self.op.location] * 2)) as point:
            bits, so_far = point.block.arguments
            scf.ConditionOp(arith.cmpi(arith.CmpIPredicate.ne, bits, zero), [bits, so_far])
        with ir.InsertionPoint(ir.Block.create_at_start(left.after, kinds, [self.op.location] * 2)) as point:
            bits, so_far = point.block.arguments
            place = arith.index_castui(ir.IndexType.get(), math.cttz(bits))
            after = do(arith.addi(arith.muli(at, index(_BITS)), place), so_far)
            scf.YieldOp([arith.andi(bits, arith.subi(bits, arith.constant(self.word, 1))), after])
        return left.results[1]

    def _add_up(self, counts: ir.Value) -> None:
        """The counts of each row, behind it, to where it ends."""
        memref.store(_as_stored(counts, index(0)), counts, [index(0)])
        with loop(index(0), self.rows, index(1), [index(0)]) as rows:
            at = arith.addi(rows.induction_variable, index(1))
            end = arith.addi(rows.inner_iter_args[0], load_index(counts, at))
            memref.store(_as_stored(counts, end), counts, [at])
            scf.YieldOp([end])

    def _move(self, part: ir.Value) -> None:
        """Move what a part has written to behind the part before it."""
        low, high = self._rows_of(part)
        begin, end = load_index(self.positions, low), load_index(self.positions, high)
        shift = arith.subi(memref.load(self.room, [low]), begin)
        with loop(begin, end, index(1)) as entries:
            p = entries.induction_variable
            for buffer in (self.coordinates, self.values):
                memref.store(memref.load(buffer, [arith.addi(p, shift)]), buffer, [p])

    def _return(self) -> None:
        """Have the function write where its result is into a list, its argument before workspace and threads."""
        block, location = self.function.entry_block, self.op.location
        returned = sole_user(self.op.result)
        assert returned is not None
        *_, workspace, threads = block.arguments
        results = block.add_argument(ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], ir.IndexType.get()), location)
        with ir.InsertionPoint(returned):
            entries = load_index(self.positions, self.rows)
            sizes = arith.addi(self.rows, index(1)), entries, entries
            for number, (buffer, size) in enumerate(zip((self.positions, self.coordinates, self.values), sizes, strict=True)):
                memref.store(memref.extract_aligned_pointer_as_index(buffer), results, [index(2 * number)])
                memref.store(size, results, [index(2 * number + 1)])
            func.ReturnOp([])
        returned.erase()
        self.op.operation.erase()
        for old in (workspace, threads):
            old.replace_all_uses_with(block.add_argument(old.type, location))
        for number in (5, 4):
            block.erase_argument(len(block.arguments) - number)
        types = [argument.type for argument in block.arguments]
        self.function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, []))


def _allocated(element: ir.Type, size: ir.Value) -> ir.Value:
    return memref.alloc(ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], element), [size], [])


def _cleared(element: ir.Type, size: ir.Value) -> ir.Value:
    buffer = _allocated(element, size)
    zero = arith.constant(element, 0.0 if isinstance(element, ir.FloatType) else 0)
    with loop(index(0), size, index(1)) as steps:
        memref.store(zero, buffer, [steps.induction_variable])
    return buffer


def _integer(width: int) -> ir.Type:
    return ir.IntegerType.get_signless(width) if width else ir.IndexType.get()


def _element(buffer: ir.Value) -> ir.Type:
    return ir.MemRefType(buffer.type).element_type


def _as_stored(buffer: ir.Value, value: ir.Value) -> ir.Value:
    """An index as an element of a buffer."""
    type_ = _element(buffer)
    return value if isinstance(type_, ir.IndexType) else arith.index_castui(type_, value)
