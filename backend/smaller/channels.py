"""Channels: the parts of a value that the smaller graph may leave out.

A product with a static weight makes new channels, one for each row. Elementwise work ties the channels of its operands.
Attention ties the channels of a head. A channel stays if a channel that it is tied to is needed. Views move channels:

    linear       [batch, tokens, 768]        dims (2,), ids [768]
    .view(…)     [batch, tokens, 12, 64]     dims (2, 3), ids [12, 64], along 0: heads as a whole
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gossamer.backend.smaller.recipe import Known


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of a value.

    dims   the dimensions of the value that channels lie along
    ids    the number of each channel among all of the graph; its shape is that of these dimensions
    along  index in `dims` of the dimension that gets shorter
    const  whether a channel is the same number for any input; same shape as `ids`
    fill   these numbers, in the same shape; None for zeros. Its other elements are finite and have no meaning
    """

    dims: tuple[int, ...]
    ids: Tensor
    along: int
    const: Tensor
    fill: Known | None

    @property
    def dim(self) -> int:
        """The dimension of the value that gets shorter."""
        return self.dims[self.along]

    @property
    def constant(self) -> Tensor:
        """Whether a channel is a constant other than zero, by the present values of `fill`."""
        return self.const if self.fill is None else self.const & (self.fill.value.detach() != 0)

    def lines(self, kept: Tensor) -> Tensor:
        """Returns which indices along `dim` stay. `kept` says which channels of the graph stay."""
        return kept[self.ids].movedim(self.along, 0).flatten(1).any(1) if self.ids.dim() > 1 else kept[self.ids]

    def moved(self, dims: Sequence[int]) -> "Channels":
        """Returns the same channels in other dimensions."""
        return replace(self, dims=tuple(dims))


class Atoms:
    """All channels of a graph: which are tied together, and which are needed."""

    def __init__(self) -> None:
        self._count, self._ties, self._needed = 0, list[tuple[Tensor, Tensor]](), list[Tensor]()

    def new(self, count: int) -> Tensor:
        """Makes new channels, and returns their numbers."""
        self._count += count
        return torch.arange(self._count - count, self._count)

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Makes each channel of `a` stay if its partner in `b` stays, and the other way round."""
        self._ties.append((a.flatten(), b.expand_as(a).flatten()))

    def tie_lines(self, ids: Tensor, along: int) -> None:
        """Ties channels that have the same index in one dimension."""
        if ids.dim() > 1:
            lines = ids.movedim(along, 0).flatten(1)
            self.tie(lines, lines[:, :1])

    def need(self, ids: Tensor, mask: Tensor) -> None:
        """Makes those channels stay that a mask selects."""
        self._needed.append(ids[mask])

    def kept(self, also: Sequence[Tensor] = ()) -> Tensor:
        """Returns whether each channel of the graph stays, if those of `also` are needed, too."""
        label = self._labels(self._ties)
        needed = np.zeros(self._count, dtype=bool)
        for ids in (*self._needed, *also):
            needed[label[ids.numpy()]] = True
        return torch.from_numpy(needed[label])

    def families(self, members: Sequence[Tensor]) -> np.ndarray:
        """Returns a label for each channel: the same for all that are tied, or that are in one of `members`."""
        return self._labels([*self._ties, *[(ids.flatten(), ids.flatten()[:1].expand(ids.numel())) for ids in members]])

    def _labels(self, ties: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
        label = np.arange(self._count)
        pairs = [np.concatenate([each[side].numpy() for each in ties]) for side in (0, 1)] if ties else None
        while pairs is not None:
            least = np.minimum(label[pairs[0]], label[pairs[1]])
            before = label.copy()
            for side in pairs:
                np.minimum.at(label, side, least)
                np.minimum.at(label, before[side], least)
            label = label[label]
            if np.array_equal(before, label):
                break
        return label
