"""lower-block: a `kernel.spmm` of the schedule "block" becomes loops in which the rows of a small block share the loads of x.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "block", tile = [64, 1024], ...}
             : (..., tensor<3072x768xf32, "blocks(reduction=1, rows=4, columns=4, width=768)">) -> ...
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_tile64(...)               // or _tile32, _tile16 for what is left of the tokens
         func.func private @region_tile64(...)
           pack:    the tile of x, transposed, into the workspace as [K][64]
           for each 1024 rows, each panel of 768 columns, each group of 4 rows:
             scf.for %p ... iter_args(4 rows x 4 vectors)   // the group's blocks in the panel, see block_rows.py
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

Large blocks are stored cut into small ones. Runs on functions whose storage is exposed (expose-storage). Nothing is read or
written past the end of a tensor: blocks are filled up with zeros, tokens past the last one repeat it and are not stored.
"""

from dataclasses import dataclass
from math import inf, lcm
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Blocks, Packing
from gossamer.passes.block_rows import BlockRows
from gossamer.passes.encodings import storage_of_type
from gossamer.passes.family import Family, Matrix
from gossamer.passes.product import products
from gossamer.passes.token_tile import Product, TokenTile, lower_by_tiles, tile_bytes
from gossamer.passes.vectors import index, loop, reserve_workspace, zeros

_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_MULTIPLY, _LOAD, _START, _ELEMENT = 0.73, 0.3, 6.3, 0.31  # cycles, see _cycles
_TALLEST, _WIDEST = 6, 4  # rows and columns of a stored block
_PANEL = {1: 48 << 10, 2: 64 << 10}  # bytes of a panel of x by rows of a block: one or two rows want it from the first-level
_WIDE_PANEL = 192 << 10  # cache, with more of them to share a load the second-level cache is as good


def _vectors(matrix: Matrix) -> int:
    """Vectors of tokens in a tile: AVX2 has 16 registers, other targets have 32."""
    return 2 if matrix.bits == 256 else 4


