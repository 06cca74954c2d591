"""Sums of strips of a weight in windows of bytes (`ByteWindows`): what its nonzeros want of x is looked up in registers.

for each line of the strip:  iter_args(a vector of sums for each token, how much too large they are)
  places[line], values[line]                   // four nonzeros of each of 16 rows
  vpdpbusd(sums, vpermb(places, the token's window of the line), values)
  vpdpbusd(how much, 128, values)              // x is given as x + 128, which vpdpbusd reads without a sign
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, vector

from gossamer.dialects.packing import ByteWindows
from gossamer.passes.loops.buffers import WeightArrays
from gossamer.passes.loops.inner_loop import InnerLoop, add_in_turns
from gossamer.passes.loops.vectors import index, load_index, loop, transpose, vector_of, zeros
from gossamer.passes.weights_int8.byte_products import multiplied, splat_of_bytes

LANES = 16
"""Rows of a strip, sums in a vector, and tokens whose sums are in registers."""

_WIDE = ByteWindows.COLUMNS
_LINE = ByteWindows.TOGETHER * LANES
_CHAINS = 4  # sums that have to be under way at once
_PERMUTE = "llvm.x86.avx512.permvar.qi.512"


def sums_of_lines(
    arrays: WeightArrays, begin: ir.Value, end: ir.Value, x: ir.Value, row: ir.Value, tokens: int
) -> list[ir.Value]:
    """The sums of a strip, whose lines are [begin, end): a vector of i32 for each of `tokens` rows of `x` from `row` on, which
    are bytes with 128 added, and with all columns of the last window."""
    _, windows, *_, places, values = arrays.weight
    i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    middle, bytes_ = splat_of_bytes(_LINE, -128), vector_of(_LINE, i8)

    def add(at: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        start, column = arith.muli(at, index(_LINE)), arith.muli(load_index(windows, at), index(ByteWindows.STEP))
        wanted, weights = (vector.load(bytes_, array, [start]) for array in (places, values))
        held = [vector.load(bytes_, x, [arith.addi(row, index(t)), column]) for t in range(tokens)]
        found = [llvm.call_intrinsic(bytes_, _PERMUTE, [each, wanted], [], []) for each in held]
        return [multiplied(total, given, weights) for total, given in zip(totals, [*found, middle], strict=True)]

    ways, none = max(1, _CHAINS // (tokens + 1)), [zeros(vector_of(LANES, i32))] * (tokens + 1)
    *found, too_large = add_in_turns(begin, end, ways, ways, none, add)
    return [arith.subi(total, too_large) for total in found]


@dataclass(frozen=True)
class WindowStrips(InnerLoop):
    """For a tile of a chain, where `packed` has its tokens row by row (`tokens_in_rows`)."""

    def row(self, group: ir.Value, slot: ir.Value) -> ir.Value:
        """Rows are sorted."""
        _, _, order, *_ = self.weight
        return load_index(order, arith.addi(arith.muli(group, index(LANES)), slot))

    def store(self, group: ir.Value, sums: ir.Value) -> None:
        """The products of a strip into `sums`, [16 rows, tokens]."""
        begin, end = self.entries(group)
        with loop(index(0), index(self.vectors * LANES), index(LANES)) as starts:
            token = starts.induction_variable
            for r, of_row in enumerate(transpose(sums_of_lines(self, begin, end, self.packed, token, LANES))):
                vector.store(of_row, sums, [index(r), token])


def tokens_in_rows(lines: ir.Value, columns: int, vectors: int) -> ir.Value:
    """Lines of quads (quad_lines.py) as [tokens, whole windows of columns], zeros at the end."""
    quads, at_once = columns // 4, _WIDE // 4
    wide, i8, i32 = columns + -columns % _WIDE, ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    read, words = vector_of(_WIDE, i8), vector_of(LANES, i32)
    rows = memref.alloca(ir.MemRefType.get([vectors * LANES, wide], i8), [], [], alignment=64)

    def turn(first: ir.Value, count: int, v: ir.Value) -> None:
        places = [[arith.addi(first, index(i)), arith.muli(v, index(_WIDE))] for i in range(count)]
        given = [vector.bitcast(words, vector.load(read, lines, place)) for place in places]
        given += [zeros(words)] * (at_once - count)
        token, column = arith.muli(v, index(LANES)), arith.muli(first, index(4))
        for t, bytes_ in enumerate(transpose(given)):
            vector.store(vector.bitcast(read, bytes_), rows, [arith.addi(token, index(t)), column])

    whole = quads - quads % at_once
    with loop(index(0), index(vectors), index(1)) as vs:
        v = vs.induction_variable
        with loop(index(0), index(whole), index(at_once)) as firsts:
            turn(firsts.induction_variable, at_once, v)
        if whole < quads:
            turn(index(whole), quads - whole, v)
    return rows
