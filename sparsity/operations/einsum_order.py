"""Chooses the order in which an einsum of three or more operands multiplies: pairs first, or all at once in one loop nest.

ij,jk,kl->il    A X W               X W first, or A X; all at once would multiply for each pair of k and l at each entry of A
ij,ik,jk->ij    A sampled by X Y    all at once: X Y would be dense

A sketch of an operand has its letters, the number of its entries, and the number of entries with each value of a letter. The
product of two sparse operands that share one letter has as many terms as the sum of the products of these counts (Sommer et
al., MNC, SIGMOD 2019). In other cases the model assumes that entries lie anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, inf, prod

from torch import Tensor

_DENSE, _SPARSE, _NESTED = 0.02, 0.05, 0.2
"""Nanoseconds of a multiply-add: of dense operands, with a sparse one, and in a loop nest of three or more. These and the
following times were measured on one thread of an AMD EPYC (znver5), for matrices of 2000 x 2000 with 1 % nonzeros."""

_MERGED, _MERGED_NESTED = 4.0, 70.0
"""Nanoseconds of a multiply-add if the result is sparse: of two operands, and of more."""

_WRITTEN, _CALL = 0.3, 3e4
"""Nanoseconds for an element of a result, and for a call."""

_GAIN = 1.5
"""Another order must be cheaper by this factor, because it also changes the order of sums."""

_FILLED = 0.25
"""From this density on, a product of sparse operands is dense."""

_LARGEST = 1 << 24
"""The most elements of a dense intermediate product, unless an operand has more."""

_TRIED = 6
"""Up to this number of operands, all orders are compared. With more, the cheapest pair is multiplied first."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """The properties of an operand that determine the cost of products with it.

    sizes    the size of each letter, in their order
    entries  the number of stored entries, or of all elements of a dense operand
    counts   for some letters of a sparse operand: how many entries have each value, float64
    """

    sizes: Mapping[str, int]
    entries: float
    sparse: bool = False
    counts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def letters(self) -> str:
        """A letter for each dimension."""
        return "".join(self.sizes)

    @property
    def cells(self) -> float:
        """The number of elements of the whole tensor."""
        return float(prod(self.sizes.values()))

    @property
    def density(self) -> float:
        """The share of stored entries."""
        return min(1.0, self.entries / max(1.0, self.cells))


@dataclass(frozen=True)
class Step:
    """A product of two operands. They leave the list of operands, and the result is appended to it."""

    first: int
    second: int
    letters: str
    sparse: bool


@dataclass(frozen=True)
class Order:
    """Products of pairs, and then of all operands that are left. `gain`: how many times cheaper it is than all at once."""

    steps: tuple[Step, ...]
    gain: float


def cheaper_order(operands: Sequence[Sketch], result: str, *, sparse: bool, kept: int | None = None) -> Order | None:
    """Returns the cheapest order, None if all at once is about as cheap.

    sparse  whether the result is sparse
    kept    the operand that gives a sparse result its pattern; it is in no pair
    """
    if not all(size for each in operands for size in each.sizes.values()):
        return None  # no elements, no order
    at_once = cost_at_once(operands, result, sparse)
    plan = _Plan(result, sparse, kept is not None)
    listed = [*operands]
    if kept is not None:
        listed = [operands[kept], *operands[:kept], *operands[kept + 1 :]]
    cost, steps = plan.best(tuple(listed))
    if not steps or at_once < _GAIN * cost:
        return None
    if kept is not None:  # steps for the original order of the operands
        steps = _replaced(steps, kept)
    return Order(steps, at_once / cost)


def _replaced(steps: Sequence[Step], kept: int) -> tuple[Step, ...]:
    """Converts steps for a list with operand `kept` in front to steps for the list with `kept` in its own place."""
    found = list[Step]()
    for step in steps:
        first, second = (place - 1 if place - 1 < kept else place for place in (step.first, step.second))
        found.append(Step(first, second, step.letters, step.sparse))
        kept -= (first < kept) + (second < kept)
    return tuple(found)


@dataclass(frozen=True)
class _Plan:
    """The search for an order. With `first_stays`, the first operand is in no pair."""

    result: str
    sparse: bool
    first_stays: bool

    def best(self, operands: tuple[Sketch, ...]) -> tuple[float, tuple[Step, ...]]:
        """Returns the cost of the cheapest order, and its products of pairs."""
        best = (cost_at_once(operands, self.result, self.sparse), tuple[Step, ...]())
        if len(operands) < 3:
            return best
        found = list[tuple[float, Step, tuple[Sketch, ...]]]()
        largest = max(_LARGEST, *(each.entries for each in operands))
        for i, j in combinations(range(int(self.first_stays), len(operands)), 2):
            others = tuple(each for n, each in enumerate(operands) if n not in (i, j))
            needed = set(self.result).union(*(each.sizes for each in others))
            cost, made = _product(operands[i], operands[j], needed, self.sparse)
            if made.entries <= largest:
                found.append((cost, Step(i, j, made.letters, made.sparse), (*others, made)))
        if len(operands) > _TRIED:
            found = [min(found, key=lambda each: each[0])] if found else []
        for cost, step, left in found:
            further, steps = self.best(left)
            if cost + further < best[0]:
                best = (cost + further, (step, *steps))
        return best


def _product(a: Sketch, b: Sketch, needed: set[str], stays_sparse: bool) -> tuple[float, Sketch]:
    """Returns the cost of the product of a pair, and the sketch of the product, with the letters that are still needed."""
    sizes = {letter: size for each in (a, b) for letter, size in each.sizes.items() if letter in needed}
    pairs = _pairs([a, b])
    cells = float(prod(sizes.values()))
    entries = cells * -_expm1(-pairs / cells) if a.sparse and b.sparse else cells
    pattern = next((each for each, other in ((a, b), (b, a)) if each.sparse and not other.sparse), None)
    if pattern is not None and set(pattern.sizes) == set(sizes):  # the product has the pattern of this operand
        return _CALL + pattern.entries * _SPARSE, Sketch(dict(pattern.sizes), pattern.entries, True, pattern.counts)
    sparse = a.sparse and b.sparse and len(sizes) > 1 and (stays_sparse or entries < _FILLED * cells)
    counts = {
        letter: (each.counts[letter] * (entries / max(1.0, each.entries))).clamp(max=cells / sizes[letter])
        for each in (a, b)
        for letter in each.counts
        if sparse and letter in sizes
    }
    made = Sketch(sizes, entries if sparse else cells, sparse, counts)
    return cost_at_once([a, b], made.letters, sparse), made


def cost_at_once(operands: Sequence[Sketch], result: str, sparse: bool) -> float:
    """Returns the nanoseconds of all operands at once; infinite for three or more dense ones, which torch does in pairs."""
    sizes = {letter: size for each in operands for letter, size in each.sizes.items()}
    among = [each for each in operands if each.sparse]
    if not among and len(operands) > 2:
        return inf
    written = float(prod(sizes[letter] for letter in result)) * _WRITTEN
    if not among:
        return _CALL + prod(map(float, sizes.values())) * _DENSE + written
    dense = prod(float(size) for letter, size in sizes.items() if not any(letter in each.sizes for each in among))
    sampled = len(among) == 1 and set(result) == set(among[0].sizes)
    if sparse and not sampled:
        return _CALL + _pairs(among) * dense * (_MERGED if len(operands) == 2 else _MERGED_NESTED)
    summed = {letter for each in operands for letter in each.sizes} - set(among[0].sizes) - set(result)
    simple = len(operands) == 2 or (sampled and len(operands) == 3 and len(summed) == 1)
    each = _SPARSE if simple and len(among) == 1 else _MERGED if dense == 1 else _NESTED
    return _CALL + _pairs(among) * dense * each + (0.0 if sampled and sparse else written)


def _pairs(operands: Sequence[Sketch]) -> float:
    """Returns how many combinations of entries agree in all letters that they share."""
    among = [each for each in operands if each.sparse] or operands
    holders, total = dict[str, Sketch](), 1.0
    for each in among:
        shared = [letter for letter in each.sizes if letter in holders]
        only = shared[0] if len(shared) == 1 else None
        theirs = holders[only].counts.get(only) if only is not None else None
        own = each.counts.get(only) if only is not None else None
        if own is not None and theirs is not None:
            total *= float(own @ theirs) / max(1.0, float(theirs.sum()))
        else:
            total *= each.entries / prod(max(1, each.sizes[letter]) for letter in shared)  # 0 if it has no elements
        holders |= dict.fromkeys(each.sizes, each)
    return total


def _expm1(x: float) -> float:
    return exp(x) - 1 if x < -1e-5 else x
