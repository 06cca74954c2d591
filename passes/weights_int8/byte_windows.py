"""Sums of strips of a weight in windows of bytes (`ByteWindows`). They look up in registers the bytes of x for its nonzeros.

for each line of the strip:  iter_args(a vector of sums for each token, a vector of the excess)
  places[line], values[line]                   // four nonzeros of each of 16 rows
  vpdpbusd(sums, vpermb(places, the token's window of the line), values)
  vpdpbusd(excess, 128, values)                // x is given as x + 128, which vpdpbusd reads as unsigned
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
"""Number of rows of a strip, of sums in a vector, and of tokens whose sums are in registers."""

_WIDE = ByteWindows.COLUMNS
_HALF = _WIDE // 2
_LINE = ByteWindows.TOGETHER * LANES
_WHOLE = 704  # most columns for which 16 tokens have all windows side by side in half of a first-level cache
_AHEAD = 16  # how many lines ahead to prefetch
_CHAINS = 4  # independent sums that hide the latency of a dot product
_PERMUTE = "llvm.x86.avx512.permvar.qi.512"


@dataclass(frozen=True)
class Windows:
    """The places of the windows in a row of x: `apart` bytes from one to the next, and `before` bytes before the first."""

    apart: int = ByteWindows.STEP
    before: int = 0

    @classmethod
    def of(cls, columns: int) -> "Windows":
        """Returns the windows of a tile's tokens. If they fit the first-level cache, they are side by side, so that none
        crosses a cache line. Else they overlap."""
        return cls(_WIDE, _WIDE) if columns <= _WHOLE else cls()

    @property
    def beside(self) -> bool:
        """Whether they do not overlap."""
        return self.apart == _WIDE

    def column(self, number: ir.Value) -> ir.Value:
        """Returns the place where a window begins."""
        return arith.addi(arith.muli(number, index(self.apart)), index(self.before))

    def width(self, columns: int) -> int:
        """Returns the bytes of a row with `columns` columns."""
        return -(-columns // _WIDE) * _WIDE * self.apart // ByteWindows.STEP + self.before


def sums_of_lines(
    arrays: WeightArrays,
    begin: ir.Value,
    end: ir.Value,
    x: ir.Value,
    row: ir.Value,
    tokens: int,
    windows: "Windows | None" = None,
) -> list[ir.Value]:
    """Returns the sums of a strip with the lines [begin, end): a vector of i32 for each of `tokens` rows of `x` from `row` on.

    x has bytes with 128 added, and all columns of the last window.
    """
    laid = windows or Windows()
    _, numbers, *_, places, values = arrays.weight
    i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    middle, bytes_ = splat_of_bytes(_LINE, -128), vector_of(_LINE, i8)

    def add(at: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        start, column = arith.muli(at, index(_LINE)), laid.column(load_index(numbers, at))
        wanted, weights = (vector.load(bytes_, array, [start]) for array in (places, values))
        for array in (places, values):
            memref.prefetch(array, [arith.addi(start, index(_AHEAD * _LINE))], False, 3, True)
        held = [vector.load(bytes_, x, [arith.addi(row, index(t)), column]) for t in range(tokens)]
        found = [llvm.call_intrinsic(bytes_, _PERMUTE, [each, wanted], [], []) for each in held]
        return [multiplied(total, given, weights) for total, given in zip(totals, [*found, middle], strict=True)]

    ways, none = max(1, _CHAINS // (tokens + 1)), [zeros(vector_of(LANES, i32))] * (tokens + 1)
    *found, too_large = add_in_turns(begin, end, ways, ways, none, add)
    return [arith.subi(total, too_large) for total in found]


@dataclass(frozen=True)
class WindowStrips(InnerLoop):
    """Inner loops for a tile of a chain, with the tokens of `packed` row by row (`tokens_in_rows`).

    All strips are multiplied with a vector of tokens before the next vector, so that its x stays in the first-level cache.
    """

    columns: int

    @property
    def at_once(self) -> int:
        """One vector of tokens."""
        return 1

    def row(self, group: ir.Value, slot: ir.Value) -> ir.Value:
        """Returns the row of a slot. Rows are sorted, and `order` has them."""
        _, _, order, *_ = self.weight
        return load_index(order, arith.addi(arith.muli(group, index(LANES)), slot))

    def store(self, group: ir.Value, sums: ir.Value, token: ir.Value) -> None:
        """Stores the products of a strip into `sums`, [16 rows, tokens]."""
        begin, end = self.entries(group)
        with loop(index(0), index(ir.MemRefType(sums.type).shape[1]), index(LANES)) as starts:
            at, row = starts.induction_variable, arith.addi(token, starts.induction_variable)
            found = sums_of_lines(self, begin, end, self.packed, row, LANES, Windows.of(self.columns))
            for r, of_row in enumerate(transpose(found)):
                vector.store(of_row, sums, [index(r), at])


def tokens_in_rows(lines: ir.Value, columns: int, vectors: int) -> ir.Value:
    """Transposes lines of quads (quad_lines.py) to [tokens, windows], with zeros at the end."""
    quads, at_once, windows = columns // 4, _WIDE // 4, Windows.of(columns)
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    read, words = vector_of(_WIDE, i8), vector_of(LANES, i32)
    rows = memref.alloca(ir.MemRefType.get([vectors * LANES, windows.width(columns)], i8), [], [], alignment=64)

    def turn(first: ir.Value, count: int, v: ir.Value) -> None:
        places = [[arith.addi(first, index(i)), arith.muli(v, index(_WIDE))] for i in range(count)]
        given = [vector.bitcast(words, vector.load(read, lines, place)) for place in places]
        given += [zeros(words)] * (at_once - count)
        token, column = arith.muli(v, index(LANES)), windows.column(arith.divui(first, index(ByteWindows.STEP // 4)))
        for t, bytes_ in enumerate(transpose(given)):
            window, row = vector.bitcast(read, bytes_), arith.addi(token, index(t))
            vector.store(window, rows, [row, column])
            if windows.beside:  # its halves also belong to the windows before and after it
                for half, at in ((0, _HALF - _WIDE), (1, _WIDE)):
                    part = vector.extract_strided_slice(vector_of(_HALF, i8), window, [half * _HALF], [_HALF], [1])
                    vector.store(part, rows, [row, arith.addi(column, index(at))])

    whole = quads - quads % at_once
    with loop(index(0), index(vectors), index(1)) as vs:
        v = vs.induction_variable
        with loop(index(0), index(whole), index(at_once)) as firsts:
            turn(firsts.induction_variable, at_once, v)
        if whole < quads:
            turn(index(whole), quads - whole, v)
    return rows
