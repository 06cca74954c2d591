"""The calls of kernels that several convolutions in a row come to, prepared for images of some sizes.

Where a depthwise convolution alone reads what a pointwise one writes, and that is larger than the cache of a core, both are
computed by bands of channels: the second finds in the cache what the first has just written.

    for low in 0, 8, ..., 88:
        band = 1x1 convolution, rows [low, low + 8) of its weight        [8, 112, 112] of 96 channels
        y[low : low + 8] = depthwise convolution of the band
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, get_num_threads

from gossamer.backend.calls.convolved_region import Band, ConvolvedRegion, OnImages
from gossamer.backend.calls.depthwise_region import DepthwiseRegion
from gossamer.backend.devices.kernel import Kernel, allocate, contiguous_strides
from gossamer.runtime.kernel import Given, KernelsInARow, Memory, places
from gossamer.runtime.kernel import Kernel as Code
from gossamer.runtime.packing import Packed
from gossamer.runtime.region_kernel import RegionKernel

_MOST_BYTES = 64 << 20  # of results that no other reads, kept for the next call

_Shape = tuple[int, ...]
_Call = tuple[Code, Sequence[int | Given]]


@dataclass(frozen=True)
class Step:
    """One of the convolutions.

    images   the number of what it reads, among the operands that are not static and then the results of all steps
    leaves   of its weight, by their numbers among the statics
    weight   number of its weight among what is computed from statics, None where it is packed
    extras   what its epilogue reads: whether that is computed from statics, and its number there or among images
    """

    region: OnImages
    images: int
    leaves: tuple[int, ...]
    weight: int | None
    extras: tuple[tuple[bool, int], ...]

    @property
    def places(self) -> tuple[object, ...]:
        """Where all operands come from."""
        return self.images, self.leaves, self.weight, self.extras

    @property
    def reads(self) -> list[int]:
        """The numbers of all images that it reads."""
        return [self.images, *[number for static, number in self.extras if not static]]

    @property
    def band(self) -> Band | None:
        """What computes some of its channels."""
        return self.region.band if isinstance(self.region, ConvolvedRegion) else None

    def given(self, statics: Sequence[Tensor], computed: Sequence[Tensor]) -> Tensor | Packed | None:
        """What its kernel takes as its weight, None where the region is dense."""
        if self.weight is not None:
            return computed[self.weight]
        assert isinstance(self.region, ConvolvedRegion)
        return self.region.packings.current([statics[n] for n in self.leaves], self.region.densest)


@dataclass(frozen=True, eq=False)
class Ready:
    """All calls for images of some sizes; `kept` is what they read."""

    kernels: KernelsInARow
    results: list[tuple[_Shape, _Shape, torch.dtype]]
    kept: list[Any]

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """The results for images that lie one after the other."""
        results = [allocate(*each) for each in self.results]
        self.kernels([each.data_ptr() for each in (*images, *results)])
        return results


def prepare(
    steps: Sequence[Step],
    shapes: Sequence[_Shape],
    results: Sequence[int],
    computed: Sequence[Tensor],
    statics: Sequence[Tensor],
) -> Ready | None:
    """What computes the `results` of some steps for images of these sizes; None where that is for the regions themselves."""
    first, sizes = len(shapes), list(shapes)
    for step in steps:
        sizes.append(step.region.sizes(sizes[step.images])[0])
    made, codes = sizes[first:], [_code(step.region.kernel) for step in steps]
    weights = [step.given(statics, computed) for step in steps]
    if 0 in map(prod, made) or None in codes or any(weight is None for weight in weights):
        return None
    readers = [[n for n, step in enumerate(steps) if first + k in step.reads] for k in range(len(steps))]
    bands = [None if n in results else _band(steps, n, readers[n]) for n in range(len(steps))]
    kept_sizes = [(1, band.rows, *shape[2:]) if band else shape for shape, band in zip(made, bands, strict=True)]
    bytes_ = [
        0 if n in results else prod(shape) * step.region.dtype.itemsize
        for n, (shape, step) in enumerate(zip(kept_sizes, steps, strict=True))
    ]
    # What a step in bands reads is read again for each band, after results of the next step.
    last = [max((r + (bands[r] is not None) for r in each), default=n) for n, each in enumerate(readers)]
    where, size = places(bytes_, last)
    if size > _MOST_BYTES:
        return None
    memory = torch.empty(size, dtype=torch.uint8)
    outputs = {n: Given(first + at) for at, n in enumerate(results)}
    images = [Memory(Given(n), shape) for n, shape in enumerate(shapes)]
    images += [Memory(outputs.get(n, memory.data_ptr() + where[n]), shape) for n, shape in enumerate(kept_sizes)]
    row = _Row(steps, images, [value.contiguous() for value in computed], weights, [memory])
    calls = list[_Call]()
    for n, band in enumerate(bands):
        if band is not None:
            calls += row.in_bands(n, band)
        elif not (n and bands[n - 1]):
            calls.append(row.whole(n))
    found = [(made[n], contiguous_strides(made[n]), steps[n].region.dtype) for n in results]
    return Ready(KernelsInARow(calls), found, [*row.kept, *row.computed, *weights])


@dataclass(frozen=True, eq=False)
class _Row:
    """The steps, where the images are, and what else they read; `kept` is what must live as long as the calls."""

    steps: Sequence[Step]
    images: Sequence[Memory]
    computed: Sequence[Tensor]
    weights: Sequence[Any]
    kept: list[Any]

    def whole(self, n: int) -> _Call:
        """The call of a step."""
        step = self.steps[n]
        extras = [(self.computed if static else self.images)[at] for static, at in step.extras]
        return self._call(step, step.region.kernel, self.images[step.images], self.weights[n], extras, self._result(n))

    def in_bands(self, n: int, band: Band) -> Iterator[_Call]:
        """The calls of a step and of the depthwise one that reads its result."""
        before, after = self.steps[n : n + 2]
        x, between, out = self.images[before.images], self._result(n), self._result(n + 1)
        number, channels = out.shape[:2]
        for image in range(number):
            for low in range(0, channels, band.rows):
                of = image, low, low + band.rows
                extras = [self._part(before, each, of) for each in before.extras]
                source = x.part(image, 0, x.shape[1], before.region.dtype.itemsize)
                yield self._call(before, band.kernel, source, _rows(self.weights[n], *of[1:]), extras, between)
                extras = [self._part(after, each, of) for each in after.extras]
                target = out.part(*of, after.region.dtype.itemsize)
                yield self._call(after, after.region.kernel, between, self.weights[n + 1][of[1] : of[2]], extras, target)

    def _part(self, step: Step, extra: tuple[bool, int], of: tuple[int, int, int]) -> Tensor | Memory:
        """What a band reads of something."""
        static, at = extra
        if not static and len(self.images[at].shape) > 2:
            return self.images[at].part(*of, step.region.dtype.itemsize)
        found: Any = (self.computed if static else self.images)[at]
        return found[of[1] : of[2]] if len(found.shape) == 1 else found

    def _result(self, n: int) -> Memory:
        return self.images[len(self.images) - len(self.steps) + n]

    def _call(self, step: Step, kernel: Kernel, x: Memory, weight: Any, extras: Sequence[Any], out: Memory) -> _Call:
        code = _code(kernel)
        assert code is not None
        self.kept.append(weight)
        return code, code.words(*step.region.taken(x, weight, extras, out))


def _band(steps: Sequence[Step], n: int, readers: Sequence[int]) -> Band | None:
    """What computes a step and the next one by bands of channels, if they are; on one thread, whose cache that is."""
    band = steps[n].band
    if band is None or readers != [n + 1] or get_num_threads() > 1:
        return None
    after = steps[n + 1]
    alone = type(after.region) is DepthwiseRegion and after.reads.count(after.images) == 1
    same = after.reads[0] == after.images and after.region.dtype == steps[n].region.dtype
    return band if alone and same else None


def _rows(weight: Packed, low: int, high: int) -> Packed:
    """Some rows of a weight whose rows all lie in one block, one after the other."""
    positions, *others = weight.components
    return replace(weight, components=(positions[low : high + 1], *others))


def _code(kernel: Kernel) -> Code | None:
    return kernel.code if isinstance(kernel, RegionKernel) else None
