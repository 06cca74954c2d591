"""lower-quads: lowers a `kernel.spmm` of the schedule "quads" to dot products of four int8 each, with exact sums.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "quads", tile = [64, 1024, 1]}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "quads(reduction=1, rows=1, width=384)">) -> tensor<?x3072xf32>
after    the loops of row_groups.py over tiles of 64 tokens, panels of 384 columns and rows, and inside
           scf.for %p = %begin to %end iter_args(4 vectors of i32)     // the row's quads in the panel, see quad_loop.py
             4 loads of x, whose tile is packed as [K / 4][64 tokens][4] (quad_lines.py)
             llvm.x86.avx512.vpdpbusd, llvm.aarch64.neon.sdot          // or, without them, two products of words: tile [.., 2]

Four aligned neighbours along K are stored if one of them is nonzero. The sum is an i32, which the epilogue turns into a float.

This is the only schedule for int8 on CPUs that do not look up bytes. Recorded: 2.8 times as fast as Inductor's int8 at
"768x3072 95% 128 tokens" in benchmarks/results/intel-xeon-emeraldrapids/linear-peers.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Quads
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.product import lanes_of, products, shape_of, stored_of
from gossamer.passes.loops.vectors import index
from gossamer.passes.weights.row_groups import RowGroups
from gossamer.passes.weights.token_tile import TokenTile, tile_bytes
from gossamer.passes.weights_int8.quad_lines import pack_lines
from gossamer.passes.weights_int8.quad_loop import QuadRows

_ROWS = 1024  # rows of the weight at once: so few that their sums stay in the second-level cache
_TALLEST = 4  # most rows of a stored block
_PANEL = 0.75  # share of the first-level cache for a panel of x
_QUAD = {1: 2.0, 2: 2.7, 4: 3.2}  # cycles by vectors of tokens
_ROW, _ELEMENT = 24.0, 0.5  # cycles, see _cycles
_WITHOUT = 2.2  # factor of the cycles without dot products of bytes


def _bytes(matrix: Matrix) -> int:
    """Returns the bytes of a packed element of x."""
    return 1 if "bytedots" in matrix.features else 2


def _vectors(matrix: Matrix) -> int:
    """Returns the vectors of tokens in a tile."""
    return registers(matrix.bits) // 8


def _storage(matrix: Matrix) -> Quads:
    rows = 1 if matrix.block is None else max(n for n in range(1, _TALLEST + 1) if matrix.block[0] % n == 0)
    a_quad = 4 * _vectors(matrix) * matrix.lanes * _bytes(matrix)
    quads = -(-matrix.columns // 4)
    panels = -(-quads * a_quad // int(_PANEL * matrix.l1d))
    return Quads(matrix.reduction, rows, min(-(-quads // panels), 1 << 16) * 4)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight, bytes of an element of x]."""
    return (_vectors(matrix) * matrix.lanes, _ROWS, _bytes(matrix)) if isinstance(stored, Quads) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. A tile of v vectors of L tokens takes the sum of

    - c(v) for each quad and row of its block,
    - 24 for each group of R rows and panel, to start and end its loop,
    - 0.5 v L (K + M) for the transposes.
    """
    stored = _storage(matrix)
    m, k, lanes, widest = matrix.rows, matrix.columns, matrix.lanes, _vectors(matrix)
    quads = m * k / 4 * kept_quads(matrix, stored.rows)
    starts = _ROW * m / stored.rows * -(-k // stored.width)
    full, left = divmod(tokens, widest * lanes)
    tiles = [widest] * full + ([min(v for v in (1, 2, 4) if left <= v * lanes)] if left else [])
    slower = 1.0 if _bytes(matrix) == 1 else _WITHOUT
    return sum(quads * _QUAD[v] * slower + starts + _ELEMENT * (k + m) * v * lanes for v in tiles)


def kept_quads(matrix: Matrix, rows: int = 1) -> float:
    """Returns the share of quads that are stored: those with a nonzero in any of `rows` rows."""
    if matrix.block is None:
        return 1 - (1 - matrix.density) ** (4 * rows)
    blocks = max(1, 4 // matrix.block[1])
    return 1 - max(0.0, 1 - matrix.density / matrix.fill) ** blocks


def _in_chain(op: Any) -> ChainProduct:
    """Returns how the product runs in a chain. The tile of the chain has x as bytes."""
    (rows, columns), stored, words = shape_of(op), stored_of(op, Quads), integers(op.tile)[2] == 2
    if words:
        raise CompileError("a chain has quantized products of bytes only")
    groups = -(-rows // stored.rows)
    inner = partial(QuadRows, storage=stored, groups=groups, words=words, lanes=lanes_of(op))
    return ChainProduct(integers(op.tile)[0], stored.rows, groups, -(-columns // stored.width), None, inner)


QUADS = Family("quads", _storage, _tile, _cycles, chain=_in_chain, floats=False, integers=True, needs=frozenset({"bytedots"}))


@dataclass(frozen=True)
class LowerQuads:
    """Lower products of quantized quads to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, QUADS.name):
            product = _Quads(op, stored_of(op, Quads))
            inner = partial(QuadRows, storage=product.stored, groups=product.number, words=product.words, lanes=product.lanes)
            product.lower(module, inner)


class _Quads(RowGroups):
    """A product of quads, whose x is packed as lines."""

    half, moves = True, False

    def __init__(self, op: Any, stored: Quads) -> None:
        tile, lanes = integers(op.tile), lanes_of(op)
        if lanes not in (4, 8, 16) or len(tile) != 3 or tile[0] % lanes or tile[2] not in (1, 2):
            raise CompileError(
                f"tile {tile} is not [tokens, rows, 1 or 2 bytes] with tokens a multiple of {lanes} lanes, 4, 8 or 16"
            )
        super().__init__(op, (tile[0], tile[1]), stored.rows, stored.width, 4 * lanes)
        self.stored, self.bytes, self.words = stored, tile[2], tile[2] == 2

    @property
    def workspace(self) -> int:
        """Bytes that a thread needs."""
        return tile_bytes(self, self.tokens, self.slots + self.padded * self.bytes // 4)

    def packed(self, tile: TokenTile) -> tuple[ir.Value, ir.Value]:
        """Packs x of a tile into the workspace. Returns it, and the memory for the sums."""
        (sums,), tokens = tile.scratch(self.slots), tile.vectors * tile.lanes
        after = arith.addi(tile.operands.offset, index(self.slots * tokens * 4))
        element = ir.IntegerType.get_signless(8 * self.bytes)
        lines = ir.MemRefType.get([self.padded * self.bytes // 4, tokens * 4 // self.bytes], element)
        packed = memref.view(lines, tile.operands.workspace, after, [])
        pack_lines(tile, packed, self.K, self.words)
        return packed, sums

    def work_before(self, row: ir.Value) -> ir.Value:
        """Counts quads, if rows are stored one by one. To start and end a row of a panel costs about as much as eight."""
        return self.stored_before(row, self.panels, 8) if self.height == 1 else row
