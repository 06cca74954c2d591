"""The frame around the inner loops of products whose weight is stored in groups of rows that share loads of x.

scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
  func.call @region_tile64(...)               // or _tile32, _tile16 for the last tokens
func.func private @region_tile64(...)
  pack:    the tile of x, transposed, into the workspace as [K][64]
  for each 1024 rows, each panel of columns, each group of rows:
    the group's sums in registers             // `Adds` adds the products of its nonzeros in the panel
  unpack:  16 rows of sums at a time, transposed, through the epilogue into y

Some inner loops can work with the x of one panel (`by_panel`). With these, and a weight of at most 1024 rows, each panel is
packed to the same place just before it is read. So x comes from the first-level cache, and does not evict sums from the
second-level one.
In a C probe on Emerald Rapids, packing x for 768x3072 and 128 tokens took 72 us instead of 121.
"""

from math import lcm
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.passes.framework.chain_product import Adds, Inner
from gossamer.passes.loops.product import Product, lanes_of
from gossamer.passes.loops.vectors import index, loop, reserve_workspace, zeros
from gossamer.passes.weights.token_tile import TokenTile, lower_by_tiles, tile_bytes


def tokens_and_rows(op: Any) -> tuple[int, int]:
    """Returns the tile of an op, [tokens, rows]. CompileError if it has other numbers."""
    tile, lanes = integers(op.tile), lanes_of(op)
    if len(tile) != 2 or tile[0] % lanes:
        raise CompileError(f"tile {tile} is not [tokens, rows] with tokens a multiple of {lanes} lanes")
    return tile[0], tile[1]


class Panel:
    """The number of a panel of columns, and whether it is the last of `count`."""

    def __init__(self, number: ir.Value, count: int) -> None:
        self.number, self.last = number, arith.cmpi(arith.CmpIPredicate.eq, number, index(count - 1))


