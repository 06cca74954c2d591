"""The register tile of convolutions of points: sums of a few rows times a few vectors of columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, func, math, memref, scf, vector

from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, vector_of, zeros


@dataclass(frozen=True)
class PairTile:
    """A tile of up to `vectors` vectors of columns of type `element`, with vectors of `bits` bits."""

    element: ir.Type
    bits: int

    @property
    def lanes(self) -> int:
        """Number of elements of a vector."""
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
        """Returns the number of rows of a tile with `count` vectors."""
        return min(8, 8 * self.vectors // (count + 1))

    def width(self, columns: ir.Value) -> ir.Value:
        """Returns the vectors of a tile: as few tiles as possible, of about equal width. 5 vectors are 3 and 2."""
        needed = arith.ceildivui(columns, index(self.lanes))
        return arith.ceildivui(needed, arith.maxui(arith.ceildivui(needed, index(self.vectors)), index(1)))

    def function(self, parent: func.FuncOp, count: int, types: Sequence[ir.Type], build: Callable[..., None]) -> func.FuncOp:
        """Makes a private function of these types beside `parent`, for `count` vectors. `build` builds its body."""
        with ir.InsertionPoint(parent):
            made = func.FuncOp(f"{parent.name.value}_columns{count}", (list(types), []), visibility="private")
        with ir.InsertionPoint(made.add_entry_block()):
            build(count, *made.entry_block.arguments)
            func.ReturnOp([])
        return made

    def columns(self, first: ir.Value, end: ir.Value, count: int) -> list[tuple[ir.Value, ir.Value]]:
        """Returns for each of `count` vectors from column `first` on its begin, and its mask of columns before `end`."""
        starts = [arith.addi(first, index(v * self.lanes)) for v in range(count)]
        return [(at, mask_of(self.lanes, arith.subi(arith.maxui(end, at), at))) for at in starts]

    def load(self, memory: ir.Value, place: Sequence[ir.Value], mask: ir.Value) -> ir.Value:
        """Loads a vector, with zeros in lanes outside of the mask."""
        return vector.maskedload(self.vec, memory, list(place), mask, zeros(self.vec))

    def sums(
        self,
        low: ir.Value,
        high: ir.Value,
        start: Sequence[ir.Value],
        vectors_at: Callable[[ir.Value], list[ir.Value]],
        scalar_at: Callable[[ir.Value, int], ir.Value],
    ) -> list[ir.Value]:
        """Returns start[r, v] + the sum over low <= n < high of scalar_at(n, r) * vectors_at(n)[v]."""
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
        """Returns the mask if `there`, else an empty one."""
        return arith.select(there, mask, mask_of(self.lanes, index(0)))


def below(value: ir.Value, limit: ir.Value) -> ir.Value:
    """Whether value < limit."""
    return arith.cmpi(arith.CmpIPredicate.ult, value, limit)


def pairs_at(memory: ir.Value, first: ir.Value, count: int, end: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """Returns the rows of `count` pairs from `first` on, and whether each exists. Pairs past `end` repeat the last one."""
    last, numbers = arith.subi(end, index(1)), [arith.addi(first, index(r)) for r in range(count)]
    return [load_index(memory, arith.minui(n, last)) for n in numbers], [below(n, end) for n in numbers]


def fetch(memory: ir.Value, rows: Sequence[ir.Value], columns: ir.Value) -> None:
    """Prefetches rows that are read soon."""
    line = 64 // byte_width(ir.MemRefType(memory.type).element_type)
    with loop(index(0), columns, index(line)) as lines:
        for row in rows:
            memref.prefetch(memory, [row, lines.induction_variable], False, 2, True)
