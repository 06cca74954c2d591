"""lower-expand: lowers a `kernel.spmm` of the schedule "expand", which loads bf16 as sparse and multiplies as dense.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "expand", tile = [96, 96]}
             : (..., tensor<3072x768xbf16, "vnnimap(reduction=1, rows=32)">) -> ...
after    scf.parallel (%task) = ...                     // chunks of the strips of the weight
           func.call @region_tile8(...)                 // or 4, 2, 1 if there are fewer tokens
         func.func private @region_tile8(...)           // see strips.py
           for each two columns:  iter_args(the place among the values, 8 tokens x 2 vectors of sums)
             vpexpandw(values[place..], 32 bits of the mask)     // 16 rows' pairs, with zeros
             x86.avx512.dot(sums, 16 rows' pairs, the token's pair in all lanes)

This is for a few tokens. The weight is read as its nonzeros and a bit for each element. As in a dense product, an infinity or a
NaN in x reaches all results of its token.

Fastest for weights that are half zeros and few tokens: 1.20 times as fast as "planes" at "768x3072 50% 1 token bf16" in
benchmarks/results/intel-xeon-graniterapids/prediction-bf16.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, memref, scf, vector, x86

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, VnniMap
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.inner_loop import added_up, sets_of
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import in_all_lanes, index, loop, reserve_workspace, vector_of, zeros
from gossamer.passes.weights_bf16.strips import LANES, Group, Strips

FEATURES = frozenset({"bf16dots", "avx512vbmi2"})
_TOKENS = 96  # tokens of a tile
_GROUPS = (8, 4, 2, 1)  # tokens whose sums are in registers
_CHAINS = 8  # independent sums that hide the latency of a dot product
_LINE, _PRODUCT, _BYTES = 2.3, 0.95, 19.0  # cycles to expand a line, cycles of a product, bytes per cycle
_RESULTS = 9.0  # cycles of a vector of results
_LINE_BITS = 512


def map_of(matrix: Matrix, features: frozenset[str]) -> VnniMap | None:
    """Returns a map of pairs; None if the target lacks the features."""
    return VnniMap(matrix.reduction, 32) if matrix.element == "bf16" and features <= matrix.features else None


def tile_of(matrix: Matrix, stored: Format | Packing, features: frozenset[str], tokens: int) -> tuple[int, ...] | None:
    """Returns (tokens, tokens) for the storage of `map_of`; None for others."""
    return (tokens, tokens) if stored == map_of(matrix, features) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles for T' tokens in whole groups, the sum of

    - 2.3 for every line of 32 elements, zeros included, and group, and 0.95 for every line and token;
      or the time to read M K / 8 + 2 nnz bytes at 19 per cycle if that is more,
    - 9 T' M / L for the results.
    """
    width = next((width for width in _GROUPS if tokens >= width), 1)
    groups, elements = -(-tokens // width), matrix.rows * matrix.columns
    lines = groups * elements / (2 * LANES) * (_LINE + _PRODUCT * width)
    read = (elements / 8 + 2 * matrix.nonzeros) / _BYTES
    return max(lines, read) + _RESULTS * groups * width * matrix.rows / LANES


EXPAND = Family(
    "expand",
    lambda matrix: map_of(matrix, FEATURES),
    lambda matrix, stored: tile_of(matrix, stored, FEATURES, _TOKENS),
    _cycles,
    most=_GROUPS[0],
)


@dataclass(frozen=True)
class LowerExpand:
    """Lower products that expand nonzeros to whole vectors."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, EXPAND.name):
            _lower(module, op)


def _lower(module: ir.Module, op: Any) -> None:
    strips = Strips(op)
    copied = 0 if strips.aligned else max(strips.tile)
    with op.location:
        strips.run([(n, strips.in_groups(n, copied, partial(_multiply, strips, n))) for n in _GROUPS])
    reserve_workspace(module, strips.workspace)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """Computes y for a group of tokens and a strip. Sums of a token are side by side, one vector for every 16 rows."""
    sums = tokens * strips.halves
    ways = max(1, _CHAINS // sums)
    pairs, none = strips.padded_K // 2, zeros(vector_of(LANES, ir.F32Type.get()))
    stored = -(-strips.K // VnniMap.COLUMNS) * VnniMap.COLUMNS // 2 * strips.halves
    lines = arith.muli(arith.divui(group.first_row, index(strips.height)), index(stored))
    unrolled = max(2, ways)
    whole = pairs - pairs % unrolled

    def pair(at: ir.Value, place: ir.Value, totals: list[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
        """Returns the place after a pair of columns, and the sums plus its products."""
        line, weights = arith.addi(lines, arith.muli(at, index(strips.halves))), []
        for half in range(strips.halves):
            expanded, place = expanded_line(operands.weight, arith.addi(line, index(half)), place)
            weights.append(expanded)
        column, found = arith.muli(at, index(2)), []
        for t in range(tokens):
            x = vector.load(vector_of(2, strips.element), group.x, [arith.addi(group.row, index(t)), column])
            given, mine = in_all_lanes(x), totals[t * strips.halves : (t + 1) * strips.halves]
            found += [x86.DotBF16Op(total, weight, given).result for total, weight in zip(mine, weights, strict=True)]
        return place, found

    with loop(index(0), index(whole), index(unrolled), [group.begin, *sets_of([none] * sums, ways)]) as several:
        place, *totals = several.inner_iter_args
        for i in range(unrolled):
            mine = slice(i % ways * sums, (i % ways + 1) * sums)
            place, totals[mine] = pair(arith.addi(several.induction_variable, index(i)), place, totals[mine])
        scf.YieldOp([place, *totals])
    place, *totals = several.results
    for at in range(whole, pairs):
        place, totals[:sums] = pair(index(at), place, totals[:sums])
    strips.store_sums(operands, group, added_up(totals, sums))


def expanded_line(weight: Sequence[ir.Value], line: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Expands a line of a map to 64 bytes: the values from `place` on at the set bits of its mask, zeros elsewhere.

    Returns the line and the place after its values. A whole vector is loaded and then expanded, because an expansion from
    memory is a hundred times slower on AMD's Zen 4.
    """
    _, masks, values = weight
    bits, element = memref.load(masks, [line]), ir.MemRefType(values.type).element_type
    size = ir.IntegerType(bits.type).width
    words = vector_of(size, ir.IntegerType.get_signless(_LINE_BITS // size))
    mask = vector.bitcast(vector_of(size, ir.IntegerType.get_signless(1)), vector.broadcast(vector_of(1, bits.type), bits))
    stored = vector_of(size, element)
    packed = vector.bitcast(words, vector.load(stored, values, [place]))
    nothing = arith.constant(words, ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(words.element_type, 0)))
    expand = f"llvm.x86.avx512.mask.expand.v{size}i{_LINE_BITS // size}"
    expanded = llvm.call_intrinsic(words, expand, [packed, nothing, mask], [], [])
    count = arith.index_castui(ir.IndexType.get(), math.ctpop(bits))
    return vector.bitcast(stored, expanded), arith.addi(place, count)
