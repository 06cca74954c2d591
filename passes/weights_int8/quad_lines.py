"""Packs columns of a quantized x, four neighbours side by side (two for words). A line has those of all tokens of a tile.

bytes   packed[k / 4, 4 L v + 4 t + k % 4] = x[token L v + t, k] + 128               for vpdpbusd, which multiplies u8 by s8;
                                                                                     without the 128 for sdot, which takes s8
words   packed[k / 2, 2 L v + 2 t + k % 2] = x[token L v + t, k], in 16 bits         for vpmaddwd
"""

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.vectors import index, loop, mask_of, transpose, vector_of, zeros
from gossamer.passes.weights.token_tile import TokenTile
from gossamer.passes.weights_int8.byte_products import as_multiplied


def pack_lines(tile: TokenTile, packed: ir.Value, columns: int, words: bool) -> None:
    """Packs the tile of x [tokens, columns] as lines, with zeros after the last column. Tokens past the last one repeat it."""
    at_once = (2 if words else 4) * tile.lanes
    whole = columns - columns % at_once
    with loop(index(0), index(whole), index(at_once)) as ks:
        _pack(tile, packed, ks.induction_variable, at_once, words)
    if whole < columns:
        _pack(tile, packed, index(whole), at_once, words, columns - whole)


def _pack(tile: TokenTile, packed: ir.Value, k: ir.Value, count: int, words: bool, left: int | None = None) -> None:
    """Packs the lines of `count` columns from k on, of which only `left` exist if that is given."""
    i8, i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
    read, dwords = vector_of(count, i8), vector_of(tile.lanes, i32)
    line = vector_of(count, ir.MemRefType(packed.type).element_type)
    mask = None if left is None else mask_of(count, index(left))
    last = arith.subi(tile.operands.memory.tokens, index(1))
    first = arith.divui(k, index(2 if words else 4))
    with loop(index(0), index(tile.vectors), index(1)) as vectors:  # a loop is as fast as unrolled code, and compiles faster
        v = vectors.induction_variable
        start, place = arith.addi(tile.operands.first, arith.muli(v, index(tile.lanes))), arith.muli(v, index(count))
        rows = []
        for t in range(tile.lanes):
            at, x = [arith.minui(arith.addi(start, index(t)), last), k], tile.operands.x
            given = vector.load(read, x, at) if mask is None else vector.maskedload(read, x, at, mask, zeros(read))
            rows.append(vector.bitcast(dwords, arith.extsi(vector_of(count, i16), given) if words else given))
        for i, column in enumerate(transpose(rows)):
            given = vector.bitcast(line, column)
            stored = given if words else as_multiplied(given, tile.product.lanes)
            vector.store(stored, packed, [arith.addi(first, index(i)), place])
