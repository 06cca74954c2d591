"""Columns of x in bf16, tokens in lanes: packed as lines of 32 tokens, and interleaved two by two for products of pairs.

Interleaving works on 128 bits at a time, so packing puts the 32 tokens of a line in the order that makes two vectors of 16
consecutive tokens of it.
"""

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.token_tile import TokenTile
from gossamer.passes.vectors import index, loop, mask_of, narrowed, transpose, vector_of, zeros

LINE = 32
"""bf16 in a cache line."""

_LANES = 16


def pack_columns(tile: TokenTile, packed: ir.Value, padded: int) -> None:
    """x[first + t, k] -> packed[k, place of t], zeros for K <= k < padded (a multiple of 32).

    Tokens past the last one repeat it.
    """
    operands, element = tile.operands, ir.MemRefType(packed.type).element_type
    given, word = ir.MemRefType(operands.x.type).element_type, ir.IntegerType.get_signless(32)
    read, line = vector_of(LINE, given), vector_of(LINE, element)
    last = arith.subi(operands.memory.tokens, index(1))
    lines = min(tile.vectors, 2)  # vectors of tokens that share a line
    with loop(index(0), index(padded), index(LINE)) as columns:
        k = columns.induction_variable
        mask = mask_of(LINE, arith.subi(index(tile.product.K), k))
        for v in range(0, tile.vectors, lines):
            halves = []
            for u in range(v, v + lines):
                tokens = [arith.addi(operands.first, index(u * _LANES + t)) for t in range(_LANES)]
                places = [[arith.minui(token, last), k] for token in tokens]
                found = [vector.maskedload(read, operands.x, at, mask, zeros(read)) for at in places]
                words = [vector.bitcast(vector_of(_LANES, word), narrowed(f, line)) for f in found]
                halves.append([vector.bitcast(line, column) for column in transpose(words)])
            for c in range(LINE):
                column = vector.shuffle(halves[0][c // 2], halves[-1][c // 2], _places(lines, c % 2))
                vector.store(column, packed, [arith.addi(k, index(c)), index(v * _LANES)])


def pairs_of(tile: TokenTile, packed: ir.Value, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """Two packed columns: for each vector of tokens, 16 tokens' pairs."""
    width = min(LINE, tile.vectors * _LANES)
    line, found = vector_of(width, ir.MemRefType(packed.type).element_type), []
    for start in range(0, tile.vectors * _LANES, width):
        a, b = (vector.load(line, packed, [k, index(start)]) for k in (first, second))
        found += [vector.shuffle(a, b, _interleaved(width, half)) for half in range(width // _LANES)]
    return found


def _places(lines: int, odd: int) -> list[int]:
    """Out of one or two vectors of words, each a token's two columns: one column of all tokens, in the order of a line."""
    if lines == 1:
        return [2 * t + odd for t in range(_LANES)]
    return [LINE * half + 2 * (4 * lane + t) + odd for lane in range(4) for half in (0, 1) for t in range(4)]


def _interleaved(width: int, half: int) -> list[int]:
    """16 tokens' pairs out of two columns of `width` tokens; the first or second 16 tokens of a line."""
    if width == _LANES:
        return [i for t in range(_LANES) for i in (t, width + t)]
    return [i for lane in range(4) for t in range(4) for i in (8 * lane + 4 * half + t, width + 8 * lane + 4 * half + t)]
