"""The object behind most keys of regions: one kernel.

Memory is planned once for each shape of the first operand.

operands    [first input, leaves of all weights, other inputs]
planned     which kernel, the sizes of the results, how the kernel sees what lies in memory (see layouts.py)
each call   the packed weights, memory for the results, the kernel; plain torch where a weight is not packed
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

_MANY = 64  # shapes that a region remembers


@dataclass(eq=False)
class Weight:
    """One weight of a region.

    statics  where its leaves are among the operands
    densest  density above which plain torch is faster
    renew    whether sparse is faster even for a weight that changes at every call
    verify   whether every value of the weight is compared on every call
    """

    packings: Packings
    statics: slice
    densest: float
    renew: bool
    verify: bool

    def __post_init__(self) -> None:
        self.look_up = self.packings.verified if self.verify else self.packings.current

    def packed(self, leaves: Sequence[torch.Tensor]) -> Packed | None:
        """The weight of these leaves as a kernel takes it."""
        return self.look_up(leaves, self.densest, self.renew)


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to compute a region, for up to `most_tokens` tokens: a kernel, and the weights packed for it."""

    most_tokens: float
    kernel: Kernel
    weights: tuple[Weight, ...]

    @property
    def others(self) -> slice:
        """Where the other inputs are among the operands."""
        return slice(self.weights[-1].statics.stop if self.weights else 1, None)


@dataclass(frozen=True, eq=False)
class Band:
    """A kernel that computes so many rows of the weight, that is channels of the result, and no more."""

    kernel: Kernel
    rows: int


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """How a region runs for a first operand of some shape.

    weights  with where their leaves are, and `others` the other inputs, among the operands
    outputs  sizes, strides and type of each result; `alone` is that of the only one
    view     of all that the kernel takes; None where it takes it as it is
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
    """A region that can run, sparse or dense.

    variants the sparse ways, by ascending number of tokens; the last one takes any number
    layout   what operands and results are: matrices, sequences, images
    body     computes the region from (first input, weights, other inputs), densely
    allocate memory for the results, on the device of the kernels
    training whether the region is of a graph with gradients
    band     computes some channels of a convolution, where a depthwise one reads the result
    about    what it computes besides its products, in words (see labels.py)
    """

    variants: tuple[Variant, ...]
    layout: Matrices | Images
    body: Callable[..., Any]
    allocate: Allocate = allocate
    training: bool = False
    band: Band | None = None
    about: str = ""

    def __post_init__(self) -> None:
        self._plans: dict[Shape, _Plan] = {}  # it takes as long to make one as to multiply small matrices

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledRegion, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of all variants, and of the band."""
        return *(variant.kernel for variant in self.variants), *([self.band.kernel] if self.band is not None else [])

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those of the variant for the fewest tokens: all have the same expressions."""
        return self.variants[0].weights

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[Shape, torch.dtype]]:
        """Sizes and types of all results."""
        return self.layout.outputs(operands[0].shape)

    def __call__(self, operands: list[torch.Tensor], out: Any = None) -> Any:
        """The result, a list of several. It is computed into `out`, or densely into another tensor, if that is given and not
        empty."""
        # Runs at every call: what would read better in a function, or as a comprehension, costs 0.1 µs more there.
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
        """A call that computes matrices into `out`, to run beside other calls. Operands may be `Memory`, except leaves.

        None if the region is dense now, or runs on another kind of kernel.
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
        """The same in plain torch."""
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
