"""Compares sizes that may be symbols, without loading torch's symbols and SymPy. Outside of graphs, sizes are plain numbers.

known_true(a == b)       whether the sizes are equal for all values of the symbols
guard_or_true(a == b)    the same, but also true if that is unknown

While torch.jit.trace runs, sizes and comparisons of them are tensors. Both functions take these by value, as `bool` does.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

known_true: Callable[[Any], bool] = bool
guard_or_true: Callable[[Any], bool] = bool


def take(known: Callable[[Any], bool], guard: Callable[[Any], bool]) -> None:
    """Installs torch's own functions. Called when torch's module of symbols is loaded."""
    global known_true, guard_or_true
    known_true, guard_or_true = _of_values(known), _of_values(guard)


def _of_values(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def tested(condition: Any) -> bool:
        return bool(condition) if isinstance(condition, Tensor) else test(condition)

    return tested
