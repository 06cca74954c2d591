"""Which tokens an expert gets: the slots of a layer, sorted by their expert.

A token has `top` slots, one for each expert that it chose: slot s belongs to token s // top.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError

Sort = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""Of keys [n] of int32 or int64 below a number: where those of each begin in sorted order [number + 1], and which key each is
there [n], both int64; None for keys in order."""


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
        """Of the experts [tokens, top] that tokens chose among `count`. ArgumentError for one that does not exist."""
        check_experts(experts, count)
        keys = experts.reshape(-1).contiguous()  # kernels read it by address: of an expanded one, that is a view
        positions, order = sort(keys if keys.dtype == torch.int32 else keys.long(), count)
        return cls(positions, torch.arange(keys.numel(), device=keys.device) if order is None else order, experts.shape[1])

    @cached_property
    def tokens(self) -> Tensor:
        """[slots]: whose each slot of the order is."""
        return self.order // self.top

    @cached_property
    def experts(self) -> Tensor:
        """[slots]: the expert of each slot of the order."""
        counts = self.positions.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=self.order.numel())

    def hit(self) -> Iterator[tuple[int, int, int]]:
        """Each expert that some token chose, and where its slots begin and end in the order."""
        for expert, (begin, end) in enumerate(pairwise(self.positions.tolist())):
            if end > begin:
                yield expert, begin, end


def check_experts(experts: Tensor, count: int) -> None:
    """ArgumentError unless all are from 0 to count - 1; it names the first token that chose another."""
    if not experts.numel():
        return
    least, most = map(int, experts.aminmax())
    if least >= 0 and most < count:
        return
    token, slot = ((experts < 0) | (experts >= count)).nonzero()[0].tolist()
    raise ArgumentError(
        f"experts: token {token} chose expert {int(experts[token, slot])} in slot {slot}, there are {count}: 0 to {count - 1}"
    )
