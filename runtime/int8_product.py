"""gossamer::int8_product(x, weight): the exact product of two matrices of int8, of any sizes, by torch.

x [T, K], weight [K, M], int8    →    [T, M], int32

What `torch._int_mm` computes; but that takes on GPUs more than 16 rows, and columns and rows of the weight in eights, and of a
single column it makes wrong numbers on CPUs (PyTorch 2.13).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.runtime.operations import Operation

_LEAST, _EIGHTS = 17, 8


def _on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.aten._int_mm(x, weight) if weight.shape[0] > 1 else x.int() * weight.int()


def _on_cuda(x: Tensor, weight: Tensor) -> Tensor:
    (tokens, columns), rows = x.shape, weight.shape[1]
    if 0 in (tokens, columns, rows):
        return x.new_zeros(tokens, rows, dtype=torch.int32)
    x, weight = filled_up(x, weight)
    return torch.ops.aten._int_mm(x, weight)[:tokens, :rows].contiguous()


def filled_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of sizes that GPUs multiply; the upper left corner of their product is that of the given ones."""
    (tokens, columns), rows = x.shape, weight.shape[1]
    along = -columns % _EIGHTS
    # Of the weight it is the transpose: that is how weights lie in memory, and how cuBLAS wants the second factor.
    return _padded(x, max(0, _LEAST - tokens), along), _padded(weight.t(), -rows % _EIGHTS, along).t()


def _padded(matrix: Tensor, down: int, along: int) -> Tensor:
    return pad(matrix, (0, along, 0, down)) if down or along else matrix  # else it would be copied


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.int32)


int8_product = Operation(
    "int8_product(Tensor x, Tensor weight) -> Tensor", _on_cpu, _on_cuda, _fake, tags=(torch.Tag.pt2_compliant_tag,)
).register()
