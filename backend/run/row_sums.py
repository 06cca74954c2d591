"""gossamer::row_sums(weight) returns the sum of each row of an int8 matrix as f32. It is computed again if the matrix changes.

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
    # A copy, because compiled graphs write into memory that they no longer read.
    return _sums.get([weight], (), lambda: _summed(weight)).clone()


def _on_cuda(weight: Tensor) -> Tensor:
    """Does the same as on CPUs. While a CUDA graph is captured, computes the sums in that graph and remembers nothing."""
    return _summed(weight) if torch.cuda.is_current_stream_capturing() else _remembered(weight)


def _fake(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[0], dtype=torch.float32)


row_sums = Operation("row_sums(Tensor weight) -> Tensor", _remembered, _on_cuda, _fake).register()
