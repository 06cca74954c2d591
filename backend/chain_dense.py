"""Chains in plain torch: what runs where a weight has become too dense. Holds no node of a graph, so that it can be pickled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from gossamer.backend.attention import Attention
    from gossamer.backend.chains import Chain


@dataclass(frozen=True)
class DenseAttention:
    """Attention on matrices: (length, q, k, v, mask) → [T, heads x size]; fields as in `Attention`."""

    heads: int
    kv_heads: int
    size: int
    offsets: tuple[int, ...]
    causal: bool
    scale: float | None
    key_mask: bool

    @classmethod
    def of(cls, found: "Attention") -> "DenseAttention":
        """The same without the graph."""
        offsets = tuple(offset for _, offset in found.operands)
        return cls(found.heads, found.kv_heads, found.head_size, offsets, found.causal, found.scale, found.key_mask)

    def __call__(self, length: int, *matrices: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            matrix[:, offset : offset + count * self.size].reshape(-1, length, count, self.size).transpose(1, 2)
            for matrix, offset, count in zip(matrices, self.offsets, (self.heads, self.kv_heads, self.kv_heads), strict=False)
        )
        mask = None
        if len(matrices) > 3:
            mask = matrices[3].reshape(q.shape[0], 1, 1 if self.key_mask else length, length)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )
        return y.transpose(1, 2).reshape(-1, self.heads * self.size)


@dataclass(frozen=True)
class _Step:
    """A stage: what it computes, whether from a weight, and the numbers of its operands among inputs and earlier stages."""

    compute: Callable[..., torch.Tensor]
    multiplies: bool
    attends: bool
    operands: tuple[int, ...]


@dataclass(frozen=True)
class DenseChain:
    """A chain as a function of (first input, weights, other inputs, length of the sequences)."""

    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, chain: "Chain") -> "DenseChain":
        """All stages, in order."""
        numbers: dict[fx.Node, int] = {i.node: n for n, i in enumerate(chain.inputs)}
        steps = []
        for stage in chain.stages:
            compute = stage.body if stage.attention is None else DenseAttention.of(stage.attention)
            assert compute is not None
            operands = tuple(numbers[o.node] for o in stage.operands)
            steps.append(_Step(compute, stage.contraction is not None, stage.attention is not None, operands))
            numbers[stage.output] = len(numbers)
        return cls(tuple(steps))

    def __call__(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor], length: int
    ) -> torch.Tensor:
        values, remaining = [x, *others], iter(weights)
        for step in self.steps:
            arguments = [values[n] for n in step.operands]
            if step.multiplies:
                arguments.insert(1, next(remaining))
            values.append(step.compute(length, *arguments) if step.attends else step.compute(*arguments))
        return values[-1]
