"""Stored weights that lose nonzeros in training: the sizes of their arrays are open in what is compiled, so that it stays.

L['self'].fc.weight._stored        [5000] → [s40]      code for any number of nonzeros: 5000, then 4200, …

Dynamo holds a parameter to have one size for ever, but where `torch.compiler.config.dynamic_sources` names it. In compiled
steps of an optimizer, open sizes of parameters are an error of Dynamo (2.13): there, arrays are marked to have those of now.
"""

from collections.abc import Iterable

import torch

from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_SOURCES = r".*\bweight('\])?\._(stored|coordinates\d+)$"
_FIXED = "_dynamo_static_indices"  # what torch._dynamo.mark_static leaves on a tensor
_OPEN = "_dynamo_propagated_dynamic_indices"  # and what compiled code does


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


def fix_sizes(tensors: Iterable[SparseTensor], fixed: bool) -> None:
    """Whether the sizes of these tensors' arrays are those of now in what is compiled meanwhile."""
    for array in (array for tensor in tensors for array in tensor.components):
        if fixed:
            setattr(array, _FIXED, set(range(array.dim())))
            vars(array).pop(_OPEN, None)
        elif hasattr(array, _FIXED):
            delattr(array, _FIXED)
