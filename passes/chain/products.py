"""Products in a chain: which families' inner loops work on its tiles, [columns][tokens] with tokens in the lanes.

A family is in here if its inner loops `add` to the sums of a few rows, all tokens of the tile at once, or `store` them. Those
that multiply pairs of bf16 read x as columns of bf16, one by one (bf16_columns.py) or two side by side (bf16_pairs.py), the
others as sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Blocks, Padded, Pairs, Panels, RowPairs, Vnni
from gossamer.passes.framework.family import Matrix
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.schedules.families import FAMILIES
from gossamer.passes.weights.block_loop import BlockRows
from gossamer.passes.weights.kblock_loop import KBlockRows
from gossamer.passes.weights.lower_rowpairs import PairedRows
from gossamer.passes.weights.padded_loop import PaddedRows
from gossamer.passes.weights.row_groups import Adds
from gossamer.passes.weights_bf16.amx_panel_loop import TilePanels, gathering
from gossamer.passes.weights_bf16.dot_loop import HEIGHT, DotBlocks, rows_at_once
from gossamer.passes.weights_bf16.lower_amxcolumns import AMXCOLUMNS, cycles_in_chains
from gossamer.passes.weights_bf16.pair_loop import PairRows

_VECTORS = 4  # vectors of tokens of a tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache

Buffers = tuple[ir.Value, ir.Value, ir.Value]
Layout = Literal["columns", "lines"]
"""How x lies in the tile where it is bf16: columns (bf16_columns.py), or two side by side (bf16_pairs.py)."""

Inner = Callable[[Buffers, ir.Value, ir.VectorType, int], Adds | TilePanels]


@dataclass(frozen=True)
class ChainProduct:
    """How a product runs in a chain.

    tokens  of a tile at most
    groups  of rows, `height` each: what threads share out
    panels  of columns: the sums of all rows are stored and loaded between two of them
    reads   how x lies in the tile, None for sums
    inner   (the weight's memrefs, x, a vector of sums, vectors of tokens) → the inner loops
    cut     (vectors of tokens) → rows whose sums are in registers, where these are not all of a group
    """

    tokens: int
    height: int
    groups: int
    panels: int
    reads: Layout | None
    inner: Inner
    cut: Callable[[int], int] | None = None

    def rows(self, vectors: int) -> int:
        """Rows that the inner loops take at once, with so many vectors of tokens: a divisor of `height`."""
        return self.height if self.cut is None else self.cut(vectors)

    @property
    def step(self) -> int:
        """Groups that go through a panel before the next panel."""
        return max(1, _ROWS // self.height)


def chain_product(op: Any) -> ChainProduct:
    """How a kernel.spmm runs in a chain; CompileError if its family does not run in chains."""
    schedule, lanes = ir.StringAttr(op.schedule).value, ir.IntegerAttr(op.lanes).value
    if schedule not in _KINDS:
        raise CompileError(f"no chain has a product of the schedule {schedule}, but of {', '.join(_KINDS)}")
    weight, reduction = ir.RankedTensorType(op.w.type), ir.IntegerAttr(op.reduction).value
    return _KINDS[schedule](op, weight.shape[1 - reduction], weight.shape[reduction], lanes)


def runs_in_chains(schedule: str, matrix: Matrix) -> bool:
    """Whether a product with this weight can run in a chain by a schedule: none reads columns beyond the last one of x."""
    stored = FAMILIES[schedule].storage(matrix) if schedule in _KINDS else None
    together = stored.columns if isinstance(stored, Blocks | Vnni) else stored.width if isinstance(stored, Panels) else 1
    return stored is not None and matrix.columns % together == 0


def gain_in_chain(schedule: str, matrix: Matrix, tokens: int) -> float:
    """How many times as fast a product is in a chain, about: nothing is transposed there between products, but the sums of all
    rows of a tile take turns in the second-level cache. Measured, on tiles that are whole vectors of tokens."""
    if schedule == "bf16dot":  # reads x as it lies in memory otherwise, and shares a load of it among more rows
        return 0.8 if tokens <= matrix.lanes else 1.03
    if schedule == "amxcolumns":
        return AMXCOLUMNS.cycles(matrix, tokens) / cycles_in_chains(matrix, tokens)
    return 1.15 - 0.4 * matrix.density


def _kblock(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    tokens, _, width = integers(op.tile)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return KBlockRows(rows, width, *weight, packed, vec, vectors)

    return ChainProduct(tokens, 1, rows, -(-size // width), None, inner)


def _broadcast(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Padded)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return PaddedRows(rows, stored.columns, *weight, packed, vec, vectors, lanes)

    return ChainProduct(_VECTORS * lanes, 1, rows, -(-size // stored.columns), None, inner)


def _block(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Blocks)
    groups = -(-rows // stored.rows)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return BlockRows(stored, groups, *weight, packed, vec, vectors)

    return ChainProduct(integers(op.tile)[0], stored.rows, groups, -(-size // stored.width), None, inner)


def _rowpairs(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, RowPairs)
    groups = -(-rows // 2)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return PairedRows(stored.width, groups, *weight, packed, vec, vectors)

    return ChainProduct(integers(op.tile)[0], 2, groups, -(-size // stored.width), None, inner)


def _pairs(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Pairs)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return PairRows(rows, stored.width, *weight, packed, vec, vectors)

    return ChainProduct(integers(op.tile)[0], 1, rows, -(-size // stored.width), "columns", inner)


def _bf16dot(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Vnni)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return DotBlocks(stored, *weight, packed, vectors)

    return ChainProduct(_VECTORS * lanes, HEIGHT, -(-rows // HEIGHT), 1, "lines", inner, rows_at_once)


def _amxcolumns(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Panels)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> TilePanels:
        memory = gathering(stored, vectors, ir.MemRefType(packed.type).element_type)
        return TilePanels(stored, *weight, packed, vectors, memory)

    layout: Layout = "columns" if stored.width == 1 else "lines"
    return ChainProduct(_VECTORS * lanes, stored.rows, -(-rows // stored.rows), 1, layout, inner)


def _stored(op: Any, kind: type) -> Any:
    stored = storage_of_type(ir.RankedTensorType(op.w.type))
    if not isinstance(stored, kind):
        raise CompileError(f"a weight stored as {stored} has no product of the schedule {op.schedule} in a chain")
    return stored


_KINDS: dict[str, Callable[[Any, int, int, int], ChainProduct]] = {
    "kblock": _kblock, "broadcast": _broadcast, "block": _block, "rowpairs": _rowpairs, "pairs": _pairs, "bf16dot": _bf16dot,
    "amxcolumns": _amxcolumns,
}  # fmt: skip
