"""Products in a chain: which families' inner loops work on its tiles, [columns][tokens] with tokens in the lanes.

A family is in here if its inner loops `add` to the sums of a few rows, all tokens of the tile at once. Those that multiply
pairs of bf16 read x as columns of bf16 (columns.py), the others as sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Blocks, Pairs, RowPairs, Vnni
from gossamer.passes.block_rows import BlockRows
from gossamer.passes.dot_blocks import HEIGHT, DotBlocks
from gossamer.passes.encodings import storage_of_type
from gossamer.passes.families import FAMILIES
from gossamer.passes.family import Matrix
from gossamer.passes.kblock_rows import KBlockRows
from gossamer.passes.lower_rowpairs import PairedRows
from gossamer.passes.pair_rows import PairRows
from gossamer.passes.row_groups import Adds

_VECTORS = 4  # vectors of tokens of a tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache

Buffers = tuple[ir.Value, ir.Value, ir.Value]
Inner = Callable[[Buffers, ir.Value, ir.VectorType, int], Adds]


@dataclass(frozen=True)
class ChainProduct:
    """How a product runs in a chain.

    tokens  of a tile at most
    groups  of rows, `height` each: those whose sums are in registers
    panels  of columns: the sums of all rows are stored and loaded between two of them
    rounds  whether it reads x as columns of bf16
    inner   (the weight's memrefs, x, a vector of sums, vectors of tokens) → the inner loops
    """

    tokens: int
    height: int
    groups: int
    panels: int
    rounds: bool
    inner: Inner

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
    return stored is not None and not (isinstance(stored, Blocks | Vnni) and matrix.columns % stored.columns)


def _kblock(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    tokens, _, width = integers(op.tile)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return KBlockRows(rows, width, *weight, packed, vec, vectors)

    return ChainProduct(tokens, 1, rows, -(-size // width), False, inner)


def _block(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Blocks)
    groups = -(-rows // stored.rows)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return BlockRows(stored, groups, *weight, packed, vec, vectors)

    return ChainProduct(integers(op.tile)[0], stored.rows, groups, -(-size // stored.width), False, inner)


def _rowpairs(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, RowPairs)
    groups = -(-rows // 2)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return PairedRows(stored.width, groups, *weight, packed, vec, vectors)

    return ChainProduct(integers(op.tile)[0], 2, groups, -(-size // stored.width), False, inner)


def _pairs(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Pairs)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return PairRows(rows, stored.width, *weight, packed, vec, vectors)

    return ChainProduct(integers(op.tile)[0], 1, rows, -(-size // stored.width), True, inner)


def _bf16dot(op: Any, rows: int, size: int, lanes: int) -> ChainProduct:
    stored = _stored(op, Vnni)

    def inner(weight: Buffers, packed: ir.Value, vec: ir.VectorType, vectors: int) -> Adds:
        return DotBlocks(stored, *weight, packed, vectors)

    return ChainProduct(_VECTORS * lanes, HEIGHT, -(-rows // HEIGHT), 1, True, inner)


def _stored(op: Any, kind: type) -> Any:
    stored = storage_of_type(ir.RankedTensorType(op.w.type))
    if not isinstance(stored, kind):
        raise CompileError(f"a weight stored as {stored} has no product of the schedule {op.schedule} in a chain")
    return stored


_KINDS: dict[str, Callable[[Any, int, int, int], ChainProduct]] = {
    "kblock": _kblock, "block": _block, "rowpairs": _rowpairs, "pairs": _pairs, "bf16dot": _bf16dot
}  # fmt: skip
