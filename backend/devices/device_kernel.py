"""`Kernel`: a compiled kernel as the backend sees it, on any device, and the element types of kernels."""

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
"""Element types that kernels exist for."""

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""(sizes, strides, type) → an uninitialised tensor."""


def keeps_kernels(place: torch.device) -> bool:
    """Whether kernels for a device of torch's are kept on disk together with the graph that calls them. GPUs load each by
    itself.

    This is no method of `Device`, because a process that finds its graphs on disk does not load the compiler.
    """
    return place.type == "cpu"


allocate: Allocate = empty_strided_cpu
"""The function with which Inductor's code allocates on CPUs. It takes a third of the time of torch.empty."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


class Kernel(Protocol):
    """A compiled region. Fields and call are as of `runtime.region_kernel.RegionKernel`."""

    formats: tuple[Format | Packing | None, ...]
    schedule: str
    key: str

    def __call__(self, operands: Sequence[torch.Tensor | Packed], out: torch.Tensor) -> None: ...
