"""`Device`: all that the planner and the compiler ask about a processor on which regions run.

device_of(weight.device)    →   CPU, or the Gpu of that index
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

    target     the name of what kernels are compiled for: a part of the keys under which they are kept
    bits       width of a vector in bits, with which families plan
    features   instructions that not all processors of its kind have (see `Matrix`)
    dtypes     element types that it has kernels for
    schedules  the names of its schedules
    allocate   allocates memory for results
    call_us    microseconds of a call besides its kernel, which measurements of kernels leave out
    edge_call  elements that gather and scatter over an edge list move in the time of a call

    Whether it has these abilities:

    rounds_to_bf16  products of f32 are faster with the weight rounded to bf16
    chains          one kernel can compute several products and the work between them, and have several results
    reorders        kernels can take weights with reordered rows and columns
    measures        schedules can be timed; otherwise Gossamer relies on predictions
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
        """Predicts the time of a product, dense and with each schedule."""
        ...

    def terms(self, matrix: Matrix, tokens: int, schedule: str) -> Mapping[str, float]:
        """Returns the parts of the prediction for a schedule by name; empty if it has no parts."""
        ...

    def transpose_us(self, size: int) -> float:
        """Returns the microseconds to transpose a matrix of so many bytes."""
        ...

    def renewal_us(self, elements: int) -> float:
        """Returns the microseconds to evaluate, compare and gather a changed weight of so many elements."""
        ...

    def recall(self, request: str) -> Kernel | None:
        """Returns the kernel that `compile` made for this request, perhaps in an earlier process; None if it is not on disk."""
        ...

    def compile(self, contract: str, schedule: str, observer: Observer | None, request: str) -> Kernel:
        """Compiles a region's contract IR. Raises CompileError. `observer` and `request` are as for `compile_region`."""
        ...


_KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": lambda _: CPU, "cuda": gpu}


def has_kernels(place: torch.device) -> bool:
    """Whether there are sparse kernels for a device of torch's."""
    return place.type in _KINDS


def find_device(place: torch.device) -> Device | None:
    """Returns the processor of a device of torch's; None if sparse kernels do not run on it."""
    try:
        return device_of(place)
    except GossamerError:
        return None


def device_of(place: torch.device) -> Device:
    """Returns the processor of a device of torch's. Raises DeviceError if sparse kernels do not run on it."""
    kind = _KINDS.get(place.type)
    if kind is None:
        raise DeviceError(f"there are no sparse kernels for {place.type}, only for {' and '.join(_KINDS)}")
    return kind(place)
