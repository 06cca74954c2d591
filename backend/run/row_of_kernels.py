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

from gossamer.backend.devices.device_kernel import Kernel, allocate, contiguous_strides
from gossamer.backend.run.compiled_region import Band, CompiledRegion
from gossamer.backend.run.layouts import Shape
from gossamer.runtime.compiled_kernel import Given, KernelsInARow, Memory, places
from gossamer.runtime.compiled_kernel import Kernel as Code
from gossamer.runtime.packing import Packed
from gossamer.runtime.region_kernel import RegionKernel

_MOST_BYTES = 64 << 20  # of results that no other reads, kept for the next call

_Call = tuple[Code, Sequence[int | Given]]


@dataclass(frozen=True)
class Step:
    """One of the convolutions.

    images   the number of what it reads, among the operands that are not static and then the results of all steps
    leaves   of its weight, by their numbers among the statics
    weight   number of its weight among what is computed from statics, None where it is packed
    extras   what its epilogue reads: whether that is computed from statics, and its number there or among images
    """

    region: CompiledRegion
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

    def given(self, statics: Sequence[Tensor], computed: Sequence[Tensor]) -> Tensor | Packed | None:
        """What its kernel takes as its weight, None where the region is dense."""
        if self.weight is not None:
            return computed[self.weight]
        return self.region.weights[0].packed([statics[n] for n in self.leaves])


@dataclass(frozen=True, eq=False)
class Ready:
    """All calls for images of some sizes; `kept` is what they read."""

    kernels: KernelsInARow
    results: list[tuple[Shape, Shape, torch.dtype]]
    kept: list[Any]

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """The results for images that lie one after the other."""
        results = [allocate(*each) for each in self.results]
        self.kernels([each.data_ptr() for each in (*images, *results)])
        return results


def prepare(
    steps: Sequence[Step],
    shapes: Sequence[Shape],
    results: Sequence[int],
    computed: Sequence[Tensor],
    statics: Sequence[Tensor],
) -> Ready | None:
    """What computes the `results` of some steps for images of these sizes; None where that is for the regions themselves."""
    planned, known = list[_Planned](), list(shapes)
    for step in steps:
        ((shape, dtype),) = step.region.layout.outputs(known[step.images])
        known.append(shape)
        weight = step.given(statics, computed)
        if weight is None or prod(shape) == 0 or _code(step.region.kernels[0]) is None:
            return None
        place = len(shapes) + results.index(len(planned)) if len(planned) in results else None
        readers = [n for n, other in enumerate(steps) if len(known) - 1 in other.reads]
        planned.append(_Planned(step, weight, shape, dtype, place, readers))
    planned = [replace(each, band=_band(planned, n, len(shapes) + n)) for n, each in enumerate(planned)]
    # What a step in bands reads is read again for each band, after results of the next step.
    last = [max((r + (planned[r].band is not None) for r in each.readers), default=n) for n, each in enumerate(planned)]
    where, size = places([each.bytes for each in planned], last)
    if size > _MOST_BYTES:
        return None
    memory = torch.empty(size, dtype=torch.uint8)
    images = [Memory(Given(n), shape) for n, shape in enumerate(shapes)]
    images += [each.memory(memory.data_ptr() + at) for each, at in zip(planned, where, strict=True)]
    row = _Row(planned, images, [value.contiguous() for value in computed], [memory])
    calls = list[_Call]()
    for n, each in enumerate(planned):
        if each.band is not None:
            calls += row.in_bands(n, each.band)
        elif not (n and planned[n - 1].band):
            calls.append(row.whole(n))
    found = [(planned[n].shape, contiguous_strides(planned[n].shape), planned[n].dtype) for n in results]
    return Ready(KernelsInARow(calls), found, [*row.kept, *row.computed, *(each.weight for each in planned)])


