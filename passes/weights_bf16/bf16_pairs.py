"""Packs columns of x in bf16, two neighbours side by side. A line has the pairs of 16 tokens, for dot products and AMX.

packed[k / 2, 32 v + 2 t + k % 2] = x[token 16 v + t, k]
"""

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.vectors import index, loop, mask_of, narrowed, transpose, vector_of, zeros

LINE = 32
"""Number of bf16 in a line: the pairs of 16 tokens."""

_LANES = 16


def pack_lines(
    source: ir.Value,
    packed: ir.Value,
    size: ir.Value,
    first: ir.Value,
    last: ir.Value,
    padded: int,
    vectors: int,
    lanes: int = _LANES,
) -> None:
    """Packs source[first + t, k] into lines for k < size, with zeros for size <= k < padded (a multiple of 32).

    Tokens past the last one repeat it.
    """
    given, element = (ir.MemRefType(m.type).element_type for m in (source, packed))
    count = 2 * lanes
    read, line = vector_of(count, given), vector_of(count, element)
    words = vector_of(lanes, ir.IntegerType.get_signless(32))
    with loop(index(0), index(padded), index(count)) as columns:
        k = columns.induction_variable
        mask, pair = mask_of(count, arith.subi(size, k)), arith.divui(k, index(2))
        for v in range(vectors):
            tokens = [arith.addi(first, index(v * lanes + t)) for t in range(lanes)]
            places = [[arith.minui(token, last), k] for token in tokens]
            found = [narrowed(vector.maskedload(read, source, at, mask, zeros(read)), line) for at in places]
            for i, column in enumerate(transpose([vector.bitcast(words, f) for f in found])):
                vector.store(vector.bitcast(line, column), packed, [arith.addi(pair, index(i)), index(v * count)])


def round_lines(source: ir.Value, packed: ir.Value, count: int, vectors: int, lanes: int) -> None:
    """Rounds sums source[k, t], with tokens in lanes, to lines for k < count, an even number."""
    read = vector_of(lanes, ir.MemRefType(source.type).element_type)
    with loop(index(0), index(count), index(2)) as columns:
        k = columns.induction_variable
        even, odd = (
            [vector.load(read, source, [at, index(v * lanes)]) for v in range(vectors)] for at in (k, arith.addi(k, index(1)))
        )
        store_line(even, odd, packed, arith.divui(k, index(2)))


def round_rows(source: ir.Value, packed: ir.Value, count: int, vectors: int, lanes: int) -> None:
    """Rounds source[k, t] to packed[k, t] for k < count. Pairs are neighbouring tokens."""
    given, element = (ir.MemRefType(m.type).element_type for m in (source, packed))
    with loop(index(0), index(count), index(1)) as columns:
        for v in range(vectors):
            at = [columns.induction_variable, index(v * lanes)]
            vector.store(narrowed(vector.load(vector_of(lanes, given), source, at), vector_of(lanes, element)), packed, at)


def store_line(
    even: list[ir.Value], odd: list[ir.Value], packed: ir.Value, at: ir.Value, token: ir.Value | None = None
) -> None:
    """Rounds vectors of tokens of two neighbouring columns, and stores them into packed[at], from `token` on (default 0)."""
    lanes = ir.VectorType(even[0].type).shape[0]
    half = vector_of(lanes, ir.MemRefType(packed.type).element_type)
    for v, (a, b) in enumerate(zip(even, odd, strict=True)):
        line = vector.shuffle(narrowed(a, half), narrowed(b, half), [i for t in range(lanes) for i in (t, lanes + t)])
        place = index(2 * v * lanes)
        vector.store(line, packed, [at, place if token is None else arith.addi(arith.muli(token, index(2)), place)])
