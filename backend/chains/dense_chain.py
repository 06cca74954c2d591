"""Computes chains in plain torch. A compiled chain calls this if a weight has become too dense for its kernel.

A `DenseChain` holds no nodes of a graph, so that it can be pickled. `attend`, `normalize`, `rotate` and `regroup` compute what
these operations of the kernel dialect compute. They take the length of sequences, matrices with one row for each token, and the
same attributes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from gossamer.backend.chains.find_chains import Chain, Stage


def attend(
    length: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, heads: int, kv_heads: int, head_size: int,
    offsets: Sequence[int], scale: float, cap: float, causal: bool, key_mask: bool,
) -> Tensor:  # fmt: skip
    """Computes attention within sequences."""
    q, k, v = (
        _heads(x, offset, count, head_size).unflatten(0, (-1, length)).transpose(1, 2)
        for x, offset, count in zip((q, k, v), offsets, (heads, kv_heads, kv_heads), strict=True)
    )
    if mask is not None:
        mask = mask.reshape(q.shape[0], 1, 1 if key_mask else length, length)
        if causal:
            mask = mask + torch.full((length, length), float("-inf"), dtype=mask.dtype).triu(1)
    causal = causal and mask is None
    if cap:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.tanh(q @ k.mT * (scale / cap)) * cap
        scores = scores if mask is None else scores + mask
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else torch.zeros((), dtype=torch.bool)
        scores = scores.masked_fill(hidden, float("-inf"))
        nothing_seen = (scores == float("-inf")).all(-1, keepdim=True)
        y = scores.softmax(-1).masked_fill(nothing_seen, 0) @ v
    else:
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
        )
    return y.transpose(1, 2).reshape(-1, heads * head_size)


def rotate(length: int, x: Tensor, *tables: Tensor, heads: int, head_size: int, offset: int, rotated: int) -> Tensor:
    """Computes rotary position embedding of heads by tables of cosines and sines."""
    half = rotated // 2
    low, high, kept = _heads(x, offset, heads, head_size).split((half, half, head_size - rotated), -1)
    (c, d), (s, t) = ((table[:, None, :half], table[:, None, -half:]) for table in tables)
    return torch.cat((low * c - high * s, high * d + low * t, kept), -1).reshape(-1, heads * head_size)


def normalize(length: int, x: Tensor, weight: Tensor, *, heads: int, head_size: int, offset: int, eps: float) -> Tensor:
    """Divides heads by their root mean squares, and multiplies them with a weight."""
    given = _heads(x, offset, heads, head_size)
    wide = given if x.dtype is torch.float64 else given.float()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide.dtype)
    return scaled.to(x.dtype).reshape(-1, heads * head_size)


def regroup(length: int, x: Tensor, *, inverse: bool) -> Tensor:
    """Reorders rows from position by position to sequence by sequence, or back if `inverse`."""
    groups = x.shape[0] // length if inverse else length
    return x.reshape(groups, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


def _heads(x: Tensor, offset: int, heads: int, size: int) -> Tensor:
    """Returns heads [T, heads, size], cut out of a matrix [T, columns]."""
    return x[:, offset : offset + heads * size].reshape(-1, heads, size)


OPERATIONS: dict[str, Callable[..., Tensor]] = {"attend": attend, "rotate": rotate, "normalize": normalize}
"""The functions by `operation` of a step (heads.py, attention.py)."""


@dataclass(frozen=True)
class _Step:
    """One call.

    compute       the function
    multiplies    whether it takes the next weight as its second argument
    takes_length  whether it takes the length of sequences first
    operands      the indices of its operands in the list of inputs and results of earlier steps
    """

    compute: Callable[..., Tensor]
    multiplies: bool
    takes_length: bool
    operands: tuple[int, ...]


@dataclass(frozen=True)
class DenseChain:
    """A chain as a function of (first input, weights, other inputs).

    results    the indices of the results in the list of inputs and steps
    products   the number of weights
    length_at  the dimension of the first input that is the length of sequences; None without attention
    """

    steps: tuple[_Step, ...]
    results: tuple[int, ...]
    products: int
    length_at: int | None

    @classmethod
    def of(cls, chain: "Chain") -> "DenseChain":
        """Makes one step of each stage, with `regroup` around them for values that come position by position."""
        numbers: dict[fx.Node, int] = {i.node: n for n, i in enumerate(chain.inputs)}
        steps = list[_Step]()

        def add(node: fx.Node, compute: Callable[..., Any], operands: Sequence[fx.Node], stage: "Stage | None" = None) -> None:
            of_heads, multiplies = stage is None or stage.body is None, stage is not None and stage.contraction is not None
            steps.append(_Step(compute, multiplies, of_heads, tuple(numbers[each] for each in operands)))
            numbers[node] = len(chain.inputs) + len(steps) - 1

        for node in [i.node for i in chain.inputs if i.node in chain.by_position]:
            add(node, partial(regroup, inverse=False), [node])
        for stage in chain.stages:
            compute = stage.body if stage.step is None else partial(OPERATIONS[stage.step.operation], **stage.step.numbers)
            assert compute is not None
            add(stage.output, compute, [o.node for o in stage.operands], stage)
        for node in [output for output in chain.outputs if output in chain.by_position]:
            add(node, partial(regroup, inverse=True), [node])
        results = tuple(numbers[output] for output in chain.outputs)
        length_at = None if chain.attention is None else int(chain.inputs[0].node not in chain.by_position)
        return cls(tuple(steps), results, len(chain.contractions), length_at)

    def __call__(self, x: Tensor, *given: Tensor) -> Tensor | list[Tensor]:
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
