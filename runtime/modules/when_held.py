"""Who is told of models whose weights are no longer plain parameters, because they are under masks or stored as nonzeros.

Libraries that save models by themselves need to know. They are told of this file when they are imported, so it imports nothing
that takes time.
"""

from collections.abc import Callable
from typing import Any

WHEN_HELD: list[Callable[[Any], None]] = []
"""What is called with each such model."""


def say_held(model: Any) -> None:
    """Tells of such a model."""
    for tell in WHEN_HELD:
        tell(model)
