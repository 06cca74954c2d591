"""Patterns say where the nonzeros of a pruned weight may lie. Their names are those of the field:

"unstructured"   anywhere in the matrix
"rows"           anywhere in a row, equally many in each
"2:4"            N:M, at most 2 in every 4 neighbours of a row
"32x1"           blocks of 32 rows x 1 column, kept or dropped as a whole
"64:2:16"        V:N:M (VENOM, Castro et al. 2023): a strip of 64 rows keeps 4 of every 16 columns, each row 2 of these 4
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import did_you_mean

_KEPT_COLUMNS = 4  # of every M in V:N:M, because a 2:4 tensor core selects from 4


class Pattern(Hashable, Protocol):
    """A rule for a mask.

    columns  the period of the pattern in columns: a mask can be made for any multiple of it
    rows     the period in rows
    density  the share of nonzeros if the pattern fixes it, else None
    """

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def density(self) -> float | None: ...

    def mask(self, scores: Tensor, density: float) -> Tensor:
        """Returns which elements to keep, bool [rows, columns]: those with a large sum of scores, which are not negative."""
        ...


@dataclass(frozen=True)
class Unstructured:
    """Keeps the largest scores of the matrix."""

    rows = columns = 1
    density = None

    def mask(self, scores: Tensor, density: float) -> Tensor:
        return _largest(scores.flatten(), kept_of(scores.numel(), density)).view_as(scores)


@dataclass(frozen=True)
class EqualRows:
    """Keeps the largest scores of each row."""

    rows = columns = 1
    density = None

    def mask(self, scores: Tensor, density: float) -> Tensor:
        return _largest(scores, kept_of(scores.shape[1], density))


class _OfEvery:
    """The base of patterns with n of every m neighbours in a row."""

    n: int
    m: int

    @property
    def columns(self) -> int:
        return self.m

    @property
    def density(self) -> float:
        return self.n / self.m


@dataclass(frozen=True)
class NM(_OfEvery):
    """Keeps the n largest of every m neighbours in a row, also of fewer neighbours at the end of a row."""

    n: int
    m: int
    rows = 1

    def mask(self, scores: Tensor, density: float) -> Tensor:
        del density
        groups = _padded(scores, 1, self.m).unflatten(1, (-1, self.m))
        return _largest(groups, self.n).flatten(1)[:, : scores.shape[1]]


@dataclass(frozen=True)
class Block:
    """Keeps the blocks with the largest sums of scores."""

    rows: int
    columns: int
    density = None

    def mask(self, scores: Tensor, density: float) -> Tensor:
        padded = _padded(scores.clamp(min=0), self.rows, self.columns, 0.0)
        blocks = padded.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows)).sum((1, 3))
        kept = _largest(blocks.flatten(), kept_of(blocks.numel(), density)).view_as(blocks)
        whole = kept.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return whole[: scores.shape[0], : scores.shape[1]]


@dataclass(frozen=True)
class VNM(_OfEvery):
    """Keeps 4 of every m columns in a strip of v rows, and of these the n largest of each row."""

    v: int
    n: int
    m: int

    @property
    def rows(self) -> int:
        return self.v

    def mask(self, scores: Tensor, density: float) -> Tensor:
        del density
        height, width = scores.shape
        padded = _padded(scores, self.v, self.m)
        groups = padded.unflatten(1, (-1, self.m)).unflatten(0, (-1, self.v))  # [strips, v, groups, m]
        columns = _largest(groups.clamp(min=0).sum(1, keepdim=True), min(_KEPT_COLUMNS, self.m))
        kept = _largest(torch.where(columns, groups, -torch.inf), self.n)
        return (kept & columns).flatten(2).flatten(0, 1)[:height, :width]


def pattern_of(name: str) -> Pattern:
    """Returns the pattern for a name as at the top of this file. OptionError for an unknown name or impossible numbers."""
    simple: dict[str, Pattern] = {"unstructured": Unstructured(), "rows": EqualRows()}
    if name in simple:
        return simple[name]
    if not isinstance(name, str):
        raise OptionError(f"pattern is {name!r}, must be a name such as '2:4'")
    kinds = ((r"(\d+):(\d+)", NM), (r"(\d+)x(\d+)", Block), (r"(\d+):(\d+):(\d+)", VNM))
    for spelling, kind in kinds:
        if found := re.fullmatch(spelling, name):
            numbers = [int(number) for number in found.groups()]
            if min(numbers) < 1 or (kind is not Block and numbers[-2] > numbers[-1]):
                break
            if kind is VNM and numbers[1] > _KEPT_COLUMNS:
                raise OptionError(
                    f"pattern '{name}' keeps {numbers[1]} of {_KEPT_COLUMNS} columns: must be at most {_KEPT_COLUMNS}"
                )
            return kind(*numbers)
    raise OptionError(
        f"pattern '{name}' is not known{did_you_mean(name, simple)}: there are 'unstructured', 'rows', N:M ('2:4'), blocks "
        "('32x1'), V:N:M ('64:2:8')"
    )


def mask_of(pattern: Pattern, scores: Tensor, density: float) -> Tensor:
    """Returns a pattern's mask for scores [outputs, inputs], or [groups, outputs / groups, inputs], taken as one matrix."""
    return pattern.mask(scores.flatten(0, -2), density).view(scores.shape)


def kept_of(elements: int, density: float) -> int:
    """Returns how many elements a density keeps: at least one, unless the density is 0."""
    return min(elements, max(round(density * elements), 1 if density > 0 else 0))


def _largest(scores: Tensor, count: int) -> Tensor:
    """Returns True at the `count` largest of the last dimension. NaN counts as largest; ties go to any of the equal ones."""
    if scores.dim() == 1 and scores.device.type == "cpu" and 0 < count < len(scores):
        return _largest_of_all(scores, count)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(-1, scores.topk(count, dim=-1, sorted=False).indices, True)


def _largest_of_all(scores: Tensor, count: int) -> Tensor:
    """Does the same through the smallest score that is kept: numpy's partition takes a tenth of `topk`'s time (torch 2.13).

    Partition is slow if many scores are equal, such as those of elements that must or cannot be kept. So the largest and the
    smallest scores are set apart first.
    """
    values = (scores.float() if scores.itemsize < 4 else scores).detach().numpy()
    largest, smallest = values.max(), values.min()
    if np.isnan(largest):
        values = np.nan_to_num(values, nan=np.inf, posinf=np.finfo(values.dtype).max)
        largest, smallest = np.inf, values.min()
    mask = values == largest
    missing = count - np.count_nonzero(mask)
    if missing > 0:
        between = values[(values > smallest) & ~mask]
        at = len(between) - missing
        least = np.partition(between, at)[at] if at >= 0 else smallest
        mask |= values >= least
    else:
        least = largest
    if surplus := np.count_nonzero(mask) - count:
        mask[np.flatnonzero(values == least)[-surplus:]] = False
    return torch.from_numpy(mask)


def _padded(scores: Tensor, rows: int, columns: int, value: float = -torch.inf) -> Tensor:
    height, width = scores.shape
    return torch.nn.functional.pad(scores, (0, -width % columns, 0, -height % rows), value=value)
