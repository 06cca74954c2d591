"""lower-convolve-points-grad: lowers a `kernel.convolve_points_grad` to loops over the pairs of every offset on each thread.

before   %w = "kernel.convolve_points_grad"(%x, %gradient, %inputs, %outputs, %positions)
after    scf.parallel (%part) = ...                                 // an equal share of the rows of every w[k]
           for each tile of outputs, for each offset k, for each 64 of the pairs that lead there
             func.call @region_columns4(...)                        // or _columns3 ... 1
         func.func private @region_columns4(...)
           for each 4 vectors of columns, for each 6 rows c of the part
             for each pair: sums[r][v] += x[input, c + r] * gradient[output, columns v]
             the sums into w[k, c + r]

The rows of a tile stay in the second-level cache for all offsets. The order of sums does not depend on the number of threads.
Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of
from gossamer.passes.loops.vectors import call_narrowest, index, load_index, loop, parallel, zeros
from gossamer.passes.points.pair_tile import PairTile, below

_TOGETHER = 64  # most pairs of one call


@dataclass(frozen=True)
class LowerConvolvePointsGrad:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve_points_grad"):
            with op.location:
                _Gradient(op.opview, self.bits).lower()


class _Gradient:
    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        x, gradient, inputs, outputs, self.positions = (buffer_of(each) for each in op.operation.operands)
        self.given = [x, gradient, inputs, outputs, self.storage.output]
        self.tile = PairTile(ir.MemRefType(x.type).element_type, bits)

    def lower(self) -> None:
        tile, (x, gradient, *_, w) = self.tile, self.given
        types = [*(each.type for each in self.given), *[ir.IndexType.get()] * 5]
        parent = self.op.operation.parent.opview
        functions = {count: tile.function(parent, count, types, self._add_pairs) for count in range(tile.vectors, 0, -1)}
        with ir.InsertionPoint(self.op):
            width = tile.width(memref.dim(gradient, index(1)))
            tiles, threads = arith.subi(memref.dim(self.positions, index(1)), index(1)), self.storage.threads
            with parallel(threads) as part:
                rows = ends_of(memref.dim(x, index(1)), part, threads)
                offsets = memref.dim(self.positions, index(0))
                with loop(index(0), offsets, index(1)) as each:
                    self._clear(w, each.induction_variable, rows)
                with loop(index(0), tiles, index(1)) as numbers, loop(index(0), offsets, index(1)) as each:
                    number, k = numbers.induction_variable, each.induction_variable
                    begin, end = (load_index(self.positions, k, at) for at in (number, arith.addi(number, index(1))))
                    with loop(begin, end, index(_TOGETHER)) as groups:
                        first = groups.induction_variable
                        stop = arith.minui(arith.addi(first, index(_TOGETHER)), end)
                        call_narrowest(width, functions, [*self.given, k, *rows, first, stop])
        self.storage.erase()

    def _clear(self, w: ir.Value, k: ir.Value, rows: tuple[ir.Value, ir.Value]) -> None:
        """Stores zeros in rows of w[k]."""
        columns = memref.dim(w, index(2))
        with loop(*rows, index(1)) as each, loop(index(0), columns, index(self.tile.lanes)) as steps:
            [(at, mask)] = self.tile.columns(steps.induction_variable, columns, 1)
            vector.maskedstore(w, [k, each.induction_variable, at], mask, zeros(self.tile.vec))

    def _add_pairs(self, count: int, *arguments: ir.Value) -> None:
        """Adds the products of pairs [begin, end) to rows [low, high) of w[k], for `count` vectors of columns at a time."""
        x, gradient, inputs, outputs, w, k, low, high, begin, end = arguments
        tile, together = self.tile, self.tile.rows(count)
        columns, last = memref.dim(gradient, index(1)), arith.subi(high, index(1))
        with loop(index(0), columns, index(count * tile.lanes)) as across:
            places = tile.columns(across.induction_variable, columns, count)
            with loop(low, high, index(together)) as groups:
                numbers = [arith.addi(groups.induction_variable, index(r)) for r in range(together)]
                rows = [arith.minui(n, last) for n in numbers]
                masks = [(r, at, tile.only(below(numbers[r], high), mask)) for r in range(together) for at, mask in places]

                def vectors_at(p: ir.Value, places: list[tuple[ir.Value, ir.Value]] = places) -> list[ir.Value]:
                    row = load_index(outputs, p)
                    return [tile.load(gradient, [row, at], mask) for at, mask in places]

                def scalar_at(p: ir.Value, r: int, rows: list[ir.Value] = rows) -> ir.Value:
                    return memref.load(x, [load_index(inputs, p), rows[r]])

                sums = tile.sums(begin, end, [zeros(tile.vec)] * len(masks), vectors_at, scalar_at)
                for (r, at, mask), value in zip(masks, sums, strict=True):
                    place = [k, rows[r], at]
                    vector.maskedstore(w, place, mask, arith.addf(tile.load(w, place, mask), value))
