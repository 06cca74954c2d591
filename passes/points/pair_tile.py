"""What convolutions of points have in registers: sums of a few rows times a few vectors of columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, func, math, memref, scf, vector

from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, vector_of, zeros


@dataclass(frozen=True)
class PairTile:
    """Up to `vectors` vectors of columns of `element`, on vectors of `bits`."""

    element: ir.Type
    bits: int

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.bits // (8 * byte_width(self.element))

    @property
    def vec(self) -> ir.VectorType:
        """The type of a vector."""
        return vector_of(self.lanes, self.element)

    @property
    def vectors(self) -> int:
        """The most vectors of columns at once."""
        return registers(self.bits) // 8

    def rows(self, count: int) -> int:
        """How many rows there are at once with `count` vectors."""
        return min(8, 8 * self.vectors // (count + 1))

    def width(self, columns: ir.Value) -> ir.Value:
        """Vectors at once: as many as can be, and equally many each time: 5 are 3 and 2."""
        needed = arith.ceildivui(columns, index(self.lanes))
        return arith.ceildivui(needed, arith.maxui(arith.ceildivui(needed, index(self.vectors)), index(1)))

    def function(self, parent: func.FuncOp, count: int, types: Sequence[ir.Type], build: Callable[..., None]) -> func.FuncOp:
        """A private function of these types beside `parent`, for `count` vectors; `build` makes its body of its arguments."""
        with ir.InsertionPoint(parent):
            made = func.FuncOp(f"{parent.name.value}_columns{count}", (list(types), []), visibility="private")
        with ir.InsertionPoint(made.add_entry_block()):
            build(count, *made.entry_block.arguments)
            func.ReturnOp([])
        return made

    def columns(self, first: ir.Value, end: ir.Value, count: int) -> list[tuple[ir.Value, ir.Value]]:
        """Where each of `count` vectors begins, from column `first` on, and its mask, of the columns before `end`."""
        starts = [arith.addi(first, index(v * self.lanes)) for v in range(count)]
        return [(at, mask_of(self.lanes, arith.subi(arith.maxui(end, at), at))) for at in starts]

    def load(self, memory: ir.Value, place: Sequence[ir.Value], mask: ir.Value) -> ir.Value:
        """A vector, zeros behind its end."""
        return vector.maskedload(self.vec, memory, list(place), mask, zeros(self.vec))

    def sums(
        self,
        low: ir.Value,
        high: ir.Value,
        start: Sequence[ir.Value],
        vectors_at: Callable[[ir.Value], list[ir.Value]],
        scalar_at: Callable[[ir.Value, int], ir.Value],
    ) -> list[ir.Value]:
        """start[r, v] + the sum over low <= n < high of scalar_at(n, r) * vectors_at(n)[v]"""
        with loop(low, high, index(1), list(start)) as steps:
            n, sums = steps.induction_variable, list(steps.inner_iter_args)
            read = vectors_at(n)
            for r in range(len(sums) // len(read)):
                element = vector.broadcast(self.vec, scalar_at(n, r))
                for v, each in enumerate(read):
                    at = r * len(read) + v
                    sums[at] = math.fma(element, each, sums[at])
            scf.YieldOp(sums)
        return list(steps.results)

    def only(self, there: ir.Value, mask: ir.Value) -> ir.Value:
        """The mask where `there`, else none of it."""
        return arith.select(there, mask, mask_of(self.lanes, index(0)))


def below(value: ir.Value, limit: ir.Value) -> ir.Value:
    """value < limit"""
    return arith.cmpi(arith.CmpIPredicate.ult, value, limit)


def pairs_at(memory: ir.Value, first: ir.Value, count: int, end: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """The rows of `count` pairs from the first on, the last before `end` in place of those behind it; and which are there."""
    last, numbers = arith.subi(end, index(1)), [arith.addi(first, index(r)) for r in range(count)]
    return [load_index(memory, arith.minui(n, last)) for n in numbers], [below(n, end) for n in numbers]


def fetch(memory: ir.Value, rows: Sequence[ir.Value], columns: ir.Value) -> None:
    """Start to fetch rows that are read soon."""
    line = 64 // byte_width(ir.MemRefType(memory.type).element_type)
    with loop(index(0), columns, index(line)) as lines:
        for row in rows:
            memref.prefetch(memory, [row, lines.induction_variable], False, 2, True)
