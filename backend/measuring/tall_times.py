"""Which of two ways to a product of a tall matrix with a narrow one is faster here: torch's own, or the schedule `tall`.

Libraries differ by a factor of two to either side: MKL is fast on processors of its maker, where it is ahead with few columns.
Both are timed once for a shape, and the ratio is kept on disk.
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
"""More are not timed. A larger result is one that the system clears for torch at every call, which `tall` is spared."""

_ROUNDS = 3
_CLEAR = 1.05
"""How far ahead torch's own has to be; closer ones change places from one run to the next."""


def is_faster(rows: int, k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether `tall` takes no longer than torch for [rows, k] times [k, n], with as many threads as torch has now.

    So it is taken to be where nothing may be measured (GOSSAMER_CALIBRATE=0).
    """
    if not CALIBRATE.get():
        return True
    return _ratio(min(1 << (rows - 1).bit_length(), _MOST_ROWS), k, n, dtype, torch.get_num_threads()) < _CLEAR


@lru_cache(maxsize=1024)
def _ratio(rows: int, k: int, n: int, dtype: torch.dtype, threads: int) -> float:
    """Time of `tall` over that of torch's own product."""

    def measure() -> float:
        x, w = random(rows, k, dtype=dtype), random(k, n, dtype=dtype)
        us = fastest({"tall": partial(tall_product, x, w), "torch": partial(torch.mm, x, w)}, threads, _ROUNDS)
        return us["tall"] / us["torch"]

    return kept("tall", [rows, k, n, FLOATS[dtype], threads], measure, median)
