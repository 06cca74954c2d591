"""Chains in plain torch: what runs where a weight has become too dense. Holds no node of a graph, so that it can be pickled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from gossamer.backend.chains.attention import Attention
    from gossamer.backend.chains.find_chains import Chain, Stage
    from gossamer.backend.chains.head_norm import HeadNorm
    from gossamer.backend.chains.rotary import Rotation


@dataclass(frozen=True)
class DenseAttention:
    """Attention on matrices: (length, q, k, v, mask) → [T, heads x size]; fields as in `Attention`."""

    heads: int
    kv_heads: int
    size: int
    offsets: tuple[int, ...]
    causal: bool
    scale: float
    cap: float | None
    key_mask: bool

    @classmethod
    def of(cls, found: "Attention") -> "DenseAttention":
        """The same without the graph."""
        offsets = tuple(found.offsets)
        return cls(found.heads, found.kv_heads, found.head_size, offsets, found.causal, found.scale, found.cap, found.key_mask)

    def __call__(self, length: int, *matrices: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            matrix[:, offset : offset + count * self.size].reshape(-1, length, count, self.size).transpose(1, 2)
            for matrix, offset, count in zip(matrices, self.offsets, (self.heads, self.kv_heads, self.kv_heads), strict=False)
        )
        mask = None
        if len(matrices) > 3:
            mask = matrices[3].reshape(q.shape[0], 1, 1 if self.key_mask else length, length)
            if self.causal:
                mask = mask + torch.full((length, length), float("-inf"), dtype=mask.dtype).triu(1)
        causal = self.causal and mask is None
        if self.cap is not None:
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
            scores = torch.tanh(q @ k.mT * (self.scale / self.cap)) * self.cap
            scores = scores if mask is None else scores + mask
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else torch.zeros((), dtype=torch.bool)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0)
            return (weights @ v).transpose(1, 2).reshape(-1, self.heads * self.size)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )
        return y.transpose(1, 2).reshape(-1, self.heads * self.size)


@dataclass(frozen=True)
class DenseRotation:
    """Rotary position embedding of heads: (length, x, cos, sin) → [T, heads x size]; fields as in `Rotation`."""

    heads: int
    offset: int
    size: int
    rotated: int

    @classmethod
    def of(cls, found: "Rotation") -> "DenseRotation":
        """The same without the graph."""
        return cls(found.heads.count, found.heads.offset, found.size, found.rotated)

    def __call__(self, length: int, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        half = self.rotated // 2
        heads = x[:, self.offset : self.offset + self.heads * self.size].reshape(-1, self.heads, self.size)
        low, high, kept = heads.split((half, half, self.size - self.rotated), -1)
        (c, d), (s, t) = ((table[:, None, :half], table[:, None, -half:]) for table in tables)
        return torch.cat((low * c - high * s, high * d + low * t, kept), -1).reshape(-1, self.heads * self.size)


@dataclass(frozen=True)
class DenseHeadNorm:
    """Norms of heads: (length, x, weight) → [T, heads x size]; fields as in `HeadNorm`."""

    heads: int
    offset: int
    size: int
    eps: float

    @classmethod
    def of(cls, found: "HeadNorm") -> "DenseHeadNorm":
        """The same without the graph."""
        return cls(found.heads.count, found.heads.offset, found.size, found.eps)

    def __call__(self, length: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = x[:, self.offset : self.offset + self.heads * self.size].reshape(-1, self.heads, self.size)
        wide = heads if x.dtype is torch.float64 else heads.float()
        scaled = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight.to(wide.dtype)
        return scaled.to(x.dtype).reshape(-1, self.heads * self.size)


@dataclass(frozen=True)
class Regrouping:
    """(length, x) → x with its rows sequence by sequence, not position by position; or back."""

    inverse: bool

    def __call__(self, length: int, x: torch.Tensor) -> torch.Tensor:
        groups = x.shape[0] // length if self.inverse else length
        return x.reshape(groups, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


@dataclass(frozen=True)
class _Step:
    """A stage: what it computes, whether from a weight, whether it takes the length of sequences first, and the numbers of its
    operands among inputs and earlier stages."""

    compute: Callable[..., torch.Tensor]
    multiplies: bool
    takes_length: bool
    operands: tuple[int, ...]


@dataclass(frozen=True)
class DenseChain:
    """A chain as a function of (first input, weights, other inputs).

    results    the numbers of what it gives among inputs and steps
    products   the number of weights
    length_at  the dimension of the first input that is the length of sequences, None where there is no attention
    """

    steps: tuple[_Step, ...]
    results: tuple[int, ...]
    products: int
    length_at: int | None

    @classmethod
    def of(cls, chain: "Chain") -> "DenseChain":
        """All stages, in order."""
        numbers: dict[fx.Node, int] = {i.node: n for n, i in enumerate(chain.inputs)}
        steps: list[_Step] = []

        def add(node: fx.Node, step: _Step) -> None:
            steps.append(step)
            numbers[node] = len(chain.inputs) + len(steps) - 1

        for node in [i.node for i in chain.inputs if i.node in chain.by_position]:
            add(node, _Step(Regrouping(inverse=False), False, True, (numbers[node],)))
        for stage in chain.stages:
            operands = tuple(numbers[o.node] for o in stage.operands)
            add(stage.output, _Step(_function(stage), stage.contraction is not None, stage.body is None, operands))
        for node in [output for output in chain.outputs if output in chain.by_position]:
            add(node, _Step(Regrouping(inverse=True), False, True, (numbers[node],)))
        results = tuple(numbers[output] for output in chain.outputs)
        length_at = None if chain.attention is None else int(chain.inputs[0].node not in chain.by_position)
        return cls(tuple(steps), results, len(chain.contractions), length_at)

    def __call__(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        length = 0
        if self.length_at is not None:
            length, x = x.shape[self.length_at], x.reshape(-1, x.shape[2])
        values, remaining = [x, *given[self.products :]], iter(given[: self.products])
        for step in self.steps:
            arguments = [values[n] for n in step.operands]
            if step.multiplies:
                arguments.insert(1, next(remaining))
            values.append(step.compute(length, *arguments) if step.takes_length else step.compute(*arguments))
        found = [values[number] for number in self.results]
        return found if len(found) > 1 else found[0]


def _function(stage: "Stage") -> Callable[..., torch.Tensor]:
    if stage.attention is not None:
        return DenseAttention.of(stage.attention)
    from gossamer.backend.chains.head_norm import HeadNorm  # what finds them; chains that are on disk do without
    from gossamer.backend.chains.rotary import Rotation

    if isinstance(stage.per_head, HeadNorm):
        return DenseHeadNorm.of(stage.per_head)
    if isinstance(stage.per_head, Rotation):
        return DenseRotation.of(stage.per_head)
    assert stage.body is not None
    return stage.body
