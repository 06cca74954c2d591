"""lower-mapped-rows: lowers ops on matrices with a bit map to loops that expand vectors of values, or compress to them.

before   %d = "kernel.spread_mapped"(%positions, %map, %values) : (..., tensor<?x?xi16>, tensor<?xf32>) -> tensor<?x?xf32>
after    scf.parallel (%part) = ...                                  // rows of the part
           for each row r, for each 16 columns c of it
             bits = map[r, c / 16]
             d[r, c..] = expand(bits, values[p..])                   // bypasses the caches if the matrix does not fit them
             p += popcount(bits)

         kernel.put_mapped         stores only the lanes that have a bit, and prefetches later lines
         kernel.collect_mapped     v[p..] = compress(bits, d[r, c..]), and counts nonzeros without a bit

Memory is read and written in order, at the speed of a copy. A load and a store for each entry would take up to twice as long.
This is for AVX-512: a word of a map has a bit for each lane. Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import byte_width, index, parallel, vector_of, zeros
from gossamer.passes.sparse_rows.mapped_rows import LINE, Line, MappedRows

_LARGE = 4 << 20  # bytes from which a matrix bypasses the caches when it is written


@dataclass(frozen=True)
class LowerMappedRows:
    """Lowers ops on matrices with a bit map to loops over rows and vectors."""

    def run(self, module: ir.Module) -> None:
        for name in ("spread", "collect", "put"):
            for op in walk(module, f"kernel.{name}_mapped"):
                with op.location:
                    _Mapped(op).lower(name)


class _Mapped:
    def __init__(self, op: ir.Operation) -> None:
        self.op, self.storage = op, storage_of(op)
        positions, map, last = (buffer_of(operand) for operand in op.operands)
        first, *self.others = self.storage.outputs
        self.dense, self.values = (first, last) if ir.MemRefType(last.type).rank == 1 else (last, first)
        self.rows = MappedRows(positions, map, self.dense)

    def lower(self, name: str) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            rows, columns = (memref.dim(self.dense, index(n)) for n in (0, 1))
            parts = parts_of(rows, columns, self.storage.threads)
            for each in self.others:
                parts = arith.minui(parts, memref.dim(each, index(0)))
            with parallel(parts) as part:
                rows_of_part = ends_of(rows, part, parts)
                if name == "collect":
                    (found,) = self.rows.walk(rows_of_part, self._collect, [arith.constant(_count(), 0)])
                    memref.store(found, self.others[0], [part])
                elif name == "put":
                    self.rows.walk(rows_of_part, self._put)
                else:
                    size = arith.muli(arith.muli(rows, columns), index(byte_width(self.rows.vec.element_type)))
                    choice = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, size, index(_LARGE)), has_else=True)
                    steps: list[tuple[Callable[[Line], list[ir.Value]], ir.Block]] = [
                        (self._stream, choice.then_block),
                        (self._spread, choice.else_block),
                    ]
                    for step, block in steps:
                        with ir.InsertionPoint(block):
                            self.rows.walk(rows_of_part, step)
                            scf.YieldOp([])
        self.storage.erase()

    def _expanded(self, line: Line) -> ir.Value:
        return self.rows.expanded(line, self.values, [line.place])

    def _spread(self, line: Line) -> list[ir.Value]:
        vector.store(self._expanded(line), self.dense, [line.row, line.column])
        return []

    def _stream(self, line: Line) -> list[ir.Value]:
        vector.store(self._expanded(line), self.dense, [line.row, line.column], nontemporal=True, alignment=LINE)
        return []

    def _put(self, line: Line) -> list[ir.Value]:
        self.rows.fetch(line, to_write=True)
        vector.maskedstore(self.dense, [line.row, line.column], line.mask, self._expanded(line))
        return []

    def _collect(self, line: Line) -> list[ir.Value]:
        self.rows.fetch(line, to_write=False)
        given = self.rows.compress(line, self.values, [line.place])
        nonzero = arith.cmpf(arith.CmpFPredicate.UNE, given, zeros(self.rows.vec))
        found = vector.extract(vector.bitcast(vector_of(1, line.bits.type), nonzero), [], [0])
        every = arith.constant(line.bits.type, -1)
        beside = math.ctpop(arith.andi(found, arith.xori(line.bits, every)))
        return [arith.addi(line.carried[0], arith.extui(_count(), beside))]


def _count() -> ir.Type:
    return ir.IntegerType.get_signless(64)
