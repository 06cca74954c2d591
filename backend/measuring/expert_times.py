"""Measures which computes routed experts faster for a few tokens: torch's grouped product, or Gossamer's operation.

With few tokens, nearly all the time goes into reading the weights of the chosen experts. Machines differ in which of the two
waits longer for memory. Both are timed once for a shape, on the model's own weights, with other experts at every call. The
ratio is kept on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import fastest, random
from gossamer.runtime.experts.activations import activated
from gossamer.sparsity.experts.routed_linear import routed_linear
from gossamer.sparsity.experts.routed_mlp import routed_mlp

CLEAR = 1.05
"""How many times faster torch has to be to be used. With closer times, the order differs from run to run."""

_ROUNDS = 3
_ROUTINGS = 4  # in a call that is timed: each routing reads mostly other experts

_Way = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, eq=False)
class FewTokens:
    """Experts for a few tokens: a product, or an MLP of two products.

    product     torch's grouped product, of sorted rows, weights [experts, columns, rows] and the ends of each expert's rows
    tokens      number of tokens
    top         number of experts of each token
    gate_up     [experts, rows, columns], a view if they are stored transposed
    down        [experts, outputs, hidden]; None for a single product
    activation  the activation between both products
    layout      how gates and values lie in the rows of `gate_up`
    """

    product: Callable[..., Tensor]
    tokens: int
    top: int
    gate_up: Tensor
    down: Tensor | None = None
    activation: str = "identity"
    layout: str = "up"

    def ratio(self) -> float:
        """Returns the time of Gossamer's operation over that of torch's products, with torch's number of threads."""
        key = [
            str(self.product), self.tokens, self.top, *self.gate_up.shape, *self.gate_up.stride(),
            *(() if self.down is None else (*self.down.shape, *self.down.stride(), self.activation, self.layout)),
            str(self.gate_up.dtype), torch.get_num_threads(),
        ]  # fmt: skip
        return kept("few-tokens", key, self._measured, median)

    def _measured(self) -> float:
        with torch.no_grad():
            x = random(self.tokens, self.gate_up.shape[2], dtype=self.gate_up.dtype)
            drawn, count = torch.Generator().manual_seed(0), self.gate_up.shape[0]
            chosen = [torch.rand(self.tokens, count, generator=drawn).topk(self.top).indices for _ in range(_ROUTINGS)]
            ways: dict[str, _Way] = {"own": self._by_us, "torch": self._by_torch}
            calls = {name: partial(_each, way, x, chosen) for name, way in ways.items()}
            us = fastest(calls, torch.get_num_threads(), _ROUNDS)
        return us["own"] / us["torch"]

    def _by_us(self, x: Tensor, experts: Tensor) -> Tensor:
        if self.down is None:
            return routed_linear(x, experts, self.gate_up)
        scores = torch.ones(experts.shape, dtype=x.dtype)
        return routed_mlp(x, experts, scores, self.gate_up, self.down, activation=self.activation, layout=self.layout)

    def _by_torch(self, x: Tensor, experts: Tensor) -> Tensor:
        ids, order = experts.flatten().sort()
        ends = ids.bincount(minlength=self.gate_up.shape[0]).cumsum(0, dtype=torch.int32)
        tokens = order // self.top
        sums = self.product(x[tokens], self.gate_up.mT, ends)
        if self.down is None:
            return sums
        rows = self.product(activated(sums, self.activation, self.layout), self.down.mT, ends)
        return rows.new_zeros(self.tokens, rows.shape[1]).index_add(0, tokens, rows)


def _each(way: _Way, x: Tensor, chosen: list[Tensor]) -> None:
    for experts in chosen:
        way(x, experts)
