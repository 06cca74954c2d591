"""lower-sample-tokens: a `kernel.sample_tokens` becomes a walk over the rows of a matrix, with a row of x in registers.

before   %v = "kernel.sample_tokens"(%positions, %coordinates, %x, %y) : (..., tensor<?x?x128xf32>, ...) -> tensor<?xf32>
after    scf.parallel (%part) = ...                                  // entries of the part
           for each tile i of tokens, for each row r of the part
             the 8 vectors of x[i, r]                                 // 128 tokens
             for each 16 entries (r, c) of the row
               16 sums += x[i, r] * y[i, c]                           // 8 multiply-adds that read y, for each
               the 16 vectors of sums, added up across lanes together, to 16 values

What is left of a row goes in fours, the last of which repeats its last entry. Runs on functions whose storage is exposed
(expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, first_row, parts_of
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    mask_of,
    parallel,
    sums_across,
    vector_of,
    zeros,
)

_REST = 4  # a power of two: entries at once where a row has fewer than lanes left


@dataclass(frozen=True)
class LowerSampleTokens:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "lower-sample-tokens"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample_tokens"):
            with op.location:
                _Sample(op, self.bits).lower()


class _Sample:
    def __init__(self, op: ir.Operation, bits: int) -> None:
        self.op, self.storage = op, storage_of(op)
        self.positions, self.coordinates, self.x, self.y = (buffer_of(operand) for operand in op.operands)
        packed = ir.MemRefType(self.x.type)
        self.lanes = bits // 8 // byte_width(packed.element_type)
        self.vec, self.vectors = vector_of(self.lanes, packed.element_type), packed.shape[2] // self.lanes

    def lower(self) -> None:
        """Put loops in place of the op."""
        with ir.InsertionPoint(self.op):
            rows = arith.subi(memref.dim(self.positions, index(0)), index(1))
            entries, tiles = memref.dim(self.storage.output, index(0)), memref.dim(self.x, index(0))
            parts = parts_of(entries, arith.muli(tiles, index(self.vectors)), self.storage.threads)
            with parallel(parts) as part:
                begin, end = ends_of(entries, part, parts)
                # The row before the first one that begins in the part may reach into it.
                low = first_row(self.positions, rows, begin, rows_count=False)
                low = arith.subi(low, arith.minui(low, index(1)))
                high = first_row(self.positions, rows, end, rows_count=False)
                with loop(index(0), tiles, index(1)) as each_tile, loop(low, high, index(1)) as each_row:
                    self._row(each_tile.induction_variable, each_row.induction_variable, begin, end)
        self.storage.erase()

    def _row(self, tile: ir.Value, row: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Adds a tile to the entries of a row in [begin, end)."""
        begin = arith.maxui(load_index(self.positions, row), begin)
        end = arith.minui(load_index(self.positions, arith.addi(row, index(1))), end)
        count = arith.maxsi(arith.subi(end, begin), index(0))
        whole = arith.addi(begin, arith.subi(count, arith.remui(count, index(self.lanes))))
        held = [vector.load(self.vec, self.x, [tile, row, index(v * self.lanes)]) for v in range(self.vectors)]
        with loop(begin, whole, index(self.lanes)) as groups:
            first = groups.induction_variable
            places = [arith.addi(first, index(n)) for n in range(self.lanes)]
            total = self._totals(tile, held, places)
            vector.store(self._with_earlier(total, tile, first), self.storage.output, [first])
        last = arith.subi(end, index(1))
        with loop(whole, end, index(_REST)) as groups:
            first = groups.induction_variable
            places = [arith.minui(arith.addi(first, index(n)), last) for n in range(_REST)]
            mask = mask_of(_REST, arith.subi(end, first))
            total = self._with_earlier(self._totals(tile, held, places), tile, first, mask)
            vector.maskedstore(self.storage.output, [first], mask, total)

    def _totals(self, tile: ir.Value, held: Sequence[ir.Value], entries: Sequence[ir.Value]) -> ir.Value:
        """The sums over a tile for some entries of the row that is held."""
        columns = [load_index(self.coordinates, entry) for entry in entries]
        sums = [zeros(self.vec)] * len(columns)
        for v, x in enumerate(held):
            for n, column in enumerate(columns):
                y = vector.load(self.vec, self.y, [tile, column, index(v * self.lanes)])
                sums[n] = vector.fma(x, y, sums[n])
        return sums_across(sums)

    def _with_earlier(self, total: ir.Value, tile: ir.Value, first: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """What earlier tiles have given for these entries, and this one."""
        type_ = ir.VectorType(total.type)
        if mask is None:
            earlier = vector.load(type_, self.storage.output, [first])
        else:
            earlier = vector.maskedload(type_, self.storage.output, [first], mask, zeros(type_))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, tile, index(0))
        return arith.addf(total, arith.select(is_first, zeros(type_), earlier))
