"""Running a compiled kernel on bound operands."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.sparsity.kernels import RegionKernel, compile_region
from gossamer.sparsity.operands import Bound, Spec, padded

Build = Callable[[Spec, torch.dtype], str]
"""From what a call is and its dtype to contract IR."""


def launch(build: Build, operands: Sequence[Bound], spec: Spec, out: Tensor) -> None:
    """Run the kernel of `build` into `out`; dense operands are filled up to whole blocks first."""
    sizes = padded(operands) if any(operand.operand.blocked for operand in operands) else {}
    given: list[Any] = []
    kept: list[Bound] = []  # words are addresses: what they point to must live until the call is over
    for operand in operands:
        if operand.sparse:
            kept.append(Bound(operand.operand, tuple(array.contiguous() for array in operand.arrays), operand.shape))
            given.append(_Arrays(kept[-1]))
        else:
            tensor = operand.values
            if sizes:
                edges = [e for letter, n in zip(operand.letters, operand.shape, strict=True) for e in (sizes[letter] - n, 0)]
                tensor = F.pad(tensor, edges[::-1]) if any(edges) else tensor
            given.append(tensor.contiguous())
    kernel_of(build, spec, operands[0].values.dtype)(given, out)


class _Arrays:
    """A sparse operand for a kernel: the words of its arrays and of its levels."""

    def __init__(self, operand: Bound) -> None:
        assert operand.format is not None
        words = [word for array in operand.arrays for word in (array.data_ptr(), array.numel())]
        shape = operand.shape
        sizes = operand.format.level_sizes(shape) if operand.operand.blocked else [shape[d] for d in operand.operand.level_dims]
        self.words = (*words, *sizes)


@lru_cache(4096)
def kernel_of(build: Build, spec: Spec, dtype: torch.dtype) -> RegionKernel:
    """The fastest kernel that computes a call: "rows" for CSR times dense, the reference for all else."""
    contract = build(spec, dtype)
    if any(operand.format is not None and operand.format.levels == Format.CSR.levels for operand in spec.operands):
        try:
            return compile_region(contract, schedule="rows")
        except CompileError:
            pass
    return compile_region(contract, schedule="reference")
