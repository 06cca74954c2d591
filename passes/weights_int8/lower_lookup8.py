"""lower-lookup8: a `kernel.spmm` of the schedule "lookup8" looks up the bytes of x that a weight's nonzeros want.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "lookup8", tile = [32, 32]}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "bytewindows(reduction=1, rows=16)">) -> tensor<?x3072xf32>
after    scf.parallel (%task) = ...                     // chunks of the strips of the weight
           func.call @region_copied8(...)               // or 4, 2, 1 where there are fewer tokens
         func.func private @region_copied8(...)         // see strips.py; x + 128 is copied, which vpdpbusd wants
           for each window of 64 columns:               // of each token in a register
             for each line of the window:  iter_args(8 vectors of sums, how much too large they are)
               places[line], values[line]               // four nonzeros of each of 16 rows
               vpdpbusd(sums, vpermb(places, the token's window), values)
               vpdpbusd(how much, 128, values)

So a multiplication is one of a nonzero, wherever it lies, and two instructions make 64 of them.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.packing import ByteWindows, Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.inner_loop import added_up, sets_of
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import index, load_index, loop, reserve_workspace, vector_of, zeros
from gossamer.passes.weights_bf16.strips import LANES, Group, Strips
from gossamer.passes.weights_int8.byte_products import multiplied, plus_128, splat_of_bytes

_FEATURES = frozenset({"vnni", "avx512vbmi"})
_TOKENS = 32  # of a tile
_GROUPS = (8, 4, 2, 1)  # tokens whose sums and windows are in registers
_LINE, _PRODUCT, _LEAST = 0.4, 0.9, 4.0  # cycles of a line, and of each token's product with it; at least
_WINDOW, _RESULTS = 3.0, 9.0  # cycles of a token's window of a strip, of a vector of results
_FULLEST = 1.77  # standard deviations that the fullest of 16 rows lies above the mean, by chance
_PERMUTE = "llvm.x86.avx512.permvar.qi.512"


def _storage(matrix: Matrix) -> ByteWindows | None:
    return ByteWindows(matrix.reduction, LANES) if matrix.bits == 512 and matrix.features >= _FEATURES else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    return (_TOKENS, _TOKENS) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """max(0.4 + 0.9 T', 4) a line with T' tokens in whole groups; 3 T' a window of a strip; 9 T' M / 16 for the results."""
    width = next((width for width in _GROUPS if tokens >= width), 1)
    groups, strips = -(-tokens // width), -(-matrix.rows // LANES)
    windows = -(-matrix.columns // ByteWindows.COLUMNS)
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
    cut = -(-matrix.rows // LANES) * -(-matrix.columns // ByteWindows.COLUMNS)
    return 2 * LANES * ByteWindows.TOGETHER * cut * _lines(matrix)


LOOKUP8 = Family("lookup8", _storage, _tile, _cycles, integers=True, read=_read)


@dataclass(frozen=True)
class LowerLookup8:
    """Lower products that look up bytes."""

    name: ClassVar[str] = "lower-lookup8"

    def run(self, module: ir.Module) -> None:
        for op in products(module, LOOKUP8.name):
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
    wide, height = ByteWindows.COLUMNS, ByteWindows.TOGETHER * LANES
    number = strips.padded_K // wide
    _, lines, places, values = operands.weight
    line_type = vector_of(height, strips.element)
    none, middle = zeros(vector_of(LANES, strips.sum_type)), splat_of_bytes(height, -128)
    ways = max(1, 4 // (tokens + 1))
    first = arith.muli(arith.divui(group.first_row, index(strips.height)), index(number))
    with loop(index(0), index(number), index(1), [group.begin, *sets_of([none] * (tokens + 1), ways)]) as windows:
        window = windows.induction_variable
        begin, *carried = windows.inner_iter_args
        column = arith.muli(window, index(wide))
        held = [vector.load(line_type, group.x, [arith.addi(group.row, index(t)), column]) for t in range(tokens)]
        end = arith.addi(begin, load_index(lines, arith.addi(first, window)))

        def line(at: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            start = arith.muli(at, index(height))
            wanted, weights = (vector.load(line_type, array, [start]) for array in (places, values))
            found = [llvm.call_intrinsic(line_type, _PERMUTE, [each, wanted], [], []) for each in held]
            return [multiplied(total, x, weights) for total, x in zip(totals, [*found, middle], strict=True)]

        def several(low: ir.Value, high: ir.Value, step: int, totals: list[ir.Value]) -> list[ir.Value]:
            with loop(low, high, index(step), totals) as steps:
                sums = list(steps.inner_iter_args)
                for way in range(step):
                    mine = slice(way * (tokens + 1), (way + 1) * (tokens + 1))
                    sums[mine] = line(arith.addi(steps.induction_variable, index(way)), sums[mine])
                scf.YieldOp(sums)
            return list(steps.results)

        whole = end if ways == 1 else arith.subi(end, arith.remui(arith.subi(end, begin), index(ways)))
        carried = several(begin, whole, ways, carried)
        if ways > 1:
            carried = several(whole, end, 1, carried)
        scf.YieldOp([end, *carried])
    _, *totals = windows.results
    *found, too_large = added_up(totals, tokens + 1)
    strips.store_sums(operands, group, [arith.subi(total, too_large) for total in found])
