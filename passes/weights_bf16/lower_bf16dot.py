"""lower-bf16dot: lowers a `kernel.spmm` of the schedule "bf16dot" to AVX512-BF16's dot products of blocks.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "bf16dot"} : ... tensor<3072x768xbf16, "vnni(...)">
after    scf.parallel (%task) = ...                     // tiles of 96 tokens x chunks of the strips of the weight
           func.call @region_tile12(...)                // or 8, 4, 2, 1 if there are fewer tokens
         func.func private @region_tile12(...)          // see strips.py
           for each block of the strip, each pair of its columns:  iter_args(12 tokens x 2 vectors)
             x86.avx512.dot(sums, 16 rows' pairs, the token's pair in all lanes)

Lanes are features, so y is stored without a transpose, and x is read unpacked.

Fastest for large blocks and one token: 1.19 times as fast as "blockvec" at "768x3072 32x32 90% 1 token bf16" in
benchmarks/results/intel-xeon-graniterapids/prediction-bf16.json. Without AMX it takes all chains of blocks:
benchmarks/results/amd-epyc-znver4/ffn-bf16.json.
"""

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector, x86

from gossamer.dialects.packing import Vnni
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.inner_loop import added_up, sets_of
from gossamer.passes.loops.product import Operands, products, shape_of, stored_of
from gossamer.passes.loops.vectors import in_all_lanes, index, load_index, loop, reserve_workspace, vector_of, zeros
from gossamer.passes.weights_bf16.dot_loop import HEIGHT, DotBlocks, rows_at_once
from gossamer.passes.weights_bf16.strips import LANES, Group, Strips, storage_in_blocks, tile_of

_FEATURE = "bf16dots"
_IN_CHAINS = 4  # vectors of tokens in a tile of a chain
_TOKENS = 96  # tokens of a tile: their x stays in the second-level cache
_GROUPS = ((17, 12), (8, 8), (4, 4), (2, 2), (1, 1))  # (fewest tokens, tokens whose sums are in registers)
_CHAINS = 8  # independent sums that hide the latency of a dot product
_UNROLLED = 4  # pairs of columns in a step of the loop
_LINE, _BYTES, _RESULTS = 1.05, 19.0, 9.0  # cycles of a product of vectors, bytes per cycle, cycles of a vector of results


def _storage(matrix: Matrix) -> Vnni | None:
    """Returns blocks with the width of the weight's, at most 32 columns, and a divisor of K."""
    return storage_in_blocks(matrix, _FEATURE, partial(_width, matrix.columns))


def _width(k: int, columns: int) -> int | None:
    return max(2, gcd(k, columns, 32)) if columns % 2 == 0 else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles for S stored elements and T' tokens in whole groups, the sum of

    - 1.05 S T' / 2 L for the products, or 2 S / 19 to read the elements if that is more,
    - 9 T' M / L for the results.
    """
    width = next(width for least, width in _GROUPS if tokens >= least)
    stored, computed = matrix.nonzeros / matrix.fill, -(-tokens // width) * width
    return max(_LINE * stored * computed / (2 * LANES), stored * 2 / _BYTES) + _RESULTS * computed * matrix.rows / LANES


def _in_chain(op: Any) -> ChainProduct:
    (rows, _), inner = shape_of(op), partial(DotBlocks, storage=stored_of(op, Vnni))
    return ChainProduct(_IN_CHAINS * LANES, HEIGHT, -(-rows // HEIGHT), 1, "lines", inner, rows_at_once)


def _gain_in_chains(matrix: Matrix, tokens: int) -> float:
    """In chains more rows share a load of x. But a single product reads x unpacked, which is faster for few tokens."""
    return 0.8 if tokens <= matrix.lanes else 1.03


BF16DOT = Family(
    "bf16dot",
    _storage,
    lambda matrix, stored: tile_of(matrix, stored, _FEATURE, (_TOKENS, _TOKENS)),
    _cycles,
    chain=_in_chain,
    gain=_gain_in_chains,
)


@dataclass(frozen=True)
class LowerBf16dot:
    """Lower products of blocks to dot products of pairs."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, BF16DOT.name):
            _lower(module, op)


def _lower(module: ir.Module, op: Any) -> None:
    strips = Strips(op)
    copied = 0 if strips.aligned else max(strips.tile)
    with op.location:
        strips.run([(least, strips.in_groups(n, copied, partial(_multiply, strips, n))) for least, n in _GROUPS])
    reserve_workspace(module, strips.workspace)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """Computes y for a group of tokens and a strip. Sums of a token are side by side, one vector for every 16 rows."""
    sums_type = vector_of(LANES, ir.F32Type.get())
    sums = tokens * strips.halves
    ways = max(1, min(_CHAINS // sums, strips.width // 2))
    with loop(group.begin, group.end, index(1), sets_of([zeros(sums_type)] * sums, ways)) as blocks:
        block = blocks.induction_variable
        k = arith.muli(load_index(operands.coordinates, block), index(strips.width))
        first = arith.muli(block, index(strips.height * strips.width))
        step = min(strips.width // 2, max(_UNROLLED, ways))
        with loop(index(0), index(strips.width // 2), index(step), list(blocks.inner_iter_args)) as pairs:
            totals = list(pairs.inner_iter_args)
            for i in range(step):
                pair = arith.addi(pairs.induction_variable, index(i))
                mine = slice((i % ways) * sums, (i % ways + 1) * sums)
                totals[mine] = _pair(strips, tokens, operands, group, k, first, pair, totals[mine])
            scf.YieldOp(totals)
        scf.YieldOp(list(pairs.results))
    strips.store_sums(operands, group, added_up(list(blocks.results), sums))


def _pair(
    strips: Strips, tokens: int, operands: Operands, group: Group, k: ir.Value, first: ir.Value, pair: ir.Value,
    sums: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Returns sums + w[rows, 2 columns] * x[tokens, 2 columns]."""
    line_type = vector_of(2 * LANES, strips.element)
    weights = [
        vector.load(line_type, operands.values, [arith.addi(first, arith.muli(at, index(2 * LANES)))])
        for at in (arith.addi(pair, index(half * strips.width // 2)) for half in range(strips.halves))
    ]
    column = arith.addi(k, arith.muli(pair, index(2)))
    found = []
    for t in range(tokens):
        given = in_all_lanes(vector.load(vector_of(2, strips.element), group.x, [arith.addi(group.row, index(t)), column]))
        for half, weight in enumerate(weights):
            found.append(x86.DotBF16Op(sums[t * strips.halves + half], weight, given).result)
    return found
