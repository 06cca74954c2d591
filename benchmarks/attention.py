"""Attention under a mask as a problem: its result, or its gradients, in float64 strip by strip of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import largest_error
from benchmarks.registry import Work

STRIP = 256  # queries

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(batch, query, key) → whether the query sees the key, for numbers of any shapes that go together."""


@dataclass(frozen=True, eq=False)
class Attention:
    """Scaled dot-product attention of q, k, v [batch, heads, tokens, size].

    rule       the mask
    backward   whether the gradients are computed, too, for `upstream`
    window     to each side, or 0 for a mask that is none; `causal` without later keys
    """

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    backward: bool
    window: int = 0
    causal: bool = False
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5, "bf16": 3e-2})

    @property
    def precision(self) -> str:
        return "bf16" if self.q.dtype == torch.bfloat16 else "f32"

    def mask(self, queries: slice = slice(None)) -> Tensor:
        """[batch, 1, queries, tokens] of bools, some of the queries only"""
        batch, _, tokens, _ = self.q.shape
        each = torch.arange(tokens)
        return self.rule(torch.arange(batch)[:, None, None, None], each[queries, None], each).expand(batch, 1, -1, -1)

    def reference(self) -> tuple[Tensor, Work]:
        q, k, v = (x.double().requires_grad_(self.backward) for x in (self.q, self.k, self.v))
        results, seen = [], 0
        for start in range(0, q.shape[2], STRIP):
            strip = slice(start, start + STRIP)
            mask = self.mask(strip)
            seen += int(mask.sum())
            with torch.set_grad_enabled(self.backward):
                found = F.scaled_dot_product_attention(q[:, :, strip], k, v, attn_mask=mask)
                if self.backward:
                    found.backward(self.upstream[:, :, strip].double())
            results.append(found.detach())
        gradients = [x.grad for x in (q, k, v)] if self.backward else []
        each = (3.5 if self.backward else 1) * 4 * q.shape[1] * q.shape[3]
        work = Work(each * q.shape[0] * q.shape[2] ** 2, each * seen, 0, 4 * self.q.nbytes)
        return joined([torch.cat(results, 2), *gradients]), work  # type: ignore[list-item]

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)

    def call(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        """What a contender is timed on, given how it computes the result: that and, if they are wanted, the gradients."""
        if not self.backward:
            return lambda: attention(self.q, self.k, self.v).flatten()
        inputs = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]

        def both() -> Tensor:
            with torch.enable_grad():
                found = attention(*inputs)
                return joined([found.detach(), *torch.autograd.grad(found, inputs, self.upstream)])

        return both


def joined(tensors: list[Tensor]) -> Tensor:
    """All elements in a row, for a comparison."""
    return tensors[0].flatten() if len(tensors) == 1 else torch.cat([x.flatten() for x in tensors])
