"""Works on rows of heads x features in vectors: sums over the features of each head, and repeats a head's value for them.

A row of G heads with F features each lies in memory, and in vectors of `lanes`, head after head. F need not divide the lanes.
The code generator knows the place of each lane, so a regrouping is a few shuffles, or none if heads fill whole vectors.

    dot(q, k, heads=8, size=8)     8 sums of 8 products: 4 multiplications, 7 additions, 8 shuffles of 16 lanes
    spread(p, heads=8, size=8)     4 vectors, each with two values of p, eight times each
"""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.vectors import vector_of, zeros


def spread(values: ir.Value, heads: int, size: int, lanes: int) -> list[ir.Value]:
    """Repeats the value of each head for all its `size` features, in vectors of `lanes`."""
    total = heads * size
    return [
        vector.shuffle(values, values, [min(at, total - 1) // size for at in range(first, first + lanes)])
        for first in range(0, total, lanes)
    ]


def repeated(values: ir.Value, lanes: int) -> ir.Value:
    """Repeats a short vector until it fills `lanes`."""
    width = ir.VectorType(values.type).shape[0]
    return values if width == lanes else vector.shuffle(values, values, [lane % width for lane in range(lanes)])


def gathered_sums(values: ir.Value, width: int) -> ir.Value:
    """Sums up lanes of the same element of a vector that is laid out as `repeated` does. Returns a vector of `width`."""
    lanes = ir.VectorType(values.type).shape[0]
    while lanes > width:
        lanes //= 2
        low, high = (vector.shuffle(values, values, range(first, first + lanes)) for first in (0, lanes))
        values = arith.addf(low, high)
    return values


def dot(left: Sequence[ir.Value], right: Sequence[ir.Value], heads: int, size: int, width: int) -> ir.Value:
    """Returns for each head the sum over its features of left * right: `width` lanes, with zeros behind the heads."""
    lanes = ir.VectorType(left[0].type).shape[0]
    if size % lanes:
        products = [arith.mulf(a, b) for a, b in zip(left, right, strict=True)]
        return _sums(products, heads, size, width)
    each = size // lanes
    sums = []
    for first in range(0, heads * each, each):
        total = arith.mulf(left[first], right[first])
        for at in range(first + 1, first + each):
            total = vector.fma(left[at], right[at], total)
        sums.append(total)
    return _sums(sums, heads, lanes, width)


def _sums(flat: list[ir.Value], heads: int, size: int, width: int) -> ir.Value:
    """Sums over each head's `size` elements. It adds the second half of every head to the first until one element is left."""
    while size > 1:
        half = -(-size // 2)
        low = _regrouped(flat, [h * size + f for h in range(heads) for f in range(half)])
        high = _regrouped(flat, [h * size + half + f if half + f < size else None for h in range(heads) for f in range(half)])
        flat, size = [arith.addf(a, b) for a, b in zip(low, high, strict=True)], half
    lanes = ir.VectorType(flat[0].type).shape[0]
    wanted = [h if h < heads else None for h in range(width)]
    whole = _gather(flat, [*wanted, *[None] * (lanes - width)])
    return whole if width == lanes else vector.shuffle(whole, whole, range(width))


def _regrouped(flat: Sequence[ir.Value], places: Sequence[int | None]) -> list[ir.Value]:
    """Returns vectors of the elements at these places, with 0 for None and behind the last one."""
    lanes = ir.VectorType(flat[0].type).shape[0]
    padded = [*places, *[None] * (-len(places) % lanes)]
    return [_gather(flat, padded[first : first + lanes]) for first in range(0, len(padded), lanes)]


def _gather(flat: Sequence[ir.Value], places: Sequence[int | None]) -> ir.Value:
    """Returns one vector of the elements at these places of several vectors, with 0 for None."""
    type_ = ir.VectorType(flat[0].type)
    lanes = type_.shape[0]
    sources: list[int | None] = list(dict.fromkeys(None if at is None else at // lanes for at in places))
    values = [zeros(vector_of(lanes, type_.element_type)) if source is None else flat[source] for source in sources]
    within = [0 if at is None else at % lanes for at in places]
    if len(sources) == 1 and (sources[0] is None or within == list(range(lanes))):
        return values[0]
    result = vector.shuffle(values[0], values[0], within)
    for source, value in zip(sources[1:], values[1:], strict=True):
        taken = [(None if at is None else at // lanes) == source for at in places]
        result = vector.shuffle(result, value, [lanes + within[lane] if t else lane for lane, t in enumerate(taken)])
    return result
