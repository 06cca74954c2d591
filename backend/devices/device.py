"""Where a region runs: all that the planner and the compiler ask about a processor.

device_of(weight.device)    →   CPU, or the Gpu of that number
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from gossamer.backend.devices.cpu import CPU
from gossamer.backend.devices.cuda_device import gpu
from gossamer.backend.devices.device_kernel import Allocate, Kernel
from gossamer.dialects.errors import DeviceError, GossamerError
from gossamer.passes.framework.family import Matrix
from gossamer.passes.pipelines import Observer
from gossamer.passes.schedules.cost_model import Prediction


class Device(Protocol):
    """A processor.

    target     what kernels are compiled for, as a text: a part of the keys under which they are kept
    bits       width of its vectors, as families plan with it
    features   instructions that not all of its kind have (see `Matrix`)
    dtypes     types of the elements that it has kernels for
    schedules  the names of its schedules
    allocate   memory for results
    call_us    microseconds that a call takes besides its kernel, which measurements leave out
    edge_call  elements that gather and scatter over an edge list move in the time of a call

    What it can do besides:

    rounds_to_bf16  products of f32 whose weight is rounded to bf16, faster than without
    chains          several products and what lies between them as one kernel, or several results of one
    reorders        products with the rows and columns of the weight in another order
    measures        schedules are timed against each other; elsewhere predictions stand
    """

    @property
    def target(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def schedules(self) -> tuple[str, ...]: ...
    @property
    def allocate(self) -> Allocate: ...
    @property
    def call_us(self) -> float: ...
    @property
    def edge_call(self) -> float: ...
    @property
    def rounds_to_bf16(self) -> bool: ...
    @property
    def chains(self) -> bool: ...
    @property
    def reorders(self) -> bool: ...
    @property
    def measures(self) -> bool: ...

    def predict(self, matrix: Matrix, tokens: int | None) -> Prediction:
        """What a product costs, dense and with each schedule."""
        ...

    def terms(self, matrix: Matrix, tokens: int, schedule: str) -> Mapping[str, float]:
        """What the prediction for a schedule is made of, by names; empty if it has no such parts."""
        ...

    def transpose_us(self, size: int) -> float:
        """Microseconds to transpose a matrix of so many bytes."""
        ...

    def renewal_us(self, elements: int) -> float:
        """Microseconds to evaluate, compare and gather a weight of so many elements that has changed."""
        ...

    def recall(self, request: str) -> Kernel | None:
        """The kernel that `compile` made for this request in some process before, if it is still on disk."""
        ...

    def compile(self, contract: str, schedule: str, observer: Observer | None, request: str) -> Kernel:
        """The kernel of a region's contract IR; CompileError. `observer` and `request` as for `compile_region`."""
        ...


_KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": lambda _: CPU, "cuda": gpu}


def has_kernels(place: torch.device) -> bool:
    """Whether there are sparse kernels for such a place."""
    return place.type in _KINDS


def find_device(place: torch.device) -> Device | None:
    """The processor of a place, if sparse kernels run on it."""
    try:
        return device_of(place)
    except GossamerError:
        return None


def device_of(place: torch.device) -> Device:
    """The processor of a place. DeviceError, with words for a user, if there is none that sparse kernels run on."""
    kind = _KINDS.get(place.type)
    if kind is None:
        raise DeviceError(f"there are no sparse kernels for {place.type}, only for {' and '.join(_KINDS)}")
    return kind(place)