def _storage(matrix: Matrix) -> Blocks | None:
    if matrix.block is None:
        return None
    rows, columns = (_divisor(size, most) for size, most in zip(matrix.block, (_TALLEST, _WIDEST), strict=True))
    return Blocks(matrix.reduction, rows, columns, _panel_width(matrix, rows, columns))


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` up to `most`."""
    return max(n for n in range(1, most + 1) if size % n == 0)


def _panel_width(matrix: Matrix, rows: int, columns: int) -> int:
    """Columns of a panel of x: K in equal parts of whole blocks."""
    a_column = _vectors(matrix) * matrix.bits // 8
    panels = -(-matrix.columns * a_column // _PANEL.get(rows, _WIDE_PANEL))
    return min(-(-matrix.columns // (panels * columns)), (1 << 16) // columns) * columns


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight]"""
    return (_vectors(matrix) * matrix.lanes, _ROWS) if isinstance(stored, Blocks) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: nnz / fill stored values of v (0.73 + 0.3 / R) each, a multiply-add and its share of a
    load of x, with R rows in a stored block; 6.3 M / R panels for starts and ends; 0.31 (K + M) v L for the transposes."""
    stored = _storage(matrix)
    if stored is None:
        return inf
    rows, columns, lanes, widest = matrix.rows, matrix.columns, matrix.lanes, _vectors(matrix)
    panels = -(-columns // stored.width)
    value = matrix.nonzeros / matrix.fill * (_MULTIPLY + _LOAD / stored.rows)
    starts = _START * rows / stored.rows * panels
    full, left = divmod(tokens, widest * lanes)
    tiles = [widest] * full + ([min(v for v in (1, 2, 4) if left <= v * lanes)] if left else [])
    return sum(value * v + starts + _ELEMENT * (columns + rows) * v * lanes for v in tiles)


BLOCK = Family("block", "lower-block", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerBlock:
    """Lower products with small blocks to scf and vector."""

    name: ClassVar[str] = "lower-block"

    def run(self, module: ir.Module) -> None:
        for op in products(module, BLOCK.name):
            blocks = _Blocks(op)
            reserve_workspace(module, blocks.workspace)
            lower_by_tiles(blocks, blocks.tokens, blocks.workspace, blocks.emit)


class _Blocks(Product):
    """A product in units of rows that are both whole groups of block rows and whole vectors.

    heights  rows of a block
    padded   K, filled up to whole panels and vectors
    slots    rows whose sums are kept at a time
    """

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        stored = storage_of_type(ir.RankedTensorType(op.w.type))
        if not isinstance(stored, Blocks):
            raise CompileError(f"a weight stored as {stored} is not stored in blocks")
        tile = integers(op.tile)
        if len(tile) != 2 or tile[0] % self.lanes:
            raise CompileError(f"tile {tile} is not [tokens, rows] with tokens a multiple of {self.lanes} lanes")
        self.stored, (self.tokens, rows) = stored, tile
        self.unit = lcm(self.lanes, stored.rows)
        self.groups = -(-self.M // self.unit)
        self.panels = -(-self.K // stored.width)
        self.padded = -(-max(self.K, -(-self.K // stored.columns) * stored.columns) // self.lanes) * self.lanes
        self.slots = min(max(1, rows // self.unit), self.groups if self.panels > 1 else 1) * self.unit
        self.workspace = tile_bytes(self, self.tokens, self.padded + self.slots)

    def emit(self, tile: TokenTile) -> None:
        """The body of a function for one tile."""
        packed, sums = tile.scratch(self.padded, self.slots)
        tile.pack(packed, self.padded)
        rows = BlockRows(self.stored, -(-self.M // self.stored.rows), *tile.operands.weight, packed, tile.vec, tile.vectors)
        low, high, step = tile.operands.low, tile.operands.high, index(self.slots // self.unit)
        with loop(low, high, step) as chunks:
            start = chunks.induction_variable
            end = arith.minui(arith.addi(start, step), high)
            origin = arith.muli(start, index(self.unit))
            with loop(index(0), index(self.panels), index(1)) as panels, loop(start, end, index(1)) as units:
                unit = arith.muli(units.induction_variable, index(self.unit))
                self._unit(tile, rows, sums, panels.induction_variable, unit, arith.subi(unit, origin))

    def _unit(self, tile: TokenTile, rows: BlockRows, sums: ir.Value, panel: ir.Value, unit: ir.Value, slot: ir.Value) -> None:
        """One panel of a unit of rows, whose sums lie from `slot` on; after the last panel they are stored."""
        height = self.stored.rows
        last = arith.cmpi(arith.CmpIPredicate.eq, panel, index(self.panels - 1))
        first_group = arith.divui(unit, index(height))
        last_group = arith.minui(arith.addi(first_group, index(self.unit // height)), index(rows.groups))
        with loop(first_group, last_group, index(1)) as groups:
            group = groups.induction_variable
            at = arith.addi(slot, arith.muli(arith.subi(group, first_group), index(height)))
            totals = rows.add(panel, group, self._start(tile, sums, panel, at))
            totals = self._finished(tile, totals, arith.muli(group, index(height)), last)
            for i, total in enumerate(totals):
                r, v = divmod(i, tile.vectors)
                vector.store(total, sums, [arith.addi(at, index(r)), tile.at(v)])
        finished = scf.IfOp(last)
        with ir.InsertionPoint(finished.then_block):
            for offset in range(0, self.unit, self.lanes):
                tile.unpack(sums, arith.addi(slot, index(offset)), arith.addi(unit, index(offset)))
            scf.YieldOp([])

    def _start(self, tile: TokenTile, sums: ir.Value, panel: ir.Value, at: ir.Value) -> list[ir.Value]:
        """The sums of a group of rows before a panel."""
        count = self.stored.rows * tile.vectors
        if self.panels == 1:
            return [zeros(tile.vec)] * count
        start = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, panel, index(0)), [tile.vec] * count, has_else=True)
        with ir.InsertionPoint(start.then_block):
            scf.YieldOp([zeros(tile.vec)] * count)
        with ir.InsertionPoint(start.else_block):
            places = (divmod(i, tile.vectors) for i in range(count))
            scf.YieldOp([vector.load(tile.vec, sums, [arith.addi(at, index(r)), tile.at(v)]) for r, v in places])
        return list(start.results)

    def _finished(self, tile: TokenTile, totals: list[ir.Value], row: ir.Value, last: ir.Value) -> list[ir.Value]:
        """The sums after a panel: after the last one, through the part of the epilogue that comes before the transpose."""
        if self.epilogue.trivial:
            return totals
        finish = scf.IfOp(last, [tile.vec] * len(totals), has_else=True)
        with ir.InsertionPoint(finish.then_block):
            through: list[ir.Value] = []
            for r in range(self.stored.rows):
                m = arith.minui(arith.addi(row, index(r)), index(self.M - 1))
                through += tile.before(totals[r * tile.vectors : (r + 1) * tile.vectors], m)
            scf.YieldOp(through)
        with ir.InsertionPoint(finish.else_block):
            scf.YieldOp(totals)
        return list(finish.results)
