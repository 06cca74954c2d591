"""What runs where several convolutions stood, each a region of its own: their kernels, one after the other, in one call.

    gossamer::chain([*images, *statics], key) -> [results that others use]

The first call with some statics, and every one after they have changed, runs region by region. The second prepares what all
later ones take: packed weights, what epilogues read for each channel, and memory for what no other reads. It is prepared for
each Python thread and shape of images.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch

from gossamer.backend.calls.convolved_region import ConvolvedRegion, OnImages
from gossamer.backend.devices.kernel import Kernel, allocate, contiguous_strides
from gossamer.backend.graph.weight_expressions import run
from gossamer.runtime.kernel import Given, KernelsInARow, Memory, places
from gossamer.runtime.kernel import Kernel as Code
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.uncounted import counts_writes

_MOST_BYTES = 64 << 20  # of results that no other reads, kept for the next call
_MANY = 4  # shapes of images that a thread prepares

_Shape = tuple[int, ...]


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


@dataclass(frozen=True, eq=False)
class ConvolvedRow:
    """Several convolutions that can run.

    given     how many operands are not static
    leaves    how many of the others `evaluate` takes, from the first one on
    evaluate  computes from them what they alone determine
    results   the numbers of the steps that others read
    """

    steps: tuple[Step, ...]
    given: int
    leaves: int
    evaluate: Callable[..., Sequence[torch.Tensor]]
    results: tuple[int, ...]
    _here: "_Here" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_here", _Here())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of all steps."""
        return tuple(kernel for step in self.steps for kernel in step.region.kernels)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first result."""
        return self.steps[self.results[0]].region.dtype

    def shape(self, x: torch.Tensor) -> _Shape:
        """Sizes of the first result where it reads this operand."""
        return self.steps[self.results[0]].region.shape(x)

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[_Shape, torch.dtype]]:
        """Sizes and types of all results."""
        images = list[torch.Tensor](operands[: self.given])
        for step in self.steps:
            x = images[step.images]
            images.append(x.new_empty(step.region.shape(x), dtype=step.region.dtype))
        return [(tuple(images[self.given + n].shape), images[self.given + n].dtype) for n in self.results]

    def __call__(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        images, statics = operands[: self.given], operands[self.given :]
        here = self._here
        if here.known is None or not here.known.is_of(statics):
            here.known = _Statics(statics)
            return self._by_themselves(images, statics)
        if here.known.changing:
            return self._by_themselves(images, statics)
        images = [each if each.is_contiguous() else each.contiguous() for each in images]
        prepared = here.known.prepared
        shapes = tuple([each.shape for each in images])
        if shapes not in prepared:
            if len(prepared) == _MANY:
                prepared.clear()
            prepared[shapes] = self._prepared(shapes, statics)
        ready = prepared[shapes]
        return self._by_themselves(images, statics) if ready is None else ready(images)

    def _by_themselves(self, images: Sequence[torch.Tensor], statics: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, region by region."""
        computed, images = run(self.evaluate, statics[: self.leaves]), list(images)
        for step in self.steps:
            weight = [statics[n] for n in step.leaves] if step.weight is None else [computed[step.weight]]
            extras = [(computed if static else images)[n] for static, n in step.extras]
            images.append(step.region([images[step.images], *weight, *extras]))  # type: ignore[operator]
        return [images[self.given + n] for n in self.results]

    def _prepared(self, shapes: Sequence[_Shape], statics: Sequence[torch.Tensor]) -> "_Ready | None":
        """What computes the results for images of these sizes; None where that is for the regions themselves."""
        sizes, last = list(shapes), [len(self.steps) if n in self.results else n for n in range(len(self.steps))]
        for n, step in enumerate(self.steps):
            sizes.append(step.region.sizes(sizes[step.images])[0])
            for read in [step.images, *[number for static, number in step.extras if not static]]:
                if read >= self.given:
                    last[read - self.given] = max(last[read - self.given], n)
        made = sizes[self.given :]
        codes = [_code(step.region.kernel) for step in self.steps]
        inner = [
            0 if n in self.results else prod(s) * step.region.dtype.itemsize for n, (s, step) in _numbered(made, self.steps)
        ]
        where, size = places(inner, last)
        if size > _MOST_BYTES or 0 in map(prod, made) or None in codes:
            return None
        computed = [value.contiguous() for value in run(self.evaluate, statics[: self.leaves])]
        memory = torch.empty(size, dtype=torch.uint8)
        outputs = {n: Given(self.given + at) for at, n in enumerate(self.results)}
        images = [Memory(Given(n), shape) for n, shape in enumerate(shapes)]
        images += [Memory(outputs.get(n, memory.data_ptr() + where[n]), shape) for n, shape in enumerate(made)]
        calls, kept = list[tuple[Code, Sequence[int | Given]]](), [memory, *computed]
        for n, (step, code) in enumerate(zip(self.steps, codes, strict=True)):
            weight = self._weight(step, statics, computed)
            if weight is None:
                return None
            extras = [(computed if static else images)[at] for static, at in step.extras]
            x, out = images[step.images], images[self.given + n]
            assert code is not None
            calls.append((code, code.words(*step.region.taken(x, weight, extras, out))))
            kept.append(weight)
        results = [(made[n], contiguous_strides(made[n]), self.steps[n].region.dtype) for n in self.results]
        return _Ready(KernelsInARow(calls), results, kept)

    def _weight(self, step: Step, statics: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> Any:
        """What a kernel takes as its weight, None where the region is dense."""
        if step.weight is not None:
            return computed[step.weight]
        region = step.region
        assert isinstance(region, ConvolvedRegion)
        return region.packings.current([statics[n] for n in step.leaves], region.densest)


def _code(kernel: Kernel) -> Code | None:
    return kernel.code if isinstance(kernel, RegionKernel) else None


def _numbered(*several: Sequence[Any]) -> Any:
    return enumerate(zip(*several, strict=True))


@dataclass(frozen=True, eq=False)
class _Ready:
    """All calls for images of some sizes; `kept` is what they read."""

    kernels: KernelsInARow
    results: list[tuple[_Shape, _Shape, torch.dtype]]
    kept: list[Any]

    def __call__(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = [allocate(*each) for each in self.results]
        self.kernels([each.data_ptr() for each in (*images, *results)])
        return results


class _Statics:
    """What was prepared for some tensors as they were, by the sizes of images; nothing if torch does not tell when they change."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.changing = not all(map(counts_writes, tensors))
        self.prepared = dict[tuple[_Shape, ...], _Ready | None]()
        forget = weakref.WeakMethod(self._forget)
        self._marks = [
            (weakref.ref(t, lambda _: (own := forget()) and own()), 0 if self.changing else t._version, t.data_ptr())
            for t in tensors
        ]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, and nobody has written to them."""
        if self.changing:
            return True
        for (mine, version, address), tensor in zip(self._marks, tensors, strict=True):
            if mine() is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        return True

    def _forget(self) -> None:
        self.prepared.clear()


class _Here(threading.local):
    """What a Python thread has prepared."""

    def __init__(self) -> None:
        self.known: _Statics | None = None
