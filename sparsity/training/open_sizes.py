"""Leaves the sizes of stored weights open in compiled code, so that weights which lose nonzeros need no new compilation.

L['self'].fc.weight._stored        [5000] → [s40]      code for any number of nonzeros: 5000, then 4200, …

Dynamo assumes that a parameter never changes its size, unless `torch.compiler.config.dynamic_sources` names it.
"""

import torch

_SOURCES = r".*\bweight('\])?\._(stored|coordinates\d+)$"


class OpenSizes:
    """Sizes are open from its creation until `close`."""

    _used = 0

    def __init__(self) -> None:
        self._is_open = True
        OpenSizes._used += 1
        if OpenSizes._used == 1:
            given = torch.compiler.config.dynamic_sources
            torch.compiler.config.dynamic_sources = f"{given},{_SOURCES}" if given else _SOURCES

    def close(self) -> None:
        """Restores Dynamo's setting, if no other object still needs open sizes."""
        OpenSizes._used -= self._is_open
        self._is_open = False
        if OpenSizes._used == 0:
            given = torch.compiler.config.dynamic_sources.split(",")
            torch.compiler.config.dynamic_sources = ",".join(each for each in given if each != _SOURCES)
