"""Finds the begin and end of the entries of a bag, by offsets or by the common length of all bags."""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf

from gossamer.dialects.bags import Field
from gossamer.passes.bags.table_lines import Line, chosen, only_if, signed_index
from gossamer.passes.loops.vectors import index


@dataclass(frozen=True)
class Bags:
    """The bags of a table. Wrong ones are reported in `wrong`."""

    line: Line
    integers: ir.Type
    wrong: ir.Value

    @property
    def count(self) -> ir.Value:
        """Number of bags."""
        return self.line.number(Field.BAGS)

    @property
    def entries(self) -> ir.Value:
        """Number of indices of all bags."""
        return self.line.number(Field.ENTRIES)

    @property
    def indices(self) -> ir.Value:
        """The indices of all bags."""
        return self.line.memory(Field.INDICES, self.integers, self.entries)

    def begin(self, bag: ir.Value) -> ir.Value:
        """Returns the place where a bag begins, unchecked. For the bag after the last one, it is the end of all entries."""
        line = self.line
        kind = ir.IndexType.get()
        with chosen(line.there(Field.OFFSETS), [kind]) as (by_offsets, written, even):
            with ir.InsertionPoint(even):
                scf.YieldOp([arith.muli(bag, line.number(Field.LENGTH))])
            with ir.InsertionPoint(written):
                ends = line.number(Field.ENDS)
                inside = arith.cmpi(arith.CmpIPredicate.ult, bag, ends)
                with chosen(inside, [kind]) as (known, there, beyond):
                    with ir.InsertionPoint(there):
                        scf.YieldOp([signed_index(line.memory(Field.OFFSETS, self.integers, ends), bag)])
                    with ir.InsertionPoint(beyond):
                        scf.YieldOp([self.entries])
                scf.YieldOp([known.results[0]])
        return by_offsets.results[0]

    def ends(self, bag: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the begin and end of the entries of a bag. Reports wrong offsets, and then returns an empty range."""
        begin, end = self.begin(bag), self.begin(arith.addi(bag, index(1)))
        ordered = arith.andi(
            arith.cmpi(arith.CmpIPredicate.ule, begin, end), arith.cmpi(arith.CmpIPredicate.ule, end, self.entries)
        )
        first = arith.cmpi(arith.CmpIPredicate.eq, bag, index(0))
        at_zero = arith.cmpi(arith.CmpIPredicate.eq, begin, index(0))
        right = arith.andi(ordered, arith.ori(at_zero, arith.xori(first, _true())))
        with only_if(arith.xori(right, _true())):
            self.report(arith.subi(index(-1), bag))
        return tuple(arith.select(right, each, index(0)) for each in (begin, end))

    def report(self, problem: ir.Value) -> None:
        """Stores a problem for the table."""
        memref.store(arith.index_cast(ir.IntegerType.get_signless(64), problem), self.wrong, [self.line.table])


def _true() -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(1), 1)
