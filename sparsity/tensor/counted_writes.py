"""Writes of compiled code to SparseTensors are counted for their arrays, too: what keeps a copy of values looks at those.

    torch.compile(optimizer.step)()     →     p._version + 1, as AOTAutograd has it, and p._stored._version + 1

Inductor's code writes to the arrays uncounted, and AOTAutograd counts for the tensor that a user has alone (torch 2.13).
"""

from collections.abc import Iterable
from functools import wraps

import torch
from torch import Tensor

from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_increment_version = torch.autograd.graph.increment_version


@wraps(_increment_version)
def _increment_all(tensor: Tensor | Iterable[Tensor]) -> None:
    tensors = [tensor] if isinstance(tensor, Tensor) else list(tensor)
    arrays = [each._stored for each in tensors if isinstance(each, SparseTensor)]
    _increment_version([*tensors, *(each for each in arrays if not each.is_inference())])


def count_for_arrays() -> None:
    """From now on, wherever torch counts writes."""
    torch.autograd.graph.increment_version = _increment_all
