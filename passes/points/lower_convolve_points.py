"""lower-convolve-points: lowers a `kernel.convolve_points` to one loop over tiles of outputs and their pairs.

before   %y = "kernel.convolve_points"(%x, %weight, %bias, %inputs, %outputs, %rows, %positions)
after    scf.parallel (%tile) = ...                                 // 256 outputs, which no other thread writes to
           y[row] = bias for each of its rows
           for each offset k
             func.call @region_columns4(...)                        // or _columns3 ... 1
         func.func private @region_columns4(...)
           for each 4 vectors of columns, for each 6 of the pairs of offset k that lead to the tile
             for each c: sums[r][v] += x[input r, c] * weight[k, c, columns v]
             the sums into y[output r]

No intermediate result is stored in memory. Pairs past the last one repeat it.
Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.dialects.points import TILE
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import call_narrowest, index, load_index, loop, parallel
from gossamer.passes.points.pair_tile import PairTile, fetch, pairs_at


@dataclass(frozen=True)
class LowerConvolvePoints:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve_points"):
            with op.location:
                _Convolve(op.opview, self.bits).lower()


class _Convolve:
    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        x, weight, bias, inputs, outputs, rows, positions = (buffer_of(each) for each in op.operation.operands)
        self.bias, self.rows, self.positions = bias, rows, positions
        self.given = [x, weight, inputs, outputs, self.storage.output]
        self.tile = PairTile(ir.MemRefType(x.type).element_type, bits)

    def lower(self) -> None:
        tile, y = self.tile, self.storage.output
        types = [*(each.type for each in self.given), *[ir.IndexType.get()] * 3]
        parent = self.op.operation.parent.opview
        functions = {count: tile.function(parent, count, types, self._add_pairs) for count in range(tile.vectors, 0, -1)}
        with ir.InsertionPoint(self.op):
            width = tile.width(memref.dim(y, index(1)))
            tiles = arith.subi(memref.dim(self.positions, index(1)), index(1))
            with parallel(tiles) as number:
                self._begin(number)
                with loop(index(0), memref.dim(self.positions, index(0)), index(1)) as offsets:
                    k = offsets.induction_variable
                    ends = [load_index(self.positions, k, at) for at in (number, arith.addi(number, index(1)))]
                    call_narrowest(width, functions, [*self.given, k, *ends])
        self.storage.erase()

    def _begin(self, number: ir.Value) -> None:
        """Stores the bias in all rows of a tile."""
        tile, y, first = self.tile, self.storage.output, arith.muli(number, index(TILE))
        columns = memref.dim(y, index(1))
        end = arith.minui(arith.addi(first, index(TILE)), memref.dim(self.rows, index(0)))
        with loop(index(0), columns, index(tile.lanes)) as steps:
            [(at, mask)] = tile.columns(steps.induction_variable, columns, 1)
            value = tile.load(self.bias, [at], mask)
            with loop(first, end, index(1)) as each:
                vector.maskedstore(y, [load_index(self.rows, each.induction_variable), at], mask, value)

    def _add_pairs(self, count: int, *arguments: ir.Value) -> None:
        """Adds the products of pairs [begin, end) of offset k, for `count` vectors of columns at a time."""
        x, weight, inputs, outputs, y, k, begin, end = arguments
        tile, together = self.tile, self.tile.rows(count)
        reduced, columns = memref.dim(x, index(1)), memref.dim(y, index(1))
        with loop(index(0), columns, index(count * tile.lanes)) as across:
            places = tile.columns(across.induction_variable, columns, count)
            with loop(begin, end, index(together)) as groups:
                first = groups.induction_variable
                sources, there = pairs_at(inputs, first, together, end)
                targets, _ = pairs_at(outputs, first, together, end)
                fetch(x, pairs_at(inputs, arith.addi(first, index(together)), together, end)[0], reduced)
                masks = [(r, at, tile.only(there[r], mask)) for r in range(together) for at, mask in places]
                sums = tile.sums(
                    index(0),
                    reduced,
                    [tile.load(y, [targets[r], at], mask) for r, at, mask in masks],
                    lambda c: [tile.load(weight, [k, c, at], mask) for at, mask in places],
                    lambda c, r: memref.load(x, [sources[r], c]),
                )
                for (r, at, mask), value in zip(masks, sums, strict=True):
                    vector.maskedstore(y, [targets[r], at], mask, value)
