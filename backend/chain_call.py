"""What runs behind `gossamer::region` where the region is a chain: several weights, one kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.attention import Attention
from gossamer.backend.chains import Chain
from gossamer.backend.packings import Packings
from gossamer.backend.region_op import allocate
from gossamer.backend.weights import run
from gossamer.runtime.packing import Packed
from gossamer.sparsity.kernels import RegionKernel


@dataclass(frozen=True, eq=False)
class ChainWeight:
    """One weight of a chain: its packings, the number of tensors that it is computed from, the density above which dense is
    faster, and whether sparse is faster even if it changes at every call."""

    packings: Packings
    leaves: int
    densest: float
    renew: bool


@dataclass(eq=False)
class CompiledChain:
    """A chain that can run, sparse or dense.

    operands   [first input, leaves of all weights, other inputs]; the first input is [sequences, length, K] where there is
               attention, else [T, K]
    body       computes it densely from (first input, weights, other inputs, length)
    attends    whether there is attention
    m, dtype   columns and type of the result
    """

    kernel: RegionKernel
    weights: tuple[ChainWeight, ...]
    body: Callable[..., torch.Tensor]
    attends: bool
    verify: bool
    m: int
    dtype: torch.dtype

    @classmethod
    def of(cls, chain: Chain, kernel: RegionKernel, weights: tuple[ChainWeight, ...], verify: bool) -> "CompiledChain":
        """The chain with its kernel."""
        out = chain.output.meta["val"]
        return cls(kernel, weights, _dense(chain), chain.attention is not None, verify, out.shape[-1], out.dtype)

    def rows(self, x: torch.Tensor) -> int:
        """Rows of the result for this first input."""
        return x.shape[0] * x.shape[1] if self.attends else x.shape[0]

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        x, length = operands[0], 0
        tokens = self.rows(x)
        out = allocate((tokens, self.m), (self.m, 1), self.dtype)
        if tokens * self.m == 0:
            return out
        if self.attends:
            length = x.shape[1]
            x = x.reshape(tokens, x.shape[2])
        arguments: list[torch.Tensor | Packed | int] = [x if x.is_contiguous() else x.contiguous()]
        at, hollow = 1, False
        for weight in self.weights:
            statics = operands[at : at + weight.leaves]
            at += weight.leaves
            packed = (weight.packings.verified if self.verify else weight.packings.current)(
                statics, weight.densest, weight.renew
            )
            if packed is None:
                hollow = True
                break
            arguments.append(packed)
        if hollow:
            return self._run_dense(x, operands, length)
        arguments += [extra if extra.is_contiguous() else extra.contiguous() for extra in operands[at:]]
        if self.attends:
            arguments.append(length)
        self.kernel(arguments, out, length)
        return out

    def _run_dense(self, x: torch.Tensor, operands: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        values, at = [], 1
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for weight in self.weights:
                values.append(run(weight.packings.evaluate, operands[at : at + weight.leaves]))
                at += weight.leaves
            return self.body(x, values, operands[at:], length).contiguous()


def _dense(chain: Chain) -> Callable[..., torch.Tensor]:
    """The chain in plain torch: what runs where a weight has become too dense. It holds no node of the graph."""
    numbers: dict[fx.Node, int] = {i.node: n for n, i in enumerate(chain.inputs)}
    steps = []
    for stage in chain.stages:
        steps.append(
            (stage.body, stage.contraction is not None, _plain(stage.attention), [numbers[o.node] for o in stage.operands])
        )
        numbers[stage.output] = len(numbers)

    def compute(x: torch.Tensor, weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        values, remaining = [x, *others], iter(weights)
        for body, multiplies, attend, operands in steps:
            arguments = [values[n] for n in operands]
            if multiplies:
                arguments.insert(1, next(remaining))
            values.append(body(*arguments) if attend is None else attend(length, *arguments))  # type: ignore[misc]
        return values[-1]

    return compute


def _plain(attention: Attention | None) -> Callable[..., torch.Tensor] | None:
    """Attention on matrices in plain torch: (length, q, k, v, mask) → [T, heads x size]."""
    if attention is None:
        return None
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_size
    offsets = [offset for _, offset in attention.operands]
    causal, scale, key_mask = attention.causal, attention.scale, attention.key_mask

    def attend(length: int, *matrices: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            matrix[:, offset : offset + count * size].reshape(-1, length, count, size).transpose(1, 2)
            for matrix, offset, count in zip(matrices, offsets, (heads, kv_heads, kv_heads), strict=False)
        )
        mask = None
        if len(matrices) > 3:
            mask = matrices[3].reshape(q.shape[0], 1, 1 if key_mask else length, length)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
        )
        return y.transpose(1, 2).reshape(-1, heads * size)

    return attend
