"""Notifies other code of models whose weights are no longer plain parameters, because they are masked or stored as nonzeros.

Libraries that save models themselves need this. Hooks at their import load this file, so it imports nothing that takes time.
"""

from collections.abc import Callable
from typing import Any

WHEN_HELD: list[Callable[[Any], None]] = []
"""Functions that are called with each such model."""


def say_held(model: Any) -> None:
    """Calls all these functions with a model."""
    for tell in WHEN_HELD:
        tell(model)
