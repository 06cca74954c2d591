"""Who is told of models whose weights are no longer plain parameters, because they are under masks or stored as nonzeros.

Libraries that save models by themselves need to know. It is here because it must be there before anything of Gossamer that takes
time to import.
"""

from collections.abc import Callable
from typing import Any

WHEN_HELD: list[Callable[[Any], None]] = []
"""What is called with each such model."""


def say_held(model: Any) -> None:
    """Tells of such a model."""
    for tell in WHEN_HELD:
        tell(model)
