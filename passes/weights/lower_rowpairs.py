"""lower-rowpairs: lowers a `kernel.spmm` of the schedule "rowpairs" to loops that take two rows at a time.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "rowpairs", tile = [64, 1024], ...}
             : (..., tensor<3072x768xf32, "rowpairs(reduction=1, width=128)">) -> ...
after    the loops of row_groups.py over tiles of 64 tokens, panels of 128 columns and pairs of rows, and inside
           scf.for %p step 8 iter_args(2 rows x 4 vectors)  // padded_loop.py: four nonzeros of each row
           scf.for %p step 2 iter_args(2 rows x 4 vectors)  // one nonzero of each row, for the last three at most

This is for unstructured nonzeros. The rows of a pair have equally many of them, and so have most consecutive pairs, so the
loops are rarely mispredicted. Eight sums keep two multiply-adds a cycle busy, and a value is loaded once for four vectors.

A row without a nonzero in a panel may multiply zeros by the columns of its partner, so that an infinity in x reaches both.
Runs on functions whose storage is exposed (expose-storage).

Fastest for weights that are half zeros: 1.26 times as fast as "broadcast" at "1000x1333 50% 128 tokens" in
benchmarks/results/intel-xeon-graniterapids/prediction.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf

from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, RowPairs
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.prefetch import elements_a_line
from gossamer.passes.loops.product import lanes_of, products, shape_of, stored_of
from gossamer.passes.loops.vectors import index, load_index, loop
from gossamer.passes.weights.padded_loop import RowsInFours
from gossamer.passes.weights.row_groups import Panel, RowGroups, tokens_and_rows
from gossamer.passes.weights.token_tile import TokenTile

_NONZERO = {1: 0.9, 2: 2.0, 4: 3.6}  # cycles by vectors of tokens, see _cycles
_START, _ELEMENT = 24.0, 0.8  # cycles, see _cycles
_ROWS = 1024  # rows of the weight at once: so few that their sums stay in the second-level cache
_WIDER = ((19.0, 0.75), (9.0, 1.0), (0.0, 2.0))  # (nonzeros of a row in a panel that just fits, factor of its width)
_MOST_LINES, _SECOND_LEVEL = 4, 2  # most lines of x that a pair prefetches, and into which cache (memref.prefetch's locality)


def _storage(matrix: Matrix) -> RowPairs:
    """Returns panels of equal width, so that their x stays in the first-level cache.

    A dense weight needs all of the panel's x there. But each panel loads and stores the sums of a row, so wider panels are
    faster for sparse rows. Panels are whole vectors of columns, because x is packed by vectors.
    """
    fitting = matrix.l1d // (_vectors(matrix) * matrix.bits // 8)
    share = next(share for more, share in _WIDER if fitting * matrix.density >= more)
    panels = -(-matrix.columns // min(int(fitting * share), RowPairs.WIDEST))
    width = -(-matrix.columns // (panels * matrix.lanes)) * matrix.lanes
    return RowPairs(matrix.reduction, min(width, matrix.columns))


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight]."""
    return (_vectors(matrix) * matrix.lanes, _ROWS) if isinstance(stored, RowPairs) else None


def _vectors(matrix: Matrix) -> int:
    """Returns the vectors of tokens in a tile."""
    return registers(matrix.bits) // 8


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. A tile of v vectors of L tokens takes the sum of

    - c(v) for each nonzero,
    - 24 for each pair and panel, to start and end its loops,
    - 0.8 (K + M) v L for the transposes.
    """
    m, k, lanes, widest = matrix.rows, matrix.columns, matrix.lanes, _vectors(matrix)
    panels = -(-k // _storage(matrix).width)
    starts = _START * m / 2 * panels
    full, left = divmod(tokens, widest * lanes)
    tiles = [widest] * full + ([min(v for v in (1, 2, 4) if left <= v * lanes)] if left else [])
    return sum(matrix.nonzeros * _NONZERO[v] + starts + _ELEMENT * (k + m) * v * lanes for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), width = shape_of(op), stored_of(op, RowPairs).width
    pairs = -(-rows // 2)
    inner = partial(PairedRows, groups=pairs, columns=width, lanes=lanes_of(op))
    panels, band = -(-columns // width), RowPairs.band(rows)
    return ChainProduct(integers(op.tile)[0], 2, pairs, panels, None, inner, among=band)


ROWPAIRS = Family("rowpairs", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class PairedRows(RowsInFours):
    """Inner loops for a weight of `groups` pairs of rows in panels of `columns` columns."""

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of a pair's nonzeros in a panel: four of each row at a time, then one of each."""
        (begin, end), origin = self.entries(self._number(panel, group)), self._origin(panel)
        ones = arith.remui(arith.subi(end, begin), index(2 * RowPairs.GROUP))
        middle = arith.subi(end, ones)
        sums = self._fours(begin, middle, origin, sums)
        with loop(middle, end, index(2), sums) as steps:
            totals = list(steps.inner_iter_args)
            for row in range(2):
                at = arith.addi(steps.induction_variable, index(row))
                column = arith.addi(origin, self._scaled(load_index(self.coordinates, at)))
                mine = slice(row * self.vectors, (row + 1) * self.vectors)
                totals[mine] = self._multiplied(self.value(at), column, totals[mine])
            scf.YieldOp(totals)
        return list(steps.results)

    def members(self, panel: ir.Value, group: ir.Value) -> list[ir.Value]:
        """Returns the two rows of a pair in a panel."""
        first = arith.muli(self._number(panel, group), index(2))
        return [load_index(self.order, arith.addi(first, index(row))) for row in range(2)]

    @property
    def order(self) -> ir.Value:
        """The rows of the pairs."""
        return self.weight[2]


