"""Mixtures of experts as people write them: one layer, many spellings."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, TOP, COLUMNS, HIDDEN = 5, 2, 24, 16


class Mixture(nn.Module):
    """A router, and experts that a subclass runs; `forward` in float64 by `exact` is what all of them must give."""

    def __init__(
        self, top: int = TOP, experts: int = EXPERTS, columns: int = COLUMNS, hidden: int = HIDDEN,
        act: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:  # fmt: skip
        super().__init__()
        self.top, self.experts, self.act = top, experts, act
        self.router = nn.Linear(columns, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, columns) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, columns, hidden) * 0.3)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        return scores / scores.sum(-1, keepdim=True) if self.top > 1 else scores, chosen

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
        return F.linear(self.act(gate) * up, self.down[e])


def exact(model: Mixture, x: Tensor) -> Tensor:
    """Every expert of every token, in the type of x."""
    scores, chosen = model.route(x)
    each = torch.stack([model.expert(x, e) for e in range(model.experts)], 1)
    weights = torch.zeros(x.shape[0], model.experts, dtype=x.dtype).scatter(1, chosen, scores)
    return torch.einsum("teh,te->th", each, weights)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product with offsets of transformers, which torch.compile takes in any type."""
    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=ends)  # type: ignore[no-any-return]


class Sorted(Mixture):
    """Rows sorted by expert, and brought back."""

    def products(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        gate, up = grouped(x[order // self.top], self.gate_up.transpose(-2, -1), ends).chunk(2, -1)
        return grouped(self.act(gate) * up, self.down.transpose(-2, -1), ends), order

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        rows, order = self.products(x, chosen)
        rows = rows * scores.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return rows[back].view(x.shape[0], self.top, -1).sum(1)


class SortedAndAdded(Sorted):
    """The same, its rows added to what the tokens have already."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        rows, order = self.products(x, chosen)
        return torch.zeros_like(x).index_add(0, order // self.top, rows * scores.flatten()[order, None])


class SortedTwice(Sorted):
    """The same, brought back by sorting the order."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        rows, order = self.products(x, chosen)
        return torch.einsum("tkh,tk->th", rows[order.argsort()].unflatten(0, (-1, self.top)), scores)


class SortedAndCopied(Sorted):
    """The same, copied to their places."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        rows, order = self.products(x, chosen)
        each = torch.zeros_like(rows).index_copy(0, order, rows * scores.flatten()[order, None])
        return each.unflatten(0, (-1, self.top)).sum(1)


class SortedAndAssigned(Sorted):
    """The same by an assignment."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        rows, order = self.products(x, chosen)
        each = torch.empty_like(rows)
        each[order] = rows
        return torch.einsum("tkh,tk->th", each.unflatten(0, (-1, self.top)), scores)


class Gathered(Mixture):
    """A copy of the weights for each expert of each token."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        ids = chosen.reshape(-1)
        rows = x.repeat_interleave(self.top, 0)
        gate, up = torch.bmm(self.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        each = torch.bmm(self.down[ids], (up * self.act(gate)).unsqueeze(-1)).squeeze(-1)
        return (each * scores.reshape(-1, 1)).view(x.shape[0], self.top, -1).sum(1)


class Einsum(Mixture):
    """The same by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.gate_up[chosen]).chunk(2, -1)
        each = torch.einsum("tki,tkhi->tkh", self.act(gate) * up, self.down[chosen])
        return torch.einsum("tkh,tk->th", each, scores)


class Masked(Mixture):
    """A loop over all experts, each for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.experts):
            y = y + self.expert(x, e) * (scores * (chosen == e)).sum(-1, keepdim=True)
        return y


class Where(Mixture):
    """A loop over all experts, each for its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.experts):
            token, slot = torch.where(chosen == e)
            y.index_add_(0, token, self.expert(x[token], e) * scores[token, slot, None])
        return y


class Assigned(Mixture):
    """The same by assignments."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.experts):
            token, slot = torch.where(chosen == e)
            y[token] += scores[token, slot, None] * self.expert(x[token], e)
        return y


class OneHot(Mixture):
    """The same by a mask [experts, top, tokens]."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y, mask = torch.zeros_like(x), F.one_hot(chosen, self.experts).permute(2, 1, 0)
        for e in range(self.experts):
            slot, token = torch.where(mask[e])
            y.index_add_(0, token, self.expert(x[token], e) * scores[token, slot, None])
        return y


WHOLE = [Sorted, SortedAndAdded, SortedTwice, SortedAndCopied, Gathered, Einsum, Masked]
OPEN = [Where, Assigned, OneHot]
"""Those that need torch._dynamo.config.capture_dynamic_output_shape_ops."""
