"""Runs a region with one kernel. `gossamer::region` (region_op.py) finds a `CompiledRegion` under most keys.

operands    [first input, leaves of all weights, other inputs]
plan        made once for each shape of the first operand: the kernel, the sizes of the results, and how the kernel sees the
            tensors in memory (see layouts.py)
each call   looks up the packed weights (packed_weights.py), allocates the results and calls the kernel. If a weight is not
            packed, the region runs in plain torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch

from gossamer.backend.devices.device_kernel import Allocate, Kernel, allocate, contiguous_strides
from gossamer.backend.devices.kernels_at_once import Call, Copied
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.run.layouts import Images, Matrices, Shape, View
from gossamer.backend.run.packed_weights import Packings
from gossamer.runtime.compiled_kernel import Memory
from gossamer.runtime.packing import Packed
from gossamer.runtime.region_kernel import RegionKernel

_MANY = 64  # plans that a region remembers, one for each shape


@dataclass(eq=False)
class Weight:
    """One weight of a region.

    packings finds the weight in the form that the kernel takes
    statics  the indices of its leaves among the operands
    densest  the density above which plain torch is faster
    renew    whether the sparse kernel is faster even if the weight changes at every call
    verify   whether to compare every value of the weight at every call
    """

    packings: Packings
    statics: slice
    densest: float
    renew: bool
    verify: bool

    def __post_init__(self) -> None:
        self.look_up = self.packings.verified if self.verify else self.packings.current

    def packed(self, leaves: Sequence[torch.Tensor]) -> Packed | None:
        """Returns the packed weight of these leaves, or None if the region has to run dense."""
        return self.look_up(leaves, self.densest, self.renew)


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel that computes a region for up to `most_tokens` tokens, and the weights packed for it."""

    most_tokens: float
    kernel: Kernel
    weights: tuple[Weight, ...]

    @property
    def others(self) -> slice:
        """The indices of the other inputs among the operands."""
        return slice(self.weights[-1].statics.stop if self.weights else 1, None)


@dataclass(frozen=True, eq=False)
class Band:
    """A kernel for a band of a convolution: so many rows of the weight, which are channels of the result."""

    kernel: Kernel
    rows: int


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """How a region runs for one shape of the first operand.

    weights  the weights, with the indices of their leaves among the operands
    others   the indices of the other inputs among the operands
    outputs  sizes, strides and type of each result
    alone    the entry of `outputs` if there is only one, else None
    view     converts operands and results to the kernel's arguments; None if the kernel takes them unchanged
    is_empty whether the results have no elements
    """

    kernel: Kernel
    weights: tuple[Weight, ...]
    others: slice
    outputs: list[tuple[Shape, Shape, torch.dtype]]
    alone: tuple[Shape, Shape, torch.dtype] | None
    view: View | None
    is_empty: bool


@dataclass(eq=False)
class CompiledRegion:
    """A region that can run sparse or dense.

    variants the sparse kernels, by ascending `most_tokens`; the last one takes any number of tokens
    layout   the kind of operands and results: matrices, sequences, images
    body     computes the region from (first input, weights, other inputs) in plain torch
    allocate allocates the results on the device of the kernels
    training whether the graph of the region has gradients
    band     computes some channels of a convolution, for a depthwise convolution that reads the result; None for others
    about    names the operations beside the products (see labels.py)
    """

    variants: tuple[Variant, ...]
    layout: Matrices | Images
    body: Callable[..., Any]
    allocate: Allocate = allocate
    training: bool = False
    band: Band | None = None
    about: str = ""

    def __post_init__(self) -> None:
        self._plans: dict[Shape, _Plan] = {}  # kept, because making a plan takes as long as multiplying small matrices

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledRegion, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all variants, and of the band."""
        return *(variant.kernel for variant in self.variants), *([self.band.kernel] if self.band is not None else [])

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of the first variant. Those of the others have the same expressions."""
        return self.variants[0].weights

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[Shape, torch.dtype]]:
        """Returns the sizes and type of each result."""
        return self.layout.outputs(operands[0].shape)

    def __call__(self, operands: list[torch.Tensor], out: Any = None) -> Any:
        """Returns the result, or a list if there are several.

        out  memory for the results, which must not be empty. If the region runs dense, the results are new tensors instead.
        """
        # Runs at every call. A helper function or a comprehension would read better, but each takes 0.1 µs more.
        x = operands[0]
        plan = self._plans.get(x.shape) or self._planned(x.shape)
        if out is None:
            out = self.allocate(*plan.alone) if plan.alone is not None else [self.allocate(*each) for each in plan.outputs]
            if plan.is_empty:
                return out
        given: list[Any] = [x if x.is_contiguous() else x.contiguous()]
        for weight in plan.weights:
            packed = weight.look_up(operands[weight.statics], weight.densest, weight.renew)
            if packed is None:
                return self.dense(operands)
            given.append(packed)
        for extra in operands[plan.others]:
            given.append(extra if extra.is_contiguous() else extra.contiguous())  # noqa: PERF401
        if plan.view is None:
            plan.kernel(given, out)
        else:
            plan.kernel(*plan.view(given, out))
        return out

    def prepared(self, operands: Sequence[Any], out: Memory, work: int, copied: Copied | None = None) -> Call | None:
        """Returns a call that computes matrices into `out`, to run beside other calls. Operands except leaves may be `Memory`.

        Returns None if the region has to run dense, or its kernel is not a `RegionKernel` on plain matrices.
        """
        plan = self._plans.get(operands[0].shape) or self._planned(operands[0].shape)
        if plan.view is not None or not isinstance(plan.kernel, RegionKernel):
            return None
        packed = list[Packed]()
        for weight in plan.weights:
            found = weight.look_up(operands[weight.statics], weight.densest, weight.renew)
            if found is None:
                return None
            packed.append(found)
        return Call(*plan.kernel.alone([operands[0], *packed, *operands[plan.others]], out), work, copied, packed)

    def dense(self, operands: Sequence[torch.Tensor]) -> Any:
        """Computes the same in plain torch."""
        x, variant = operands[0], self.variants[0]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            weights = [run(weight.packings.evaluate, operands[weight.statics]) for weight in variant.weights]
            found: Any = self.body(x, *weights, *operands[variant.others])
        return found.contiguous() if isinstance(found, torch.Tensor) else [each.contiguous() for each in found]

    def _planned(self, shape: Shape) -> _Plan:
        tokens = self.layout.tokens(shape)
        variant = next(each for each in self.variants if tokens <= each.most_tokens)
        outputs = [(sizes, contiguous_strides(sizes), dtype) for sizes, dtype in self.layout.outputs(shape)]
        alone = outputs[0] if len(outputs) == 1 else None
        view, is_empty = self.layout.view(shape), prod(outputs[0][0]) == 0
        if len(self._plans) >= _MANY:
            self._plans.clear()
        found = self._plans[shape] = _Plan(variant.kernel, variant.weights, variant.others, outputs, alone, view, is_empty)
        return found
