"""lower-rowpairs: a `kernel.spmm` of the schedule "rowpairs" becomes loops that take two rows at a time.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "rowpairs", tile = [64, 1024], ...}
             : (..., tensor<3072x768xf32, "rowpairs(reduction=1, width=128)">) -> ...
after    the loops of row_groups.py over tiles of 64 tokens, panels of 128 columns and pairs of rows, and inside
           scf.for %p = %begin to %middle iter_args(2 rows x 4 vectors)  // columns where both rows have a nonzero
             4 loads of x, shared by 2 x 4 multiply-adds
           scf.for %p = %middle to %end iter_args(2 rows x 4 vectors)    // one column of each row
             8 loads of x for 2 x 4 multiply-adds

For nonzeros that lie anywhere. At a density of 50 % half of them share their loads; and at any density eight sums in flight and
half as many loops to start and end are faster than row by row. A row without a nonzero in a panel multiplies zeros by
its neighbour's columns, so that an infinity there reaches both. Runs on functions whose storage is exposed (expose-storage).

Fastest for weights that are half zeros: 1.26 times as fast as "broadcast" at "1000x1333 50% 128 tokens" in
benchmarks/results/intel-xeon-graniterapids/prediction.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, RowPairs
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.inner_loop import InnerLoop
from gossamer.passes.loops.product import products, shape_of, stored_of
from gossamer.passes.loops.vectors import index, load_index, loop
from gossamer.passes.weights.row_groups import RowGroups, tokens_and_rows

_NONZERO = {1: (2.2, 0.1), 2: (2.9, 0.6), 4: (4.3, 1.1)}  # cycles by vectors of tokens, see _cycles
_START, _ELEMENT = 36.0, 0.4
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_WIDER = ((0.28, 1.0), (0.08, 1.5), (0.0, 3.0))  # for weights denser than this, times as wide a panel as fits


def _storage(matrix: Matrix) -> RowPairs:
    """Panels of equally many columns, so that their x stays in the first-level cache.

    A dense weight wants all of the panel's x there. But the sums of a row are loaded and stored, and its loop mispredicted,
    once a panel, so that wider panels pay for sparse rows.
    """
    fitting = matrix.l1d // (_vectors(matrix) * matrix.bits // 8)
    share = next(share for denser, share in _WIDER if matrix.density >= denser)
    panels = -(-matrix.columns // int(fitting * share))
    return RowPairs(matrix.reduction, -(-matrix.columns // panels))


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight]"""
    return (_vectors(matrix) * matrix.lanes, _ROWS) if isinstance(stored, RowPairs) else None


def _vectors(matrix: Matrix) -> int:
    """Vectors of tokens in a tile."""
    return registers(matrix.bits) // 8


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: nnz (a(v) - b(v) density), the more the rows have in common the fewer loads, and both
    rows of a pair as many as the longer one; 36 M / 2 panels for starts and ends; 0.4 (K + M) v L for the transposes."""
    m, k, lanes, widest = matrix.rows, matrix.columns, matrix.lanes, _vectors(matrix)
    starts = _START * m / 2 * -(-k // _storage(matrix).width)
    full, left = divmod(tokens, widest * lanes)
    tiles = [widest] * full + ([min(v for v in (1, 2, 4) if left <= v * lanes)] if left else [])
    total, stored = 0.0, matrix.nonzeros * matrix.longest_of(2)
    for v in tiles:
        alone, shared = _NONZERO[v]
        total += stored * (alone - shared * matrix.density) + starts + _ELEMENT * (k + m) * v * lanes
    return total


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), width = shape_of(op), stored_of(op, RowPairs).width
    pairs = -(-rows // 2)
    inner = partial(PairedRows, width=width, pairs=pairs)
    return ChainProduct(integers(op.tile)[0], 2, pairs, -(-columns // width), None, inner)


ROWPAIRS = Family("rowpairs", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerRowpairs:
    """Lower products by pairs of rows to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, ROWPAIRS.name):
            stored = stored_of(op, RowPairs)
            groups = RowGroups(op, tokens_and_rows(op), 2, stored.width, 1)
            groups.lower(module, partial(PairedRows, width=stored.width, pairs=groups.number))


@dataclass(frozen=True)
class PairedRows(InnerLoop):
    """For a weight of `pairs` pairs of rows in panels of `width` columns."""

    width: int
    pairs: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + what the pair's nonzeros in this panel give: first what the rows have in common, then the rest."""
        at = arith.muli(arith.addi(arith.muli(panel, index(self.pairs)), group), index(2))
        begin, middle, end = (load_index(self.positions, arith.addi(at, index(i))) for i in range(3))
        origin = arith.muli(panel, index(self.width))
        with loop(begin, middle, index(1), sums) as common:
            k, _ = self._columns(origin, common.induction_variable)
            x = list(self.x(k))
            scf.YieldOp(self._multiply_add(common.induction_variable, [x, x], list(common.inner_iter_args)))
        with loop(middle, end, index(1), list(common.results)) as rest:
            ks = self._columns(origin, rest.induction_variable)
            scf.YieldOp(self._multiply_add(rest.induction_variable, [list(self.x(k)) for k in ks], list(rest.inner_iter_args)))
        return list(rest.results)

    def _columns(self, origin: ir.Value, p: ir.Value) -> list[ir.Value]:
        """The columns of the two elements of an entry."""
        first = arith.muli(p, index(2))
        return [arith.addi(origin, load_index(self.coordinates, arith.addi(first, index(row)))) for row in range(2)]

    def _multiply_add(self, p: ir.Value, x: list[list[ir.Value]], sums: list[ir.Value]) -> list[ir.Value]:
        """sums + the entry's value in each row times x of that row."""
        first, totals = arith.muli(p, index(2)), []
        for row in range(2):
            weight = self.value(arith.addi(first, index(row)))
            mine = sums[row * self.vectors : (row + 1) * self.vectors]
            totals += [vector.fma(weight, vector_, total) for vector_, total in zip(x[row], mine, strict=True)]
        return totals
