"""Counts writes of compiled code to SparseTensors for their arrays, too, because copies of values check those counts.

    torch.compile(optimizer.step)()     →     p._version + 1, by AOTAutograd, and p._stored._version + 1

Inductor's code writes to the arrays without counting, and AOTAutograd counts only for the user's tensor (torch 2.13).
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
    """Makes torch's function that counts writes count for arrays, too, from now on."""
    torch.autograd.graph.increment_version = _increment_all
