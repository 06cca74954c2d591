"""lower-expand8: a `kernel.spmm` of the schedule "expand8" loads int8 as sparse and multiplies as dense, for a few tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "expand8", tile = [32, 32]}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "quadmap(reduction=1, rows=16)">) -> tensor<?x3072xf32>
after    scf.parallel (%task) = ...                     // chunks of the strips of the weight
           func.call @region_copied16(...)              // or 8, 4, 2, 1 where there are fewer tokens
         func.func private @region_copied16(...)        // see strips.py; x + 128 is copied, which vpdpbusd wants
           for each four columns:  iter_args(the place among the values, 16 vectors of sums, how much too large they are)
             vpexpandb(values[place..], 64 bits of the mask)                    // 16 rows' quads, with zeros
             vpdpbusd(sums, the token's quad in all lanes, 16 rows' quads)
             vpdpbusd(how much, 128, 16 rows' quads)

The weight is read as its nonzeros and a bit for each element.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, memref, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, QuadMap
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.inner_loop import added_up, sets_of
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import index, loop, reserve_workspace, vector_of, zeros
from gossamer.passes.weights_bf16.strips import LANES, Group, Strips
from gossamer.passes.weights_int8.byte_products import in_all_lanes, multiplied, plus_128, splat_of_bytes

_FEATURES = frozenset({"vnni", "avx512vbmi2"})
_TOKENS = 32  # of a tile
_GROUPS = (16, 8, 4, 2, 1)  # tokens whose sums are in registers
_CHAINS = 10  # sums that have to be under way at once
_LINE, _PRODUCT, _BYTES = 3.0, 0.62, 19.0  # cycles of expanding a line and of a product, bytes a cycle
_RESULTS = 9.0  # cycles of a vector of results


def _storage(matrix: Matrix) -> QuadMap | None:
    return QuadMap(matrix.reduction, LANES) if matrix.bits == 512 and matrix.features >= _FEATURES else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    return (_TOKENS, _TOKENS) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """3 + 0.62 T' for every line of 64 elements, nonzero or not, with T' tokens in whole groups; at least M K / 8 + nnz bytes
    at 19 a cycle for each group; 9 T' M / 16 for the results."""
    width = next((width for width in _GROUPS if tokens >= width), 1)
    groups, elements = -(-tokens // width), matrix.rows * matrix.columns
    lines = elements / (4 * LANES) * (_LINE + _PRODUCT * width)
    read = (elements / 8 + matrix.nonzeros) / _BYTES
    return groups * max(lines, read) + _RESULTS * groups * width * matrix.rows / LANES


EXPAND8 = Family("expand8", _storage, _tile, _cycles, most=2 * _GROUPS[0], integers=True)


@dataclass(frozen=True)
class LowerExpand8:
    """Lower products that expand bytes to vectors."""

    name: ClassVar[str] = "lower-expand8"

    def run(self, module: ir.Module) -> None:
        for op in products(module, EXPAND8.name):
            strips = _ByteStrips(op, QuadMap.COLUMNS)
            with op.location:
                strips.run([(n, strips.in_groups(n, max(strips.tile), partial(_multiply, strips, n))) for n in _GROUPS])
            reserve_workspace(module, strips.workspace)


class _ByteStrips(Strips):
    """Strips of bytes, which multiply a copy of x."""

    def as_copied(self, read: ir.Value, line: ir.VectorType) -> ir.Value:
        return plus_128(read)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """y for a group of tokens and a strip: a vector of sums for each token, and how much too large they all are."""
    ways, none = max(1, min(4, _CHAINS // (tokens + 1))), zeros(vector_of(LANES, strips.sum_type))
    quads = strips.padded_K // QuadMap.COLUMNS
    lines = arith.muli(arith.divui(group.first_row, index(strips.height)), index(quads))
    middle = splat_of_bytes(4 * LANES, -128)

    def quad(at: ir.Value, place: ir.Value, totals: list[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
        """The place after four columns, and the sums with their products."""
        weights, place = _expanded(operands, arith.addi(lines, at), place)
        column = arith.muli(at, index(QuadMap.COLUMNS))
        four = vector_of(QuadMap.COLUMNS, strips.element)
        given = [
            in_all_lanes(vector.load(four, group.x, [arith.addi(group.row, index(t)), column]), LANES)[0] for t in range(tokens)
        ]
        return place, [multiplied(total, x, weights) for total, x in zip(totals, [*given, middle], strict=True)]

    unrolled = max(2, ways)
    whole, sums = quads - quads % unrolled, tokens + 1
    with loop(index(0), index(whole), index(unrolled), [group.begin, *sets_of([none] * sums, ways)]) as several:
        place, *totals = several.inner_iter_args
        for i in range(unrolled):
            mine = slice(i % ways * sums, (i % ways + 1) * sums)
            place, totals[mine] = quad(arith.addi(several.induction_variable, index(i)), place, totals[mine])
        scf.YieldOp([place, *totals])
    place, *totals = several.results
    for at in range(whole, quads):
        place, totals[:sums] = quad(index(at), place, totals[:sums])
    *found, too_large = added_up(totals, sums)
    strips.store_sums(operands, group, [arith.subi(total, too_large) for total in found])


def _expanded(operands: Operands, line: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The quads of 16 rows in four columns, the values from `place` on at the set bits of the line's mask; the place after.

    A whole vector is loaded and then expanded, as in lower-expand.
    """
    _, masks, values = operands.weight
    bits, i1 = memref.load(masks, [line]), ir.IntegerType.get_signless(1)
    stored = vector_of(4 * LANES, ir.MemRefType(values.type).element_type)
    mask = vector.bitcast(vector_of(4 * LANES, i1), vector.broadcast(vector_of(1, bits.type), bits))
    packed = vector.load(stored, values, [place])
    expanded = llvm.call_intrinsic(stored, "llvm.x86.avx512.mask.expand.v64i8", [packed, zeros(stored), mask], [], [])
    return expanded, arith.addi(place, arith.index_castui(ir.IndexType.get(), math.ctpop(bits)))
