"""Describes the positions of a weight's nonzeros, with as much detail as kernels and predictions need.

    Pattern.of(weight)            density 0.1003, block (16, 16) full to 0.98, rows (nm None, skew 1.31), columns (...)
    Pattern.of(weight).rounded    density 0.1,    block (16, 16) full to 1.0,  rows (nm None, skew 1.5),  columns (...)

There are few rounded patterns. So similar layers share kernels and measurements.
"""

from dataclasses import dataclass
from math import comb

import torch

from gossamer.runtime.packers.nonzeros import count_nonzeros, nonzero_mask

_FULL = 0.75
"""Blocks with at least this share of nonzeros count as filled."""

_LARGEST = 64
"""The longest side of a block. Sides are powers of two."""

_GROUPS = ((1, 2), (1, 4), (2, 4), (1, 8), (2, 8), (4, 8), (1, 16), (2, 16), (4, 16), (8, 16))  # (n, m)
_STRIPS = (128, 64)  # v of V:N:M
_SKEWS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)
_SAMPLE = 64
"""The number of lines that are checked first, to rule out patterns quickly."""


@dataclass(frozen=True)
class Lines:
    """Regularities of the rows of a matrix, or of its columns.

    nm    (n, m) if at most n of every m aligned neighbours in a line are nonzero, and not by chance; else None
    skew  nonzeros of the fullest line divided by the mean; 1 if all lines have the same number
    v     for V:N:M: every v aligned lines together use only 4 of every m places; else None
    """

    nm: tuple[int, int] | None
    skew: float
    v: int | None = None

    @property
    def vnm(self) -> tuple[int, int, int] | None:
        """(v, n, m) if the lines have a V:N:M pattern, else None."""
        return None if self.v is None or self.nm is None else (self.v, *self.nm)


@dataclass(frozen=True)
class Pattern:
    """The positions of a matrix's nonzeros, in summary.

    density        share of nonzeros
    block          (rows, columns) of the aligned blocks that the nonzeros fill; None if they fill no blocks
    fill           share of nonzeros in the blocks that have any; 1 without blocks
    rows, columns  regularities along rows and along columns
    """

    density: float
    block: tuple[int, int] | None
    fill: float
    rows: Lines
    columns: Lines

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "Pattern":
        """Returns the pattern of a matrix of any dtype and strides. A NaN is a nonzero."""
        mask = nonzero_mask(matrix).contiguous()
        nonzeros, elements = count_nonzeros(mask), mask.numel()
        density = nonzeros / elements if elements else 1.0
        if nonzeros in (0, elements):
            even = Lines(None, 1.0)
            return cls(density, None, 1.0, even, even)
        block, fill = _block(mask, nonzeros)
        return cls(density, block, fill, _lines(mask, density), _lines(mask.t().contiguous(), density))

    @property
    def label(self) -> str:
        """The usual name of the pattern, such as "2:4" or "blocks of 16x16"; empty for unstructured nonzeros."""
        for lines, along in ((self.rows, ""), (self.columns, " in columns")):
            numbers = lines.vnm or lines.nm
            if numbers is not None:
                return ":".join(map(str, numbers)) + along
        return f"blocks of {self.block[0]}x{self.block[1]}" if self.block is not None else ""

    @property
    def transposed(self) -> "Pattern":
        """The pattern of the transposed matrix."""
        block = self.block and (self.block[1], self.block[0])
        return Pattern(self.density, block, self.fill, self.columns, self.rows)

    @property
    def rounded(self) -> "Pattern":
        """A pattern with rounded numbers: density to 5 % (finer below 5 %), fill to 10 %, skew up to the next of `_SKEWS`."""
        rows, columns = (Lines(lines.nm, _rounded_skew(lines.skew), lines.v) for lines in (self.rows, self.columns))
        return Pattern(rounded_density(self.density), self.block, round(self.fill, 1), rows, columns)


def rounded_density(density: float) -> float:
    """Rounds a density to the nearest 5 %, and below 5 % to 1, 2, 3 or 5 %."""
    steps = (0.01, 0.02, 0.03, 0.05)
    return min(steps, key=lambda s: abs(s - density)) if density < 0.05 else round(round(density * 20) / 20, 2)


def _rounded_skew(skew: float) -> float:
    return next((s for s in _SKEWS if skew <= s), _SKEWS[-1])


def _block(mask: torch.Tensor, nonzeros: int) -> tuple[tuple[int, int] | None, float]:
    """Returns the size of block that is filled best, with a preference for larger ones, and its fill.

    A block has a nonzero if one of its halves has. So sizes double, from 1 x 1 on, as long as blocks count as filled.
    """
    rows, columns = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -columns % _LARGEST, 0, -rows % _LARGEST))
    most = (rows * columns + nonzeros) / 2  # at least half the zeros have to be outside of blocks
    found, waiting = {(1, 1): 1.0}, {(1, 1): padded}
    while waiting:
        (r, c), occupied = waiting.popitem()
        for size in ((2 * r, c), (r, 2 * c)):
            if size in found or max(size) > _LARGEST:
                continue
            pairs = occupied.unflatten(0, (-1, 2)) if size[0] > r else occupied.unflatten(1, (-1, 2))
            halved = pairs[:, 0] | pairs[:, 1] if size[0] > r else occupied.view(torch.int16) != 0
            stored = count_nonzeros(halved) * size[0] * size[1]
            fill = nonzeros / stored
            if fill >= _FULL and stored <= most:
                found[size] = fill
                waiting[size] = halved
    best = max(found, key=lambda size: found[size] * (size[0] * size[1]) ** 0.1)
    return (best, found[best]) if best != (1, 1) else (None, 1.0)


def _lines(mask: torch.Tensor, density: float) -> Lines:
    """Returns the regularities along the rows of a mask that has nonzeros."""
    counts = mask.sum(1, dtype=torch.int32)
    skew = int(counts.max()) / (density * mask.shape[1])
    nm = _groups(mask, density)
    return Lines(nm, skew, _strip(mask, nm[1]) if nm is not None and nm[0] <= 2 and nm[1] > 4 else None)


def _groups(mask: torch.Tensor, density: float) -> tuple[int, int] | None:
    """Returns the n:m with the smallest share that holds for all groups, and would not hold by chance."""
    count, sample = mask.numel(), mask[:: -(-mask.shape[0] // _SAMPLE)]
    for n, m in sorted(_GROUPS, key=lambda nm: (nm[0] / nm[1], nm[1])):
        exceeded = sum(comb(m, k) * density**k * (1 - density) ** (m - k) for k in range(n + 1, m + 1))
        if exceeded * count / m >= 20 and _holds(sample, n, m) and _holds(mask, n, m):
            return n, m
    return None


def _strip(mask: torch.Tensor, m: int) -> int | None:
    """Returns the largest v for which every v aligned lines together use only 4 of every m places."""
    for v in _STRIPS:
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % m, 0, -mask.shape[0] % v))
        used = padded.view(-1, v, padded.shape[1]).any(1)
        if int(used.unflatten(1, (-1, m)).sum(2, dtype=torch.uint8).max()) <= 4:
            return v
    return None


def _holds(mask: torch.Tensor, n: int, m: int) -> bool:
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % m))
    return int(padded.unflatten(1, (-1, m)).sum(2, dtype=torch.uint8).max()) <= n
