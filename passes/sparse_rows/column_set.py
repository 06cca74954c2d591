"""A set of the column numbers in a row of a sparse result. Its columns can be read in ascending order without sorting.

It has two levels of bits, 64 in a word: an inner word for every 64 columns, and an outer word for every 64 inner ones, whose
bits say which inner words are not 0. To read a set costs a step for each inner word that is not 0, and one for every 4096
columns between the first and the last. Reading empties the set.
"""

from collections.abc import Callable

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf

from gossamer.passes.loops.ask_for_memory import array_in
from gossamer.passes.loops.vectors import index, loop

_BITS = 64
_SHIFT = _BITS.bit_length() - 1

AT_ONCE = 4
"""Number of columns that `write` stores at once. So it also overwrites up to AT_ONCE - 1 places behind the last one."""

_Step = Callable[[ir.Value, ir.Value], ir.Value]


class ColumnSet:
    """An empty set of numbers below `columns`, in `size(columns)` bytes of `memory` from `offset` on."""

    def __init__(self, columns: ir.Value, memory: ir.Value, offset: ir.Value) -> None:
        self._word = ir.IntegerType.get_signless(_BITS)
        inner, outer = _words(columns)
        self._inner = filled(self._zero(), inner, memory, offset)
        self._outer = filled(self._zero(), outer, memory, arith.addi(offset, arith.muli(inner, index(_BITS // 8))))

    @staticmethod
    def size(columns: ir.Value) -> ir.Value:
        """Returns the bytes of a set."""
        return arith.muli(arith.addi(*_words(columns)), index(_BITS // 8))

    def insert(self, column: ir.Value) -> None:
        """Adds a column to the set."""
        for words in (self._inner, self._outer):
            at = arith.shrui(column, index(_SHIFT))
            place = arith.index_castui(self._word, arith.andi(column, index(_BITS - 1)))
            bit = arith.shli(arith.constant(self._word, 1), place)
            memref.store(arith.ori(memref.load(words, [at]), bit), words, [at])
            column = at

    def count(self, first: ir.Value, last: ir.Value) -> ir.Value:
        """Returns the number of columns. All of them are in [first, last]."""

        def count(word: ir.Value, so_far: ir.Value) -> ir.Value:
            found = math.ctpop(memref.load(self._inner, [word]))
            memref.store(self._zero(), self._inner, [word])
            return arith.addi(so_far, arith.index_castui(ir.IndexType.get(), found))

        return self._over(first, last, index(0), count)

    def write(self, first: ir.Value, last: ir.Value, into: ir.Value, begin: ir.Value) -> None:
        """Writes the columns to into[begin], into[begin + 1], ..., ascending. All of them are in [first, last]."""
        element = ir.MemRefType(into.type).element_type
        one = arith.constant(self._word, 1)

        def write(word: ir.Value, end: ir.Value) -> ir.Value:
            bits = memref.load(self._inner, [word])
            memref.store(self._zero(), self._inner, [word])
            base = arith.muli(arith.index_castui(self._word, word), arith.constant(self._word, _BITS))
            # Always AT_ONCE columns at a time, even if the word has fewer: a processor cannot predict how many it has.
            kinds = [self._word, ir.IndexType.get()]
            chunks = scf.WhileOp(kinds, [bits, end])
            location = chunks.operation.location
            with ir.InsertionPoint(ir.Block.create_at_start(chunks.before, kinds, [location] * 2)) as point:
                left, at = point.block.arguments
                for place in range(AT_ONCE):
                    column = _narrowed(arith.addi(base, math.cttz(left)), element)
                    memref.store(column, into, [arith.addi(at, index(place))])
                    left = arith.andi(left, arith.subi(left, one))
                more = arith.cmpi(arith.CmpIPredicate.ne, left, self._zero())
                scf.ConditionOp(more, [left, arith.addi(at, index(AT_ONCE))])
            with ir.InsertionPoint(ir.Block.create_at_start(chunks.after, kinds, [location] * 2)) as point:
                scf.YieldOp(list(point.block.arguments))
            return arith.addi(end, _as_index(math.ctpop(bits)))

        self._over(first, last, begin, write)

    def _over(self, first: ir.Value, last: ir.Value, start: ir.Value, do: _Step) -> ir.Value:
        """Emits end = do(number, end) for each inner word that is not 0, and clears the outer words. Returns the last end."""
        low, high = (arith.shrui(column, index(2 * _SHIFT)) for column in (first, last))
        with loop(low, arith.addi(high, index(1)), index(1), [start]) as steps:
            at = steps.induction_variable
            bits = memref.load(self._outer, [at])
            memref.store(self._zero(), self._outer, [at])
            kinds = [self._word, ir.IndexType.get()]
            left = scf.WhileOp(kinds, [bits, steps.inner_iter_args[0]])
            location = left.operation.location
            with ir.InsertionPoint(ir.Block.create_at_start(left.before, kinds, [location] * 2)) as point:
                word, so_far = point.block.arguments
                scf.ConditionOp(arith.cmpi(arith.CmpIPredicate.ne, word, self._zero()), [word, so_far])
            with ir.InsertionPoint(ir.Block.create_at_start(left.after, kinds, [location] * 2)) as point:
                word, so_far = point.block.arguments
                after = do(arith.addi(arith.muli(at, index(_BITS)), _as_index(math.cttz(word))), so_far)
                scf.YieldOp([arith.andi(word, arith.subi(word, arith.constant(self._word, 1))), after])
            scf.YieldOp([left.results[1]])
        return steps.results[0]

    def _zero(self) -> ir.Value:
        return arith.constant(self._word, 0)


def _words(columns: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the numbers of inner and outer words."""
    inner = arith.ceildivui(columns, index(_BITS))
    return inner, arith.ceildivui(inner, index(_BITS))


def filled(value: ir.Value, size: ir.Value, memory: ir.Value, offset: ir.Value) -> ir.Value:
    """Returns a buffer of `size` elements in memory, from `offset` on, filled with a value."""
    buffer = array_in(memory, value.type, size, offset)
    with loop(index(0), size, index(1)) as steps:
        memref.store(value, buffer, [steps.induction_variable])
    return buffer


def _as_index(word: ir.Value) -> ir.Value:
    return arith.index_castui(ir.IndexType.get(), word)


def _narrowed(word: ir.Value, to: ir.Type) -> ir.Value:
    if isinstance(to, ir.IndexType):
        return _as_index(word)
    return word if word.type == to else arith.trunci(to, word)