class _Pairs(RowGroups):
    """A product in bands of rows, whose pairs have different rows in each panel.

    While one band is multiplied, the results of the previous band are stored: after each vector of rows of the one, all rows of
    some tokens of the other. So the store to each token is several consecutive cache lines.

    While a panel is multiplied, the x of the next one is prefetched, because processors do not predict the jumps between rows.
    """

    by_panel = True

    def units(self, tile: TokenTile, loops: PairedRows, sums: ir.Value, panel: Panel, start: ir.Value, end: ir.Value) -> None:
        """Emits a panel of the bands [start, end). An empty band after them stores the results of the last one."""
        size, origin = index(self.unit), arith.muli(start, index(self.unit))
        last = arith.minui(arith.muli(end, index(self.unit // 2)), index(self.number))
        number = self.unit // self.lanes
        with loop(start, arith.addi(end, index(1)), index(1)) as bands, loop(index(0), index(number), index(1)) as parts:
            band, part = bands.induction_variable, parts.induction_variable
            low = arith.muli(band, size)
            first = arith.divui(arith.addi(low, arith.muli(part, index(self.lanes))), index(2))
            with loop(first, arith.minui(arith.addi(first, index(self.lanes // 2)), last), index(1)) as pairs:
                pair = pairs.induction_variable
                rows = loops.members(panel.number, pair)
                if self.alone:
                    self._fetch(tile, panel, pair)
                self.group(tile, loops, sums, panel, pair, rows, [arith.subi(row, origin) for row in rows])
            stored = scf.IfOp(arith.andi(panel.last, arith.cmpi(arith.CmpIPredicate.ugt, band, start)))
            with ir.InsertionPoint(stored.then_block):
                before = arith.subi(low, size)
                bounds = (part, arith.addi(part, index(1)))
                share = tuple(arith.divui(arith.muli(each, index(tile.vectors)), index(number)) for each in bounds)
                tile.unpack(sums, arith.subi(before, origin), before, self.unit, (share[0], share[1]))
                scf.YieldOp([])

    def _fetch(self, tile: TokenTile, panel: Panel, pair: ir.Value) -> None:
        """Prefetches a pair's share of the x that is packed next: that of the next panel, or of the next tile's first panel."""
        x = tile.operands.x
        line, width = elements_a_line(x), tile.vectors * tile.lanes
        lines = -(-self.padded // line)
        share = min(-(-width * lines // self.number), _MOST_LINES)
        column = arith.select(panel.last, index(0), arith.muli(arith.addi(panel.number, index(1)), index(self.padded)))
        first = arith.addi(tile.operands.first, arith.select(panel.last, index(width), index(0)))
        end = arith.subi(tile.operands.memory.tokens, index(1))
        for number in range(share):
            at = arith.addi(arith.muli(pair, index(share)), index(number))
            token = arith.minui(arith.addi(first, arith.divui(at, index(lines))), end)
            place = arith.addi(column, arith.muli(arith.remui(at, index(lines)), index(line)))
            memref.prefetch(x, [token, place], False, _SECOND_LEVEL, True)


@dataclass(frozen=True)
class LowerRowpairs:
    """Lower products by pairs of rows to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, ROWPAIRS.name):
            (rows, _), width = shape_of(op), stored_of(op, RowPairs).width
            groups = _Pairs(op, tokens_and_rows(op), 2, width, 1, RowPairs.band(rows))
            groups.lower(module, partial(PairedRows, groups=groups.number, columns=width, lanes=groups.lanes))
