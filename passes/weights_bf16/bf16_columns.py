"""Packs columns of x in bf16, with tokens in lanes, as lines of 32 tokens, and interleaves two columns for products of pairs.

Interleaving works within 128 bits. So packing puts the 32 tokens of a line into an order that interleaving turns into two
vectors of 16 consecutive tokens. These numbers are for the 16 lanes of AVX-512. With NEON's 4 lanes, a line has 8 tokens.
"""

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.vectors import index, loop, mask_of, narrowed, transpose, vector_of, zeros
from gossamer.passes.weights.token_tile import TokenTile

LINE = 32
"""Number of bf16 in a cache line."""

_LANES = 16


def pack_columns(tile: TokenTile, packed: ir.Value, padded: int) -> None:
    """Packs the tile's tokens of x, with zeros from column K to column `padded`."""
    operands = tile.operands
    last = arith.subi(operands.memory.tokens, index(1))
    columns = index(tile.product.K)
    transpose_columns(operands.x, packed, columns, operands.first, last, padded, tile.vectors, tile.product.lanes)


def transpose_columns(
    source: ir.Value,
    packed: ir.Value,
    size: ir.Value,
    first: ir.Value,
    last: ir.Value,
    padded: int,
    vectors: int,
    lanes: int = _LANES,
) -> None:
    """Copies source[first + t, k] to packed[k, place of t] for k < size. For size <= k < padded (a multiple of 32) it stores 0.

    Tokens past the last one repeat it.
    """
    given, element = (ir.MemRefType(m.type).element_type for m in (source, packed))
    count, word = 2 * lanes, ir.IntegerType.get_signless(32)
    read, line = vector_of(count, given), vector_of(count, element)
    with loop(index(0), index(padded), index(count)) as columns:
        k = columns.induction_variable
        mask = mask_of(count, arith.subi(size, k))
        for v in range(0, vectors, 2):
            halves = []
            for u in range(v, min(v + 2, vectors)):
                tokens = [arith.addi(first, index(u * lanes + t)) for t in range(lanes)]
                places = [[arith.minui(token, last), k] for token in tokens]
                found = [vector.maskedload(read, source, at, mask, zeros(read)) for at in places]
                words = [vector.bitcast(vector_of(lanes, word), narrowed(f, line)) for f in found]
                halves.append([vector.bitcast(line, column) for column in transpose(words)])
            for c in range(count):
                column = vector.shuffle(halves[0][c // 2], halves[-1][c // 2], _places(len(halves), c % 2, lanes))
                vector.store(column, packed, [arith.addi(k, index(c)), index(v * lanes)])


def round_columns(source: ir.Value, packed: ir.Value, count: int, vectors: int, lanes: int) -> None:
    """Rounds sums source[k, t], with tokens in lanes, to columns packed[k, place of t] of bf16, for k < count."""
    read = vector_of(lanes, ir.MemRefType(source.type).element_type)
    with loop(index(0), index(count), index(1)) as columns:
        k = columns.induction_variable
        store_column([vector.load(read, source, [k, index(v * lanes)]) for v in range(vectors)], packed, k)


def store_column(values: list[ir.Value], packed: ir.Value, k: ir.Value) -> None:
    """Rounds vectors of tokens of column k, and stores them into packed[k]."""
    lanes = ir.VectorType(values[0].type).shape[0]
    half = vector_of(lanes, ir.MemRefType(packed.type).element_type)
    for v in range(0, len(values), 2):
        halves = [narrowed(value, half) for value in values[v : v + 2]]
        column = vector.shuffle(*halves, _order(lanes)) if len(halves) == 2 else halves[0]
        vector.store(column, packed, [k, index(v * lanes)])


def pairs_of(packed: ir.Value, vectors: range, first: ir.Value, second: ir.Value, lanes: int = _LANES) -> list[ir.Value]:
    """Interleaves two packed columns. Returns for each of these vectors of tokens the pairs of its tokens.

    `vectors` begin with a whole line.
    """
    element, found = ir.MemRefType(packed.type).element_type, list[ir.Value]()
    for v in vectors[::2]:
        count = min(2, vectors.stop - v)
        line = vector_of(count * lanes, element)
        a, b = (vector.load(line, packed, [k, index(v * lanes)]) for k in (first, second))
        found += [vector.shuffle(a, b, _interleaved(lanes, count, half)) for half in range(count)]
    return found


def _order(lanes: int) -> list[int]:
    """Returns the order of the tokens in a line of two vectors."""
    return [lanes * half + at + t for at in range(0, lanes, 4) for half in (0, 1) for t in range(4)]


def _places(lines: int, odd: int, lanes: int) -> list[int]:
    """Returns the places of one column in one or two vectors of words, in a line's order. A word has a token's two columns."""
    return [2 * token + odd for token in (range(lanes) if lines == 1 else _order(lanes))]


def _interleaved(lanes: int, lines: int, half: int) -> list[int]:
    """Returns the places of the pairs of a line's first or second vector, in two columns of one or two vectors of tokens."""
    tokens = range(lanes) if lines == 1 else [2 * at + 4 * half + t for at in range(0, lanes, 4) for t in range(4)]
    return [i for token in tokens for i in (token, lines * lanes + token)]
