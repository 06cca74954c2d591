"""Measures which computes a product of a tall matrix with a narrow one faster: torch, or the schedule `tall`.

Either may win by a factor of two. For example, MKL wins with few columns on processors of its maker. Both are timed once for a
shape, and the ratio is kept on disk.
"""

from functools import lru_cache, partial
from statistics import median

import torch

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import fastest, random
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime.elements import FLOATS
from gossamer.sparsity.operations.tall_product import tall_product

_MOST_ROWS = 1 << 14
"""The most rows that are timed. For larger results the system clears memory for torch at every call, but not for `tall`."""

_ROUNDS = 3
_CLEAR = 1.05
"""How many times faster torch has to be to be used. With closer times, the order differs from run to run."""


def is_faster(rows: int, k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether `tall` takes no longer than torch for [rows, k] times [k, n], with as many threads as torch has now.

    True if Gossamer may not measure (GOSSAMER_CALIBRATE=0).
    """
    if not CALIBRATE.get():
        return True
    return _ratio(min(1 << (rows - 1).bit_length(), _MOST_ROWS), k, n, dtype, torch.get_num_threads()) < _CLEAR


@lru_cache(maxsize=1024)
def _ratio(rows: int, k: int, n: int, dtype: torch.dtype, threads: int) -> float:
    """Returns the time of `tall` over that of torch's product."""

    def measure() -> float:
        x, w = random(rows, k, dtype=dtype), random(k, n, dtype=dtype)
        us = fastest({"tall": partial(tall_product, x, w), "torch": partial(torch.mm, x, w)}, threads, _ROUNDS)
        return us["tall"] / us["torch"]

    return kept("tall", [rows, k, n, FLOATS[dtype], threads], measure, median)
