"""gossamer::row_sums(weight): the sum of each row of a matrix of int8, as f32; found when the matrix is new.

weight [M, K], int8    →    [M], float32
"""

import torch
from torch import Tensor

from gossamer.runtime.operations import Operation
from gossamer.runtime.remembered import Remembered

_sums: Remembered[Tensor] = Remembered(most=4096)


def _summed(weight: Tensor) -> Tensor:
    return weight.sum(1, dtype=torch.int32).float()


def _remembered(weight: Tensor) -> Tensor:
    # A copy, since compiled graphs write into memory that they have read for the last time.
    return _sums.get([weight], (), lambda: _summed(weight)).clone()


def _on_cuda(weight: Tensor) -> Tensor:
    """As on CPUs; but what is made while a CUDA graph is captured is that graph's own."""
    return _summed(weight) if torch.cuda.is_current_stream_capturing() else _remembered(weight)


def _fake(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[0], dtype=torch.float32)


row_sums = Operation("row_sums(Tensor weight) -> Tensor", _remembered, _on_cuda, _fake).register()
