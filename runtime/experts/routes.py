"""Finds the tokens of each expert: by sorting the slots of a layer, or from the ends of rows that are sorted already.

A token has `top` slots, one for each expert that it chose. Slot s belongs to token s // top.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError

Sort = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""sort(keys, number) sorts keys [n], int32 or int64, from 0 to number - 1. Returns two int64 tensors: where each key begins in
sorted order [number + 1], and the index of each sorted key [n]; None in place of the latter if the keys are already in
order."""


@dataclass(frozen=True)
class Routes:
    """The slots of expert e are order[positions[e]] to order[positions[e + 1] - 1], in ascending order.

    positions  [experts + 1], int64
    order      [slots], int64
    top        slots of a token
    """

    positions: Tensor
    order: Tensor
    top: int

    @classmethod
    def of(cls, experts: Tensor, count: int, sort: Sort) -> "Routes":
        """Returns the routes of the experts [tokens, top] that tokens chose among `count` experts.

        Raises ArgumentError if an expert does not exist.
        """
        check_experts(experts, count)
        keys = experts.reshape(-1).contiguous()  # kernels read addresses; reshape of an expanded tensor may be a view
        positions, order = sort(keys if keys.dtype == torch.int32 else keys.long(), count)
        return cls(positions, torch.arange(keys.numel(), device=keys.device) if order is None else order, experts.shape[1])

    @cached_property
    def tokens(self) -> Tensor:
        """[slots]: the token of each slot in `order`."""
        return self.order // self.top

    @cached_property
    def experts(self) -> Tensor:
        """[slots]: the expert of each slot in `order`."""
        counts = self.positions.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=self.order.numel())

    def hit(self) -> Iterator[tuple[int, int, int]]:
        """Yields (expert, begin, end) for each expert that some token chose: its slots are order[begin:end]."""
        for expert, (begin, end) in enumerate(pairwise(self.positions.tolist())):
            if end > begin:
                yield expert, begin, end


def hit(ends: Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yields (expert, begin, end) for each expert that has rows: expert e has those from ends[e - 1] to ends[e].

    Raises ArgumentError unless the ends ascend from 0 on to at most `tokens`.
    """
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if not begin <= end <= tokens:
            raise ArgumentError(
                f"experts: the rows of expert {expert} end at {end}. They must end between {begin}, where those of the expert "
                f"before it end, and {tokens}, the number of tokens (offs of grouped_mm)"
            )
        if end > begin:
            yield expert, begin, end
        begin = end


def check_experts(experts: Tensor, count: int) -> None:
    """Raises ArgumentError unless all experts are from 0 to count - 1. It names the first token that chose another one."""
    if not experts.numel():
        return
    least, most = map(int, experts.aminmax())
    if least >= 0 and most < count:
        return
    token, slot = ((experts < 0) | (experts >= count)).nonzero()[0].tolist()
    raise ArgumentError(
        f"experts: token {token} chose expert {int(experts[token, slot])} in slot {slot}, there are {count}: 0 to {count - 1}"
    )
