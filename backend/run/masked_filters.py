"""gossamer::masked_filter_gradient(g, x, mask, ...) returns the gradient of a convolution's weight, times a mask.

    g [N, M, pixels...], x [N, C, pixels...], mask [M, C / groups, kernel...], all f32 or f64, on CPUs

Only entries where the mask is not 0 are summed. The others are 0, whatever values g and x have.

All images of a channel are in one line of memory, with zeros around them. For strides, they are in phases (see window.py). So
the values of x that a tap reads for neighbouring pixels of g are neighbours, too. The gradient of an entry is the product of
two lines: g with zeros between its rows, and the line of x that begins at the entry's place. So there is no array of the size
of x times the taps. The values of x that meet zeros of g must be finite. If a sum is NaN, torch computes all entries again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.operations import Operation
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.operations.token_samples import sampled_at_places

aten = torch.ops.aten


@dataclass(frozen=True)
class Line:
    """The layout of images in a line of memory. Each field has an entry for each dimension of the images.

    rows     the sizes of g
    sizes    the sizes of x
    stride, padding
             those of the convolution
    length   the places along the dimension, including zeros
    lead     the zeros before the first place
    phases   the phases that taps read; a phase is a place of x modulo the stride
    shifts   for each tap: its phase, and the places by which it reads further
    """

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    length: tuple[int, ...]
    lead: tuple[int, ...]
    phases: tuple[tuple[int, ...], ...]
    shifts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, rows: Any, sizes: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Self:
        """Returns the layout for gradients with sizes `rows`, and images with `sizes`."""
        lengths, leads, reads = list[int](), list[int](), list[list[tuple[int, int]]]()
        for q, n, k, s, p, d in zip(rows, sizes, kernel, stride, padding, dilation, strict=True):
            taps, reach = range(0, d * k, d), d * (k - 1) // s
            if s == 1:  # the zeros after a row are also those before the next one
                after = max(0, q - 1 + reach - p - (n - 1))
                lengths.append(max(q, n + max(p, after)))
                leads.append(p)
            else:
                lengths.append(q + reach)
                leads.append(0)
            reads.append([(tap % s, tap // s) for tap in taps])
        shifts = tuple((tuple(a for a, _ in each), tuple(b for _, b in each)) for each in product(*reads))
        phases = tuple(sorted({phase for phase, _ in shifts}))
        given = tuple(rows), tuple(sizes), tuple(stride), tuple(padding)
        return cls(*given, tuple(lengths), tuple(leads), phases, shifts)

    @property
    def plain(self) -> bool:
        """Whether images need no copy, because their memory has this layout already."""
        once = len(self.shifts) == 1 and set(self.stride) == {1}
        return once and self.rows == self.sizes == self.length and not any(self.padding)

    @property
    def steps(self) -> list[int]:
        """The distance from a place to the next one along each dimension."""
        return [prod(self.length[axis + 1 :]) for axis in range(len(self.length))]

    def along(self, places: Sequence[int]) -> int:
        """Returns the distance from the start of the line to a place."""
        return sum(place * step for place, step in zip(places, self.steps, strict=True))

    def elements(self, images: int) -> int:
        """Returns the number of elements of one phase of a channel."""
        furthest = max(self.along(shift) for _, shift in self.shifts)
        return self.along(self.lead) + images * prod(self.length) + furthest

    def with_zeros_between(self, g: Tensor) -> Tensor:
        """Returns g, [N, M, pixels...], as [1, M, N pixels and zeros]."""
        images, rows = g.shape[:2]
        line = empty([rows, images, *self.length], g.dtype).zero_()
        line[(slice(None), slice(None), *(slice(n) for n in self.rows))] = g.transpose(0, 1)
        return line.view(1, rows, -1)

    def with_zeros_around(self, x: Tensor) -> Tensor:
        """Returns x, [N, C, pixels...], as [1, elements]."""
        images, channels = x.shape[:2]
        elements = self.elements(images)
        line = empty([channels, len(self.phases), elements], x.dtype).zero_()
        x = x.transpose(0, 1)
        strides = [len(self.phases) * elements, prod(self.length), *self.steps]
        for number, phase in enumerate(self.phases):
            taken, begin = [slice(None)] * 2, self.along(self.lead) + number * elements
            for n, a, s, p, length, step in zip(
                self.sizes, phase, self.stride, self.padding, self.length, self.steps, strict=True
            ):
                if s == 1:
                    taken.append(slice(min(n, length)))
                    continue
                first = -(-max(0, p - a) // s)  # the first place of the phase after the padding
                source = first * s + a - p
                taken.append(slice(source, max(source, min(n, source + (length - first) * s)), s))
                begin += first * step
            given = x[tuple(taken)]
            line.as_strided(given.shape, strides, begin).copy_(given)
        return line.view(1, -1)

    def places(self, channels: Tensor, taps: Tensor, images: int) -> Tensor:
        """Returns the places in the result of `with_zeros_around` at which the lines of these channels and taps begin."""
        elements, numbers = self.elements(images), {phase: number for number, phase in enumerate(self.phases)}
        first = torch.tensor(
            [numbers[phase] * elements + self.along(shift) for phase, shift in self.shifts], device=taps.device
        )
        return channels * (len(self.phases) * elements) + first[taps]


@dataclass(frozen=True, eq=False)
class _Kept:
    """The entries that a mask keeps, row by row.

    positions  the first entry of each row
    entries    the indices of the entries in the flat mask
    places     the beginnings of the entries' lines in x
    factors    the values of the mask; None if all are 1
    """

    positions: Tensor
    entries: Tensor
    places: Tensor
    factors: Tensor | None

    @classmethod
    def of(cls, mask: Tensor, line: Line, images: int, groups: int) -> "_Kept":
        rows, channels = mask.shape[:2]
        flat = mask.flatten(1)
        kept = flat != 0
        entries = kept.flatten().nonzero().flatten()
        positions = torch.zeros(rows + 1, dtype=torch.int64)
        torch.cumsum(kept.sum(1), 0, out=positions[1:])
        row, column, taps = entries // flat.shape[1], entries % flat.shape[1], len(line.shifts)
        channel = column // taps + row // (rows // groups) * channels
        places = line.places(channel, column % taps, images)
        if channels * groups * len(line.phases) * line.elements(images) < 1 << 31:
            places = places.int()
        factors = flat.flatten()[entries]
        return cls(positions, entries, places, None if bool((factors == 1).all()) else factors)


_kept: Remembered[_Kept] = Remembered(most=256)


def _on_cpu(
    g: Tensor,
    x: Tensor,
    mask: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    out = mask.new_zeros(mask.shape)
    if 0 in (*g.shape, *x.shape):
        return out
    line = Line.of(g.shape[2:], x.shape[2:], mask.shape[2:], stride, padding, dilation)
    images = 1 if line.plain else len(x)
    kept = _kept.get([mask], (line, images, groups), lambda: _Kept.of(mask, line, images, groups))
    if not kept.entries.numel():
        return out
    if line.plain:
        values = sampled_at_places(kept.positions, kept.places, g.contiguous().flatten(2), x.contiguous().flatten(1))
    else:
        values = sampled_at_places(kept.positions, kept.places, line.with_zeros_between(g), line.with_zeros_around(x))
        if bool(values.isnan().any()):
            values = _by_torch(g, x, mask, stride, padding, dilation, groups).flatten()[kept.entries]
    out.view(-1).index_copy_(0, kept.entries, values if kept.factors is None else values.mul_(kept.factors))
    return out


def _by_torch(g: Tensor, x: Tensor, mask: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    none = [0] * (g.dim() - 2)
    found: Tensor = aten.convolution_backward(
        g, x, mask, None, stride, padding, dilation, False, none, groups, [False, True, False]
    )[1]
    return found


def _fake(g: Tensor, x: Tensor, mask: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any) -> Tensor:
    return g.new_empty(mask.shape)


masked_filter_gradient = Operation(
    "masked_filter_gradient(Tensor g, Tensor x, Tensor mask, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
    _on_cpu,
    fake=_fake,
    remembers_floats=True,
).register()
