"""What is known of sizes. Outside of graphs they are numbers, and torch's symbols, with SymPy, need not be loaded.

known_true(a == b)       whether it holds whatever symbols stand for
guard_or_true(a == b)    likewise, but true where that is not known
"""

from collections.abc import Callable
from typing import Any

known_true: Callable[[Any], bool] = bool
guard_or_true: Callable[[Any], bool] = bool


def take(known: Callable[[Any], bool], guard: Callable[[Any], bool]) -> None:
    """To be called once there may be symbols, with torch's own functions."""
    global known_true, guard_or_true
    known_true, guard_or_true = known, guard
