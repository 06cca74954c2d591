"""Columns of x in bf16, tokens in lanes: packed as lines of 32 tokens, and interleaved two by two for products of pairs.

Interleaving works on 128 bits at a time, so packing puts the 32 tokens of a line in the order that makes two vectors of 16
consecutive tokens of it.
"""

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.vectors import index, loop, mask_of, narrowed, transpose, vector_of, zeros
from gossamer.passes.weights.token_tile import TokenTile

LINE = 32
"""bf16 in a cache line."""

_LANES = 16
_ORDER = [_LANES * half + 4 * lane + t for lane in range(4) for half in (0, 1) for t in range(4)]  # of the tokens of a line


def pack_columns(tile: TokenTile, packed: ir.Value, padded: int) -> None:
    """The tile's tokens of x, with zeros from column K on to column `padded`."""
    operands = tile.operands
    last = arith.subi(operands.memory.tokens, index(1))
    transpose_columns(operands.x, packed, index(tile.product.K), operands.first, last, padded, tile.vectors)


def transpose_columns(
    source: ir.Value, packed: ir.Value, size: ir.Value, first: ir.Value, last: ir.Value, padded: int, vectors: int
) -> None:
    """source[first + t, k] -> packed[k, place of t] for k < size, zeros for size <= k < padded (a multiple of 32).

    Tokens past the last one repeat it.
    """
    given, element = (ir.MemRefType(m.type).element_type for m in (source, packed))
    read, line, word = vector_of(LINE, given), vector_of(LINE, element), ir.IntegerType.get_signless(32)
    with loop(index(0), index(padded), index(LINE)) as columns:
        k = columns.induction_variable
        mask = mask_of(LINE, arith.subi(size, k))
        for v in range(0, vectors, 2):
            halves = []
            for u in range(v, min(v + 2, vectors)):
                tokens = [arith.addi(first, index(u * _LANES + t)) for t in range(_LANES)]
                places = [[arith.minui(token, last), k] for token in tokens]
                found = [vector.maskedload(read, source, at, mask, zeros(read)) for at in places]
                words = [vector.bitcast(vector_of(_LANES, word), narrowed(f, line)) for f in found]
                halves.append([vector.bitcast(line, column) for column in transpose(words)])
            for c in range(LINE):
                column = vector.shuffle(halves[0][c // 2], halves[-1][c // 2], _places(len(halves), c % 2))
                vector.store(column, packed, [arith.addi(k, index(c)), index(v * _LANES)])


def round_columns(source: ir.Value, packed: ir.Value, count: int, vectors: int) -> None:
    """source[k, t] -> packed[k, place of t] for k < count: sums, tokens in lanes, as columns of bf16."""
    read = vector_of(_LANES, ir.MemRefType(source.type).element_type)
    with loop(index(0), index(count), index(1)) as columns:
        k = columns.induction_variable
        store_column([vector.load(read, source, [k, index(v * _LANES)]) for v in range(vectors)], packed, k)


def store_column(values: list[ir.Value], packed: ir.Value, k: ir.Value) -> None:
    """Vectors of tokens of column k, rounded, into packed[k]."""
    half = vector_of(_LANES, ir.MemRefType(packed.type).element_type)
    for v in range(0, len(values), 2):
        halves = [narrowed(value, half) for value in values[v : v + 2]]
        column = vector.shuffle(*halves, _ORDER) if len(halves) == 2 else halves[0]
        vector.store(column, packed, [k, index(v * _LANES)])


def pairs_of(packed: ir.Value, vectors: range, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """Two packed columns: for each of these vectors of tokens, whole lines of them, 16 tokens' pairs."""
    element, found = ir.MemRefType(packed.type).element_type, list[ir.Value]()
    for v in vectors[::2]:
        width = min(2, vectors.stop - v) * _LANES
        a, b = (vector.load(vector_of(width, element), packed, [k, index(v * _LANES)]) for k in (first, second))
        found += [vector.shuffle(a, b, _interleaved(width, half)) for half in range(width // _LANES)]
    return found


def _places(lines: int, odd: int) -> list[int]:
    """Out of one or two vectors of words, each a token's two columns: one column of all tokens, in the order of a line."""
    if lines == 1:
        return [2 * t + odd for t in range(_LANES)]
    return [2 * token + odd for token in _ORDER]


def _interleaved(width: int, half: int) -> list[int]:
    """16 tokens' pairs out of two columns of `width` tokens; the first or second 16 tokens of a line."""
    if width == _LANES:
        return [i for t in range(_LANES) for i in (t, width + t)]
    return [i for lane in range(4) for t in range(4) for i in (8 * lane + 4 * half + t, width + 8 * lane + 4 * half + t)]
