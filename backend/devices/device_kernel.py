"""What a compiled kernel is to the backend, whichever device it runs on, and the elements that it computes with."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.runtime.elements import FLOATS
from gossamer.runtime.packing import Packed
from gossamer.runtime.torch_internals import empty_strided_cpu

DTYPES = tuple(FLOATS)
"""Types of elements that there are kernels for."""

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""From sizes, strides and type to a tensor with any content."""


def keeps_kernels(place: torch.device) -> bool:
    """Whether kernels for a place are kept on disk together with the graph that calls them: GPUs load theirs one by one. Not
    asked of a `Device`, since a process that finds its graphs there loads no compiler."""
    return place.type == "cpu"


allocate: Allocate = empty_strided_cpu
"""What Inductor's own code allocates with on a CPU: a third of the time of torch.empty."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a tensor whose last dimension is the innermost."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


class Kernel(Protocol):
    """A compiled region; fields and call are those of `runtime.region_kernel.RegionKernel`."""

    formats: tuple[Format | Packing | None, ...]
    schedule: str
    key: str

    def __call__(self, operands: Sequence[torch.Tensor | Packed], out: torch.Tensor) -> None: ...
