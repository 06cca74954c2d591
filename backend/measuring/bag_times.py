"""Measures which computes bags of embeddings faster in inference: torch's kernel for each table, or Gossamer's for all tables.

Both wait for rows from memory, and prefetch them. The best distance of prefetches and the time of a call differ between
machines. Both are timed once for a shape, on the model's own tables, with other rows at every call. The ratio is kept on disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import fastest

CLEAR = 0.95
"""The largest share of torch's time with which Gossamer's kernel is used."""

_DRAWS, _ROUNDS = 4, 3

_Lists = Sequence[tuple[Tensor, Tensor, Tensor | None]]
"""For each table the indices, the offsets and the weights."""


@dataclass(frozen=True, eq=False)
class BagsOfTables:
    """Bags that one call can compute.

    tables    [rows, columns] each, contiguous
    bags      number of bags of each table
    entries   number of entries in all bags of each table
    kind      "sum", "mean" or "max"
    integers  the type of indices
    weighted  whether rows are multiplied with weights
    """

    tables: Sequence[Tensor]
    bags: Sequence[int]
    entries: Sequence[int]
    kind: str
    integers: torch.dtype
    weighted: bool

    def ratio(self) -> float:
        """Returns the time of Gossamer's call over that of torch's calls, with torch's number of threads."""
        sizes = [list(each) for each in zip(map(tuple, (t.shape for t in self.tables)), self.bags, self.entries, strict=True)]
        key = [sizes, str(self.tables[0].dtype), self.kind, str(self.integers), self.weighted, torch.get_num_threads()]
        return kept("bags", key, self._measured, median)

    def _measured(self) -> float:
        with torch.no_grad():
            drawn = torch.Generator().manual_seed(0)
            lists = [self._drawn(drawn) for _ in range(_DRAWS)]
            ways: dict[str, Callable[[_Lists], object]] = {"own": self._by_us, "torch": self._by_torch}
            calls = {name: partial(_each, way, lists) for name, way in ways.items()}
            us = fastest(calls, torch.get_num_threads(), _ROUNDS)
        return us["own"] / us["torch"]

    def _drawn(self, drawn: torch.Generator) -> _Lists:
        """Returns random entries, about as many in each bag of a table."""
        made = []
        for table, bags, entries in zip(self.tables, self.bags, self.entries, strict=True):
            indices = torch.randint(0, table.shape[0], (entries,), generator=drawn).to(self.integers)
            offsets = (torch.arange(bags) * entries // bags).to(self.integers)
            made.append((indices, offsets, torch.rand(entries, generator=drawn).to(table.dtype) if self.weighted else None))
        return made

    def _by_us(self, lists: _Lists) -> list[Tensor]:
        indices, offsets, weights = ([each[place] for each in lists] for place in range(3))
        columns, padding = [table.shape[1] for table in self.tables], [-1] * len(lists)
        found: list[Tensor] = torch.ops.gossamer.sum_bags.default(
            list(self.tables), indices, offsets, weights, padding, self.kind, False, [], columns
        )
        return found

    def _by_torch(self, lists: _Lists) -> list[Tensor]:
        return [
            functional.embedding_bag(indices, table, offsets, mode=self.kind, per_sample_weights=weights)
            for table, (indices, offsets, weights) in zip(self.tables, lists, strict=True)
        ]


def _each(way: Callable[[_Lists], object], lists: Sequence[_Lists]) -> None:
    for each in lists:
        way(each)
