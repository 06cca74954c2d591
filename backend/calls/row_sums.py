"""gossamer::row_sums(weight): the sum of each row of a matrix of int8, as f32; found when the matrix is new.

weight [M, K], int8, on CPUs    →    [M], float32
"""

import torch
from torch import Tensor

from gossamer.runtime.direct_call import describe
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.remembered import Remembered

_sums: Remembered[Tensor] = Remembered(most=4096)


def _on_cpu(weight: Tensor) -> Tensor:
    # A copy, since compiled graphs write into memory that they have read for the last time.
    return _sums.get([weight], (), lambda: weight.sum(1, dtype=torch.int32).float()).clone()


def _fake(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[0], dtype=torch.float32)


LIBRARY.define("row_sums(Tensor weight) -> Tensor", tags=TAGS)
implement("row_sums", _on_cpu)
describe("row_sums", _fake)

row_sums = torch.ops.gossamer.row_sums.default
