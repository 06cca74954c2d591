"""Stored weights that lose nonzeros in training: the sizes of their arrays are open in what is compiled, so that it stays.

L['self'].fc.weight._stored        [5000] → [s40]      code for any number of nonzeros: 5000, then 4200, …

Dynamo holds a parameter to have one size for ever, but where `torch.compiler.config.dynamic_sources` names it.
"""

import torch

_SOURCES = r".*\bweight('\])?\._(stored|coordinates\d+)$"


class OpenSizes:
    """From now on, until `close`."""

    _used = 0

    def __init__(self) -> None:
        self._is_open = True
        OpenSizes._used += 1
        if OpenSizes._used == 1:
            given = torch.compiler.config.dynamic_sources
            torch.compiler.config.dynamic_sources = f"{given},{_SOURCES}" if given else _SOURCES

    def close(self) -> None:
        """Sizes are as Dynamo has them."""
        OpenSizes._used -= self._is_open
        self._is_open = False
        if OpenSizes._used == 0:
            given = torch.compiler.config.dynamic_sources.split(",")
            torch.compiler.config.dynamic_sources = ",".join(each for each in given if each != _SOURCES)
