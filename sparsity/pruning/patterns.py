"""Patterns: where the nonzeros of a pruned weight may lie, by the name that the field gives them.

"unstructured"   anywhere in the matrix
"rows"           anywhere in a row, equally many in each
"2:4"            N:M, at most 2 in every 4 neighbours of a row
"32x1"           blocks of 32 rows x 1 column, kept or dropped as a whole
"64:2:16"        V:N:M (VENOM, Castro et al. 2023): in a strip of 64 rows 4 of every 16 columns, 2 of those a row
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

_KEPT_COLUMNS = 4  # of M, in V:N:M: what a 2:4 tensor core selects from


class Pattern(Hashable, Protocol):
    """A rule for a mask.

    columns  the pattern repeats every so many columns: a mask can be made for any multiple of them
    rows     the same for rows
    density  the share of nonzeros where the pattern decides it, else None
    """

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def density(self) -> float | None: ...

    def mask(self, scores: Tensor, density: float) -> Tensor:
        """Which elements to keep, bool [rows, columns], so that the sum of their scores (not negative) is large."""
        ...


@dataclass(frozen=True)
class Unstructured:
    """The largest scores of the matrix."""

    rows = columns = 1
    density = None

    def mask(self, scores: Tensor, density: float) -> Tensor:
        return _largest(scores.flatten(), kept_of(scores.numel(), density)).view_as(scores)


@dataclass(frozen=True)
class EqualRows:
    """The largest scores of each row."""

    rows = columns = 1
    density = None

    def mask(self, scores: Tensor, density: float) -> Tensor:
        return _largest(scores, kept_of(scores.shape[1], density))


class _OfEvery:
    """Patterns with n of every m neighbours in a row."""

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
    """The n largest of every m neighbours in a row; neighbours that are fewer, at the end of a row, lose equally many."""

    n: int
    m: int
    rows = 1

    def mask(self, scores: Tensor, density: float) -> Tensor:
        del density
        groups = _padded(scores, 1, self.m).unflatten(1, (-1, self.m))
        return _largest(groups, self.n).flatten(1)[:, : scores.shape[1]]


@dataclass(frozen=True)
class Block:
    """The blocks with the largest sums of scores."""

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
    """In strips of v rows 4 of every m columns, of those the n largest of a row."""

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
    """The pattern with a name as at the top of this file. OptionError if there is none, or its numbers make no sense."""
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
    """A pattern's mask for scores [outputs, inputs], or [groups, outputs / groups, inputs], which it takes for one matrix."""
    return pattern.mask(scores.flatten(0, -2), density).view(scores.shape)


def kept_of(elements: int, density: float) -> int:
    """How many of so many elements a density keeps: at least one, unless it is 0."""
    return min(elements, max(round(density * elements), 1 if density > 0 else 0))


def _largest(scores: Tensor, count: int) -> Tensor:
    """True where the `count` largest of the last dimension are, NaN among them, ties in favour of the first or the last."""
    if scores.dim() == 1 and scores.device.type == "cpu" and 0 < count < len(scores):
        return _largest_of_all(scores, count)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(-1, scores.topk(count, dim=-1, sorted=False).indices, True)


def _largest_of_all(scores: Tensor, count: int) -> Tensor:
    """The same by the least that is in: numpy's partition takes a tenth of the time of `topk` on CPUs (torch 2.13).

    Not where many are equal, as scores are of what must or cannot be kept: the least and the largest are told apart before.
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