@dataclass(frozen=True, eq=False)
class _Planned:
    """A step for images of some sizes.

    weight       what its kernel takes
    shape, dtype of its result
    place        the number among the addresses of a call where the result goes, None where only other steps read it
    readers      the numbers of the steps that read it
    band         what computes it and the next step by bands of channels, if they are
    """

    step: Step
    weight: Any
    shape: Shape
    dtype: torch.dtype
    place: int | None
    readers: Sequence[int]
    band: Band | None = None

    @property
    def kept(self) -> Shape:
        """Sizes of what there is of the result at one time."""
        return self.shape if self.band is None else (1, self.band.rows, *self.shape[2:])

    @property
    def bytes(self) -> int:
        """What it takes of the memory that steps share."""
        return 0 if self.place is not None else prod(self.kept) * self.dtype.itemsize

    def memory(self, address: int) -> Memory:
        """Where the result lies, if that is not what a call gives."""
        return Memory(address if self.place is None else Given(self.place), self.kept)


@dataclass(frozen=True, eq=False)
class _Row:
    """The steps, where the images are, and what else they read; `kept` is what must live as long as the calls."""

    planned: Sequence[_Planned]
    images: Sequence[Memory]
    computed: Sequence[Tensor]
    kept: list[Any]

    def whole(self, n: int) -> _Call:
        """The call of a step."""
        step, weight = self.planned[n].step, self.planned[n].weight
        extras = [(self.computed if static else self.images)[at] for static, at in step.extras]
        return self._call(step, step.region.kernels[0], [self.images[step.images], weight, *extras], self._result(n))

    def in_bands(self, n: int, band: Band) -> Iterator[_Call]:
        """The calls of a step and of the depthwise one that reads its result."""
        before, after = self.planned[n : n + 2]
        x, between, out = self.images[before.step.images], self._result(n), self._result(n + 1)
        number, channels = out.shape[:2]
        for image in range(number):
            for low in range(0, channels, band.rows):
                of = image, low, low + band.rows
                source = x.part(image, 0, x.shape[1], before.dtype.itemsize)
                extras = [self._part(before, each, of) for each in before.step.extras]
                yield self._call(before.step, band.kernel, [source, _rows(before.weight, *of[1:]), *extras], between)
                extras = [self._part(after, each, of) for each in after.step.extras]
                given, target = [between, after.weight[of[1] : of[2]], *extras], out.part(*of, after.dtype.itemsize)
                yield self._call(after.step, after.step.region.kernels[0], given, target)

    def _part(self, planned: _Planned, extra: tuple[bool, int], of: tuple[int, int, int]) -> Tensor | Memory:
        """What a band reads of something."""
        static, at = extra
        if not static and len(self.images[at].shape) > 2:
            return self.images[at].part(*of, planned.dtype.itemsize)
        found: Any = (self.computed if static else self.images)[at]
        return found[of[1] : of[2]] if len(found.shape) == 1 else found

    def _result(self, n: int) -> Memory:
        return self.images[len(self.images) - len(self.planned) + n]

    def _call(self, step: Step, kernel: Kernel, given: Sequence[Any], out: Memory) -> _Call:
        code, view = _code(kernel), step.region.layout.view(given[0].shape)
        assert code is not None and view is not None
        self.kept.append(given[1])
        return code, code.words(*view(given, out))


def _band(planned: Sequence[_Planned], n: int, number: int) -> Band | None:
    """What computes a step, whose result has this number among images, and the next one by bands of channels, if they are; on
    one thread, whose cache that is."""
    before = planned[n]
    band = before.step.region.band
    if band is None or before.place is not None or before.readers != [n + 1] or get_num_threads() > 1:
        return None
    after = planned[n + 1]
    alone = after.step.images == number and after.step.reads.count(number) == 1
    return band if alone and not after.step.region.weights and after.dtype == before.dtype else None


def _rows(weight: Packed, low: int, high: int) -> Packed:
    """Some rows of a weight whose rows all lie in one block, one after the other."""
    positions, *others = weight.components
    return replace(weight, components=(positions[low : high + 1], *others))


def _code(kernel: Kernel) -> Code | None:
    return kernel.code if isinstance(kernel, RegionKernel) else None
