"""lower-lookup8: a `kernel.spmm` of the schedule "lookup8" looks up the bytes of x that a weight's nonzeros want.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "lookup8", tile = [32, 32]}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "bytewindows(reduction=1, rows=16, sorted=0)">) -> tensor<?x3072xf32>
after    scf.parallel (%task) = ...                     // chunks of the strips of the weight
           func.call @region_copied8(...)               // or 4, 2, 1 where there are fewer tokens
         func.func private @region_copied8(...)         // see strips.py; x + 128 is copied, which vpdpbusd wants
           for each strip of 16 rows, each 8 tokens:
             sums by look-ups in windows of 64 columns  // see byte_windows.py
             through the epilogue into y

So a multiplication is one of a nonzero, wherever it lies, and two instructions make 64 of them.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import ByteWindows, Packing
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, products, shape_of, stored_of
from gossamer.passes.loops.vectors import index, reserve_workspace
from gossamer.passes.weights_bf16.strips import Group, Strips
from gossamer.passes.weights_int8.byte_products import plus_128
from gossamer.passes.weights_int8.byte_windows import AT_ONCE, LANES, WindowStrips, sums_of_strip, tokens_in_rows, windows_of

_FEATURES = frozenset({"vnni", "avx512vbmi"})
_TOKENS = 32  # of a tile
_STACK = 256 << 10  # bytes of a tile in a chain
_GROUPS = (AT_ONCE, 4, 2, 1)  # tokens that are multiplied together
_LINE, _PRODUCT, _LEAST = 0.4, 0.9, 4.0  # cycles of a line, and of each token's product with it; at least
_WINDOW, _RESULTS = 3.0, 9.0  # cycles of a token's window of a strip, of a vector of results
_FULLEST = 1.77  # standard deviations that the fullest of 16 rows lies above the mean, by chance


def _storage(matrix: Matrix) -> ByteWindows | None:
    return ByteWindows(matrix.reduction, LANES, 0) if matrix.bits == 512 and matrix.features >= _FEATURES else None


def _in_chains(matrix: Matrix) -> ByteWindows:
    """There, results are stored row by row and may come in any order, which takes a sixth of the lines away and more."""
    return ByteWindows(matrix.reduction, LANES, 1)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    return (_TOKENS, _TOKENS) if stored in (_storage(matrix), _in_chains(matrix)) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """max(0.4 + 0.9 T', 4) a line with T' tokens in whole groups; 3 T' a window of a strip; 9 T' M / 16 for the results."""
    width = next((width for width in _GROUPS if tokens >= width), 1)
    groups, strips = -(-tokens // width), -(-matrix.rows // LANES)
    windows = windows_of(matrix.columns)
    a_line, a_window = max(_LINE + _PRODUCT * width, _LEAST), _WINDOW * width
    return groups * strips * (windows * (_lines(matrix) * a_line + a_window) + _RESULTS * width)


def _lines(matrix: Matrix) -> float:
    """Expected in a window of a strip: what its fullest row needs."""
    wide, density = ByteWindows.COLUMNS, matrix.density
    fullest = wide * min(density * matrix.longest_of(LANES), 1.0)
    if not matrix.evenly(LANES, wide):
        neighbours = 1 if matrix.block is None else min(matrix.block[1], wide)
        fullest = min(fullest + _FULLEST * sqrt(wide * density * (1 - density) * neighbours), wide)
    return fullest / ByteWindows.TOGETHER + 0.45


def _read(matrix: Matrix) -> float:
    """Bytes: a place and a value for each nonzero, and what fills up."""
    cut = -(-matrix.rows // LANES) * windows_of(matrix.columns)
    return 2 * LANES * ByteWindows.TOGETHER * cut * _lines(matrix)


def _in_chain(op: Any) -> ChainProduct:
    """Tokens row by row in a tile that the stack holds."""
    rows, columns = shape_of(op)
    if not stored_of(op, ByteWindows).sorted:
        raise CompileError("a chain has the rows of strips in the order that choose-format{chain=true} gives them")

    def inner(weight: tuple[ir.Value, ...], lines: ir.Value, vec: ir.VectorType, vectors: int) -> WindowStrips:
        return WindowStrips(weight, tokens_in_rows(lines, columns, vectors), vec, vectors, windows_of(columns))

    tokens = next((n for n in (64, 32) if n * columns <= _STACK), LANES)
    return ChainProduct(tokens, LANES, -(-rows // LANES), 1, None, inner, sorted=True)


def _gain_in_chains(matrix: Matrix, tokens: int) -> float:
    return 1.3 - 0.4 * matrix.density


LOOKUP8 = Family(
    "lookup8",
    _storage,
    _tile,
    _cycles,
    chain=_in_chain,
    chained=_in_chains,
    gain=_gain_in_chains,
    integers=True,
    read=_read,
)


@dataclass(frozen=True)
class LowerLookup8:
    """Lower products that look up bytes."""

    name: ClassVar[str] = "lower-lookup8"

    def run(self, module: ir.Module) -> None:
        for op in products(module, LOOKUP8.name):
            if stored_of(op, ByteWindows).sorted:
                raise CompileError("only a chain stores rows in any order")
            strips = _Windows(op, ByteWindows.COLUMNS)
            with op.location:
                strips.run([(n, strips.in_groups(n, max(strips.tile), partial(_multiply, strips, n))) for n in _GROUPS])
            reserve_workspace(module, strips.workspace)


class _Windows(Strips):
    """Strips of bytes, which multiply a copy of x."""

    def as_copied(self, read: ir.Value, line: ir.VectorType) -> ir.Value:
        return plus_128(read)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """y for a group of tokens and a strip."""
    strip = arith.divui(group.first_row, index(LANES))
    strips.store_sums(operands, group, sums_of_strip(operands, strip, windows_of(strips.K), group.x, group.row, tokens))
