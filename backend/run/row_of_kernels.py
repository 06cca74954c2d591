"""Prepares the kernel calls of several convolutions in a row, for images of given sizes (see `convolved_row.py`).

A depthwise convolution may be the only reader of a pointwise one, whose result is larger than the cache of a core. Then both
are computed by bands of channels, so that the second finds the result of the first in the cache.

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

_MOST_BYTES = 64 << 20  # of intermediate results, whose memory is kept for the next call

_Call = tuple[Code, Sequence[int | Given]]


@dataclass(frozen=True)
class Step:
    """One of the convolutions.

    "Images" are numbered: first the operands that are not static, then the results of all steps.

    region   computes the convolution
    images   the number of the images that it reads
    leaves   the indices of its weight's leaves among the statics
    weight   the index of its weight among the tensors computed from statics; None if it is packed
    extras   for each tensor that its epilogue reads: whether it is computed from statics, and its index there or among images
    """

    region: CompiledRegion
    images: int
    leaves: tuple[int, ...]
    weight: int | None
    extras: tuple[tuple[bool, int], ...]

    @property
    def places(self) -> tuple[object, ...]:
        """The sources of all operands."""
        return self.images, self.leaves, self.weight, self.extras

    @property
    def reads(self) -> list[int]:
        """The numbers of all images that the step reads."""
        return [self.images, *[number for static, number in self.extras if not static]]

    def given(self, statics: Sequence[Tensor], computed: Sequence[Tensor]) -> Tensor | Packed | None:
        """Returns the weight as the step's kernel takes it, or None if the region has to run dense."""
        if self.weight is not None:
            return computed[self.weight]
        return self.region.weights[0].packed([statics[n] for n in self.leaves])


@dataclass(frozen=True, eq=False)
class Ready:
    """All kernel calls for images of given sizes.

    results  sizes, strides and type of each result
    kept     objects that the calls read, which must live as long
    """

    kernels: KernelsInARow
    results: list[tuple[Shape, Shape, torch.dtype]]
    kept: list[Any]

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results for contiguous images."""
        results = [allocate(*each) for each in self.results]
        self.kernels([each.data_ptr() for each in (*images, *results)])
        return results


def prepare(
    steps: Sequence[Step],
    given: Sequence[Tensor],
    results: Sequence[int],
    computed: Sequence[Tensor],
    statics: Sequence[Tensor],
) -> Ready | None:
    """Returns the calls that compute the steps with the numbers `results`, for images like `given`.

    Returns None if each region must run by itself."""
    shapes: list[Shape] = [tuple(each.shape) for each in given]
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
    kinds = [(each.dim(), each.dtype) for each in given] + [(len(each.shape), each.dtype) for each in planned]
    planned = [replace(each, band=_band(planned, n, kinds, computed)) for n, each in enumerate(planned)]
    # A step in bands reads its images again for each band, after the next step has written a band of its result.
    last = [max((r + (planned[r].band is not None) for r in each.readers), default=n) for n, each in enumerate(planned)]
    where, size = places([each.bytes for each in planned], last)
    if size > _MOST_BYTES:
        return None
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
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
    """A step for images of given sizes.

    weight       the weight as its kernel takes it
    shape, dtype of its result
    place        the index of the result among the addresses of a call; None if only other steps read the result
    readers      the numbers of the steps that read the result
    band         the kernel for bands, if this step and the next are computed by bands of channels
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
        """The sizes of the part of the result that exists at one time."""
        return self.shape if self.band is None else (1, self.band.rows, *self.shape[2:])

    @property
    def bytes(self) -> int:
        """The bytes that the result takes of the steps' shared memory."""
        return 0 if self.place is not None else prod(self.kept) * self.dtype.itemsize

    def memory(self, address: int) -> Memory:
        """Returns the memory of the result: at `address`, unless each call gives an address."""
        return Memory(address if self.place is None else Given(self.place), self.kept)


@dataclass(frozen=True, eq=False)
class _Row:
    """Makes the calls of the planned steps.

    images   the memory of all images, by their numbers
    computed the tensors computed from statics
    kept     objects that must live as long as the calls
    """

    planned: Sequence[_Planned]
    images: Sequence[Memory]
    computed: Sequence[Tensor]
    kept: list[Any]

    def whole(self, n: int) -> _Call:
        """Returns the call of a step."""
        step, weight = self.planned[n].step, self.planned[n].weight
        extras = [(self.computed if static else self.images)[at] for static, at in step.extras]
        return self._call(step, step.region.kernels[0], [self.images[step.images], weight, *extras], self._result(n))

    def in_bands(self, n: int, band: Band) -> Iterator[_Call]:
        """Yields the calls of a step and of the depthwise step that reads its result, in turns."""
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
        """Returns the part of an extra operand that a band reads. `of` is (image, first channel, end)."""
        static, at = extra
        if not static:
            return self.images[at].part(*of, planned.dtype.itemsize)
        found = self.computed[at]
        return found[of[1] : of[2]] if found.dim() else found

    def _result(self, n: int) -> Memory:
        return self.images[len(self.images) - len(self.planned) + n]

    def _call(self, step: Step, kernel: Kernel, given: Sequence[Any], out: Memory) -> _Call:
        code, view = _code(kernel), step.region.layout.view(given[0].shape)
        assert code is not None and view is not None
        self.kept.append(given[1])
        return code, code.words(*view(given, out))


def _band(
    planned: Sequence[_Planned], n: int, kinds: Sequence[tuple[int, torch.dtype]], computed: Sequence[Tensor]
) -> Band | None:
    """Returns the kernel that computes a step by bands, if it and the next step are computed so, or None.

    kinds     the number of dimensions and the type of all images, by their numbers
    computed  the tensors computed from statics

    Bands need a single thread, because each core has its own cache. All images that are read in parts are of one kind.
    """
    before, number = planned[n], len(kinds) - len(planned) + n
    band = before.step.region.band
    if band is None or before.place is not None or before.readers != [n + 1] or get_num_threads() > 1:
        return None
    after, kind = planned[n + 1], kinds[number]
    alone = after.step.images == number and after.step.reads.count(number) == 1
    read = [*before.step.reads, *after.step.reads, number + 1]
    vectors = [computed[at] for step in (before.step, after.step) for static, at in step.extras if static]
    cut = all(kinds[at] == kind for at in read) and all(each.dim() < 2 for each in vectors)
    return band if alone and cut and not after.step.region.weights else None


def _rows(weight: Packed, low: int, high: int) -> Packed:
    """Returns rows [low, high) of a weight whose rows are all in one block, in order."""
    positions, *others = weight.components
    return replace(weight, components=(positions[low : high + 1], *others))


def _code(kernel: Kernel) -> Code | None:
    return kernel.code if isinstance(kernel, RegionKernel) else None
