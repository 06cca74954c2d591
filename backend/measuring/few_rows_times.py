"""Measures which computes a product of a few rows with a large weight faster: torch, or Gossamer's kernel for experts.

Such a product takes as long as its weight takes to read. Libraries read at half of the memory's speed on some processors, at
full speed on others. Both are timed once for a shape, on weights that no cache holds. The ratio is kept on disk.
"""

from functools import lru_cache, partial
from statistics import median

import torch
from torch import Tensor

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import fastest, random
from gossamer.backend.run.few_rows import FewRows
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime.elements import FLOATS
from gossamer.sparsity.experts.kernels import one_expert

_MOST_OUTPUTS = 4096
"""The most outputs that are timed. With more, both times grow in proportion."""

_BYTES = 64 << 20  # of all weights, which are read in turn so that none is in a cache
_ROUNDS = 3
_CLEAR = 0.9
"""The share of torch's time that the kernel must be below."""


def is_faster(rows: int, columns: int, outputs: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is clearly faster than torch for [rows, columns] times [columns, outputs], with torch's threads.

    False if Gossamer may not measure (GOSSAMER_CALIBRATE=0).
    """
    if not CALIBRATE.get():
        return False
    return _ratio(rows, columns, min(outputs, _MOST_OUTPUTS), dtype, torch.get_num_threads()) < _CLEAR


@lru_cache(maxsize=1024)
def _ratio(rows: int, columns: int, outputs: int, dtype: torch.dtype, threads: int) -> float:
    """Returns the time of the kernel over that of torch's product."""

    def measure() -> float:
        x = random(rows, columns, dtype=dtype)
        count = max(2, _BYTES // (columns * outputs * dtype.itemsize))
        weights = random(outputs, columns, dtype=dtype).repeat(count, 1, 1)
        own = FewRows(one_expert(dtype, columns), rows)
        us = fastest({"own": partial(_each, own, x, weights), "torch": partial(_each_of_torch, x, weights)}, threads, _ROUNDS)
        return us["own"] / us["torch"]

    return kept("few-rows", [rows, columns, outputs, FLOATS[dtype], threads], measure, median)


def _each(product: FewRows, x: Tensor, weights: Tensor) -> None:
    for weight in weights:
        product([x, weight])


def _each_of_torch(x: Tensor, weights: Tensor) -> None:
    for weight in weights:
        torch.mm(x, weight.t())