class RowGroups(Product):
    """A product whose weight is stored in groups of `height` rows, in panels of `width` columns, `columns` at a time.

    unit     rows that threads share out at least: a multiple of `height`, of the lanes, and of `band`. A band has the rows from
             which its groups take theirs.
    groups   number of units
    number   number of groups
    slots    rows whose sums are kept at a time, at most those of the tile (tokens, rows)
    alone    whether x is packed panel by panel, each in the place of the previous one
    padded   columns of x that are packed at a time: a panel, or K rounded up to whole blocks and vectors
    """

    half = False
    """Whether there is also a function for half a vector of tokens."""

    moves = True
    """Whether the last vector of tokens may be moved back (see `TokenTile`)."""

    by_panel = False
    """Whether the inner loops can work with an x that has only the columns of one panel."""

    def __init__(self, op: Any, tile: tuple[int, int], height: int, width: int, columns: int, band: int = 1) -> None:
        super().__init__(op)
        self.height, (self.tokens, rows) = height, tile
        self.unit = lcm(self.lanes, height, band)
        self.groups, self.number = -(-self.M // self.unit), -(-self.M // height)
        self.panels = -(-self.K // width)
        self.slots = min(max(1, rows // self.unit), self.groups if self.panels > 1 or band > 1 else 1) * self.unit
        self.alone = self.by_panel and width % self.lanes == 0 and self.panels > 1 and self.slots >= self.M
        self.padded = width if self.alone else -(-self.K // lcm(columns, self.lanes)) * lcm(columns, self.lanes)

    def lower(self, module: ir.Module, inner: Inner[Adds]) -> None:
        """Replaces the op by loops. `inner` makes the inner loops."""
        reserve_workspace(module, self.workspace)
        lower_by_tiles(self, self.tokens, self.workspace, lambda tile: self._emit(tile, inner), self.half, self.moves)

    @property
    def workspace(self) -> int:
        """Bytes that a thread needs."""
        return tile_bytes(self, self.tokens, self.padded + self.slots)

    def packed(self, tile: TokenTile) -> tuple[ir.Value, ir.Value]:
        """Returns the memory for the packed x of a tile, and that for its sums. Packs x unless it is packed by panels."""
        packed, sums = tile.scratch(self.padded, self.slots)
        if not self.alone:
            tile.pack(packed, self.padded)
        return packed, sums

    def _emit(self, tile: TokenTile, inner: Inner[Adds]) -> None:
        packed, sums = self.packed(tile)
        rows = inner(tile.operands.weight, packed, tile.vec, tile.vectors)
        low, high, step = tile.operands.low, tile.operands.high, index(self.slots // self.unit)
        with loop(low, high, step) as chunks:
            start = chunks.induction_variable
            end = arith.minui(arith.addi(start, step), high)
            with loop(index(0), index(self.panels), index(1)) as panels:
                panel = Panel(panels.induction_variable, self.panels)
                if self.alone:
                    tile.pack(packed, self.padded, arith.muli(panel.number, index(self.padded)))
                self.units(tile, rows, sums, panel, start, end)

    def units(self, tile: TokenTile, loops: Any, sums: ir.Value, panel: Panel, start: ir.Value, end: ir.Value) -> None:
        """Emits a panel of the units [start, end), whose sums lie in `sums`. After the last panel the results are stored."""
        origin = arith.muli(start, index(self.unit))
        with loop(start, end, index(1)) as units:
            unit = arith.muli(units.induction_variable, index(self.unit))
            self._unit(tile, loops, sums, panel, unit, arith.subi(unit, origin))

    def _unit(self, tile: TokenTile, loops: Adds, sums: ir.Value, panel: Panel, unit: ir.Value, slot: ir.Value) -> None:
        """Emits a panel of one unit of rows, whose sums lie from `slot` on."""
        first_group = arith.divui(unit, index(self.height))
        last_group = arith.minui(arith.addi(first_group, index(self.unit // self.height)), index(self.number))
        with loop(first_group, last_group, index(1)) as groups:
            group = groups.induction_variable
            at = arith.addi(slot, arith.muli(arith.subi(group, first_group), index(self.height)))
            row = arith.muli(group, index(self.height))
            rows, slots = ([arith.addi(first, index(r)) for r in range(self.height)] for first in (row, at))
            self.group(tile, loops, sums, panel, group, rows, slots)
        finished = scf.IfOp(panel.last)
        with ir.InsertionPoint(finished.then_block):
            tile.unpack(sums, slot, unit, self.unit)
            scf.YieldOp([])

    def group(
        self, tile: TokenTile, loops: Adds, sums: ir.Value, panel: Panel, group: ir.Value, rows: list[ir.Value],
        slots: list[ir.Value],
    ) -> None:  # fmt: skip
        """Emits a panel of a group of these rows, whose sums lie in these slots."""
        totals = loops.add(panel.number, group, self._start(tile, sums, panel.number, slots))
        totals = self._finished(tile, totals, rows, panel.last)
        for i, total in enumerate(totals):
            r, v = divmod(i, tile.vectors)
            vector.store(total, sums, [slots[r], tile.at(v)])

    def _start(self, tile: TokenTile, sums: ir.Value, panel: ir.Value, slots: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums of a group of rows before a panel: zeros before the first one."""
        count = self.height * tile.vectors
        if self.panels == 1:
            return [zeros(tile.vec)] * count
        start = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, panel, index(0)), [tile.vec] * count, has_else=True)
        with ir.InsertionPoint(start.then_block):
            scf.YieldOp([zeros(tile.vec)] * count)
        with ir.InsertionPoint(start.else_block):
            places = (divmod(i, tile.vectors) for i in range(count))
            scf.YieldOp([vector.load(tile.vec, sums, [slots[r], tile.at(v)]) for r, v in places])
        return list(start.results)

    def _finished(self, tile: TokenTile, totals: list[ir.Value], rows: list[ir.Value], last: ir.Value) -> list[ir.Value]:
        """Returns the sums after a panel. The last one applies the part of the epilogue that comes before the transpose."""
        if self.epilogue.trivial:
            return totals
        finish = scf.IfOp(last, [tile.vec] * len(totals), has_else=True)
        with ir.InsertionPoint(finish.then_block):
            through: list[ir.Value] = []
            for r, row in enumerate(rows):
                m = arith.minui(row, index(self.M - 1))
                through += tile.before(totals[r * tile.vectors : (r + 1) * tile.vectors], m)
            scf.YieldOp(through)
        with ir.InsertionPoint(finish.else_block):
            scf.YieldOp(totals)
        return list(finish.results)
