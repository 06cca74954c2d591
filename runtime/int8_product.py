"""gossamer::int8_product(x, weight): the exact product of two int8 matrices of any sizes, computed by torch.

x [T, K], weight [K, M], int8    →    [T, M], int32

`torch._int_mm` computes the same, with limits (PyTorch 2.13):

GPUs  x needs more than 16 rows; both sizes of the weight must be multiples of 8
CPUs  the result is wrong if x has a single column; without instructions for dot products of bytes it takes about 20 times as
      long as a product of floats
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.runtime.operations import Operation
from gossamer.runtime.target import host

_LEAST, _EIGHTS = 17, 8
_EXACT = 1024
"""So many products of two int8 add up to at most 2^24. A sum of floats is exact up to there, in any order."""


def _on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    if weight.shape[0] == 1:
        return x.int() * weight.int()
    return torch.ops.aten._int_mm(x, weight) if _has_byte_dots() else _by_floats(x, weight)


def _has_byte_dots() -> bool:
    return "bytedots" in host().instructions


def _by_floats(x: Tensor, weight: Tensor) -> Tensor:
    parts = zip(x.split(_EXACT, 1), weight.split(_EXACT), strict=True)
    first, *others = ((some.float() @ of.float()).int() for some, of in parts)
    return sum(others, first)


def _on_cuda(x: Tensor, weight: Tensor) -> Tensor:
    (tokens, columns), rows = x.shape, weight.shape[1]
    if 0 in (tokens, columns, rows):
        return x.new_zeros(tokens, rows, dtype=torch.int32)
    x, weight = filled_up(x, weight)
    return torch.ops.aten._int_mm(x, weight)[:tokens, :rows].contiguous()


def filled_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pads the factors to sizes that GPUs multiply. The upper left corner of their product is the product of the given ones."""
    (tokens, columns), rows = x.shape, weight.shape[1]
    along = -columns % _EIGHTS
    # The transpose of the weight is padded: weights lie in memory transposed, and cuBLAS takes the second factor so.
    return _padded(x, max(0, _LEAST - tokens), along), _padded(weight.t(), -rows % _EIGHTS, along).t()


def _padded(matrix: Tensor, down: int, along: int) -> Tensor:
    return pad(matrix, (0, along, 0, down)) if down or along else matrix  # pad copies even if it adds nothing


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.int32)


int8_product = Operation(
    "int8_product(Tensor x, Tensor weight) -> Tensor", _on_cpu, _on_cuda, _fake, tags=(torch.Tag.pt2_compliant_tag,)
).register()
