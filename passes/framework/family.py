"""Declares families of schedules. A family is one way to compute y[t, m] = epilogue(sum_k x[t, k] w[m, k]) with a sparse w.

A family says how it stores the weight, how it tiles the product, what it costs, and how it runs in chains. It is declared in
the file of its lowering. The variable has the family's name in capitals, by which by_name.py finds it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import sqrt
from statistics import NormalDist
from typing import Any

from gossamer.dialects.elements import FLOATS, WEIGHTS
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.chain_product import ChainProduct

_BYTES = {"f32": 4, "f64": 8, "i32": 4}  # bytes of a sum


@dataclass(frozen=True)
class Matrix:
    """What a schedule may know of the weight of a product, and of the target. Kernels never depend on values or positions.

    rows, columns  M (results of a token) and K (elements that a sum adds up)
    reduction      dimension of the stored tensor that is summed over: 1 if it is stored as [M, K], 0 as [K, M]
    element        "f32", "f64", "bf16", "f16", or "i8" for a quantized weight, whose products with i8 are summed in i32
    bits           width of the target's vectors
    density        share of nonzeros, rounded
    block          rows x columns of the aligned blocks that the nonzeros fill; None if they lie at random. Smaller blocks
                   that divide it have the same share of nonzeros.
    fill           share of nonzeros in those blocks, rounded; 1 without blocks
    nm             (n, m) if every m aligned neighbours along K have at most n nonzeros
    vnm            (v, n, m) if every m aligned neighbours along K have at most n nonzeros, in at most 4 columns for every v
                   aligned rows
    skew           nonzeros of the longest row over the mean of all rows, rounded up; 1 if all rows have equally many
    features       instructions that only some targets have: "bf16dots", "avx512vbmi", "avx512vbmi2", "bytedots", "amx",
                   "amxint8"
    l1d            bytes of the target's first-level data cache
    groups         for weights quantized in groups of 16 aligned neighbours along K: bits of each integer, and of the scale of
                   each group; None for floats
    given          element of x if it differs from the weight's: "f32" if a product of f32 may be rounded to bf16
    """

    rows: int
    columns: int
    reduction: int
    element: str
    bits: int
    density: float = 0.1
    block: tuple[int, int] | None = None
    fill: float = 1.0
    nm: tuple[int, int] | None = None
    vnm: tuple[int, int, int] | None = None
    skew: float = 1.25
    features: frozenset[str] = frozenset()
    groups: tuple[int, int] | None = None
    given: str | None = None
    l1d: int = 32 << 10

    @property
    def lanes(self) -> int:
        """Number of sums in a vector. Narrow floats are summed in f32, integers of 8 bits in i32."""
        return self.bits // (8 * _BYTES[WEIGHTS[self.element].sums])

    @property
    def nonzeros(self) -> float:
        """Expected number of nonzeros."""
        return self.rows * self.columns * self.density

    def longest_of(self, rows: int) -> float:
        """Returns the nonzeros of the longest of `rows` rows over the mean, without the part that chance explains.

        Assumes that the logarithms of the rows' nonzeros are normally distributed. Then `skew` gives their spread.
        """
        farthest, mean = _highest(self.rows), self.columns * self.density
        if farthest <= 0 or mean <= 0:
            return 1.0
        by_chance = 1 + farthest * sqrt((1 - self.density) / mean)
        return max(1.0, self.skew / by_chance) ** (_highest(rows) / farthest)

    def evenly(self, rows: int, columns: int) -> bool:
        """Whether `rows` aligned rows have equally many nonzeros in each block of `columns` columns: by n:m or tall blocks."""
        by_groups = self.nm is not None and columns % self.nm[1] == 0
        return by_groups or (self.block is not None and self.block[0] % rows == 0)

    def __str__(self) -> str:
        """Returns the same text in every process, for keys of caches. So it sorts sets, which have no fixed order."""
        texts = (f"{f.name}={sorted(v) if isinstance(v := getattr(self, f.name), frozenset) else v}" for f in fields(self))
        return f"Matrix({', '.join(texts)})"


def _highest(count: int) -> float:
    """Returns the expected highest of `count` normal numbers, in standard deviations (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _values_read(matrix: Matrix) -> float:
    return matrix.nonzeros * WEIGHTS[matrix.element].bytes


def entries_read(matrix: Matrix) -> float:
    """Returns the bytes of the values, with the zeros in blocks, and of a coordinate of 16 bits for each nonzero."""
    return _values_read(matrix) / matrix.fill + 2 * matrix.nonzeros


def _tiles_gain(matrix: Matrix, tokens: int) -> float:
    return 1.15 - 0.4 * matrix.density


@dataclass(frozen=True)
class Family:
    """One way to schedule a product.

    name       its name in the option `schedule` and in the attribute `schedule` of `kernel.spmm`
    storage    the format or packing of the weight; None if the family cannot compute with such a matrix
    tile       the numbers in the attribute `tile`, the tokens of a tile first; None for a storage that it cannot read
    cycles     predicted cycles of one core for a matrix and a number of tokens, without the call itself
    most       most tokens for which it is considered
    chain      how a `kernel.spmm` of it runs in a chain; None if it cannot
    chained    the storage of a weight in a chain; None if it is `storage`
    gain       about how many times as fast a product with a matrix and a number of tokens is in a chain. A chain transposes
               nothing between products, but the sums of all rows of a tile compete for the second-level cache. Measured on
               tiles that are whole vectors of tokens.
    floats     whether it multiplies floats
    integers   whether it multiplies quantized elements
    needs      instructions of the target that it needs in chains
    read       fewest bytes of a matrix that it reads
    """

    name: str
    storage: Callable[[Matrix], Format | Packing | None]
    tile: Callable[[Matrix, Format | Packing], tuple[int, ...] | None]
    cycles: Callable[[Matrix, int], float]
    most: float = float("inf")
    chain: Callable[[Any], ChainProduct] | None = None
    chained: Callable[[Matrix], Format | Packing] | None = None
    gain: Callable[[Matrix, int], float] = _tiles_gain
    floats: bool = True
    integers: bool = False
    needs: frozenset[str] = frozenset()
    read: Callable[[Matrix], float] = _values_read

    def stores(self, matrix: Matrix, chain: bool = False) -> Format | Packing | None:
        """Returns `storage`, or `chained` in a chain. None if the family does not multiply such elements."""
        able = self.floats if matrix.element in FLOATS else self.integers
        stored = self.storage(matrix) if able else None
        return self.chained(matrix) if chain and stored is not None and self.chained is not None else stored

    @property
    def lowering(self) -> str:
        """The name of the pass that lowers it."""
        return f"lower-{self.name}"
