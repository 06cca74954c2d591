"""Running a compiled kernel on bound operands."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.sparsity.kernels import RegionKernel, compile_region
from gossamer.sparsity.operands import Bound, Spec, padded

Build = Callable[[Spec, torch.dtype], str]
"""From what a call is and its dtype to contract IR."""


def launch(build: Build, operands: Sequence[Bound], spec: Spec, out: Tensor) -> None:
    """Run the kernel of `build` into `out`; dense operands are filled up to whole blocks first."""
    sizes = padded(operands)
    given: list[Any] = []
    kept: list[Bound] = []  # words are addresses: what they point to must live until the call is over
    for operand in operands:
        if operand.sparse:
            kept.append(Bound(operand.operand, tuple(array.contiguous() for array in operand.arrays), operand.shape))
            given.append(_Arrays(kept[-1]))
        else:
            edges = [e for letter, n in zip(operand.letters, operand.shape, strict=True) for e in (sizes[letter] - n, 0)]
            tensor = F.pad(operand.values, edges[::-1]) if any(edges) else operand.values
            given.append(tensor.contiguous())
    _kernel(build, spec, operands[0].values.dtype)(given, out)


class _Arrays:
    """A sparse operand for a kernel: the words of its arrays and of its levels."""

    def __init__(self, operand: Bound) -> None:
        assert operand.format is not None
        words = [word for array in operand.arrays for word in (array.data_ptr(), array.numel())]
        self.words = (*words, *operand.format.level_sizes(operand.shape))


@lru_cache(4096)
def _kernel(build: Build, spec: Spec, dtype: torch.dtype) -> RegionKernel:
    return compile_region(build(spec, dtype), schedule="reference")
