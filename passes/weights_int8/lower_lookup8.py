"""lower-lookup8: lowers a `kernel.spmm` of the schedule "lookup8" to look-ups of the bytes of x for a weight's nonzeros.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "lookup8", tile = [32, 32]}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "bytewindows(reduction=1, rows=16, sorted=0)">) -> tensor<?x3072xf32>
after    scf.parallel (%task) = ...                     // chunks of the strips of the weight
           func.call @region_copied16(...)              // or 8, 4, 2, 1 if there are fewer tokens
         func.func private @region_copied16(...)        // see strips.py; the copy of x has x + 128, for vpdpbusd
           for each strip of 16 rows, each 16 tokens:
             sums by look-ups in windows of 64 columns  // see byte_windows.py
             through the epilogue into y

So only nonzeros are multiplied, wherever they lie, and two instructions do 64 multiplications.

Fastest for int8 without AMX: 2.7 times as fast as Inductor's int8 at "768x3072 90% 128 tokens" in
benchmarks/results/amd-epyc-znver5/linear-peers.json.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import ByteWindows, Packing
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, products, shape_of, stored_of
from gossamer.passes.loops.vectors import reserve_workspace
from gossamer.passes.weights_bf16.strips import Group, Strips
from gossamer.passes.weights_int8.byte_products import plus_128
from gossamer.passes.weights_int8.byte_windows import LANES, WindowStrips, sums_of_lines, tokens_in_rows

_FEATURES = frozenset({"bytedots", "avx512vbmi"})
_TOKENS = 32  # tokens of a tile
_STACK = 256 << 10  # most bytes of a tile in a chain, which is on the stack
_GROUPS = (LANES, 8, 4, 2, 1)  # tokens that are multiplied together
_LINE, _PRODUCT, _LEAST = 0.4, 1.0, 4.0  # cycles of a line, and of each token's product with it; fewest cycles of both
_RESULTS = 9.0  # cycles of a vector of results
_UNEVEN = 0.8  # factor of the lines in a window that uneven rows of a strip add


def _storage(matrix: Matrix) -> ByteWindows | None:
    return ByteWindows(matrix.reduction, LANES, 0) if matrix.bits == 512 and matrix.features >= _FEATURES else None


def _in_chains(matrix: Matrix) -> ByteWindows:
    """Returns the storage in chains. They store results row by row, so rows may be sorted, which saves a sixth of the lines or
    more."""
    return ByteWindows(matrix.reduction, LANES, 1)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    return (_TOKENS, _TOKENS) if stored in (_storage(matrix), _in_chains(matrix)) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles: for each group of t tokens, max(0.4 + t, 4) for each line, and 9 t M / 16 for the results."""
    width = next((width for width in _GROUPS if tokens >= width), 1)
    groups, strips = -(-tokens // width), -(-matrix.rows // LANES)
    return groups * strips * (_lines(matrix) * max(_LINE + _PRODUCT * width, _LEAST) + _RESULTS * width)


def _lines(matrix: Matrix) -> float:
    """Returns the expected lines of a strip: a quarter of the nonzeros of its fullest row, and more for places in which other
    rows are fuller."""
    density, together = matrix.density, ByteWindows.TOGETHER
    lines = matrix.columns * min(density * matrix.longest_of(LANES), 1.0) / together
    if not matrix.evenly(LANES, ByteWindows.COLUMNS):
        neighbours = 1 if matrix.block is None else min(matrix.block[1], ByteWindows.COLUMNS)
        lines += _UNEVEN * matrix.columns / ByteWindows.COLUMNS * sqrt((1 - density) * neighbours)
    return min(lines, LANES * matrix.columns * density)


def _read(matrix: Matrix) -> float:
    """Returns the bytes that it reads: for each line, places and values with padding, and the number of a window."""
    return (2 * LANES * ByteWindows.TOGETHER + 4) * -(-matrix.rows // LANES) * _lines(matrix)


def _in_chain(op: Any) -> ChainProduct:
    """Returns how the product runs in a chain: with tokens row by row, in a tile on the stack."""
    rows, columns = shape_of(op)
    if not stored_of(op, ByteWindows).sorted:
        raise CompileError("a chain has the rows of strips in the order that choose-format{chain=true} gives them")

    def inner(weight: tuple[ir.Value, ...], lines: ir.Value, vec: ir.VectorType, vectors: int) -> WindowStrips:
        return WindowStrips(weight, tokens_in_rows(lines, columns, vectors), vec, vectors, columns)

    tokens = next((n for n in (64, 32) if n * columns <= _STACK), LANES)
    return ChainProduct(tokens, LANES, -(-rows // LANES), 1, None, inner, among=rows, stores=True)


def _gain_in_chains(matrix: Matrix, tokens: int) -> float:
    return 1.1  # sorted rows have fewer lines


LOOKUP8 = Family(
    "lookup8",
    _storage,
    _tile,
    _cycles,
    chain=_in_chain,
    chained=_in_chains,
    gain=_gain_in_chains,
    floats=False,
    integers=True,
    read=_read,
)


@dataclass(frozen=True)
class LowerLookup8:
    """Lower products that look up bytes."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, LOOKUP8.name):
            if stored_of(op, ByteWindows).sorted:
                raise CompileError("only a chain stores rows in any order")
            strips = _Windows(op, ByteWindows.COLUMNS)
            with op.location:
                strips.run([(n, strips.in_groups(n, max(strips.tile), partial(_multiply, strips, n))) for n in _GROUPS])
            reserve_workspace(module, strips.workspace)


class _Windows(Strips):
    """Strips of bytes, which are multiplied with a copy of x."""

    def as_copied(self, read: ir.Value, line: ir.VectorType) -> ir.Value:
        return plus_128(read)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """Computes y for a group of tokens and a strip."""
    sums = sums_of_lines(operands, group.begin, group.end, group.x, group.row, tokens)
    strips.store_sums(operands, group, sums)
