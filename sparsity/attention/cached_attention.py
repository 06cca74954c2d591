"""Computes attention of a few queries over a cache of keys and values, for a model that generates text.

gossamer::attend_cached(q, k, v, mask, scale, cap) -> Tensor                          all keys are in the cache
gossamer::attend_appended(q, k, v, new_k, new_v, mask, scale, cap) -> (Tensor, Tensor, Tensor)
                                                                  appends new keys to past ones: result, all keys, all values

q is [batch, heads, queries, size], keys and values [batch, kv heads, tokens, size]; heads is a multiple of kv heads. The mask
is added to the scores, [batch or 1, heads or 1, queries or 1, keys]. Sums are in f32. Queries that see no key get 0, as in
torch's operation on CPUs.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.runtime.operations import Operation
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.attention.cached_ir import Heads, contract_of
from gossamer.sparsity.attention.masked_attention import by_features, cap_steps
from gossamer.sparsity.compiler.compile_kernel import compile_region

MOST_QUERIES = 8
"""With more queries, kernels with one query in each lane are used instead."""


@lru_cache(64)
def cached_kernel(heads: Heads, appends: bool) -> RegionKernel:
    """Returns the kernel for these heads, with keys in the cache or appended ones. CompileError if it cannot be compiled."""
    return compile_region(contract_of(heads, appends), schedule="attend-cached")


def heads_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Heads:
    """Returns the properties of the operands for which a kernel is compiled."""
    score = (scale, *cap_steps(cap))
    return Heads(q.shape[3], q.shape[1] // k.shape[1], q.shape[2], q.dtype, score, None if mask is None else mask.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    keys = k.shape[2]
    if not out.numel() or not keys:
        return out.zero_()
    given, mask, by = [*map(by_features, (q, k, v))], *_mask(mask, q, keys)
    sizes = [q.shape[0], q.shape[1], keys, keys, *given[0].stride()[:3], *out.stride()[:3], *by]
    for x in given[1:]:
        sizes += x.stride()[:3]
    cached_kernel(heads_of(q, k, mask, scale, cap), False).into([out], [*given, *mask_operand(mask), *sizes])
    return out


def _append(
    q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, mask: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads, past, size = k.shape
    keys = past + new_k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    all_k, all_v = (x.new_empty((batch, kv_heads, keys, size)) for x in (k, v))
    if not out.numel() or not keys:
        return out.zero_(), all_k, all_v
    given, mask, by = [*map(by_features, (q, k, v, new_k, new_v))], *_mask(mask, q, keys)
    sizes = [batch, q.shape[1], keys, past, *given[0].stride()[:3], *out.stride()[:3], *by]
    for x in given[1:]:
        sizes += x.stride()[:3]
    kernel = cached_kernel(heads_of(q, k, mask, scale, cap), True)
    kernel.into([out, all_k, all_v], [*given, *mask_operand(mask), *sizes])
    return out, all_k, all_v


def mask_operand(mask: Tensor | None) -> list[Tensor]:
    """Returns the mask as a list of operands, empty without a mask."""
    return [] if mask is None else [mask]


def _mask(mask: Tensor | None, q: Tensor, keys: int) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Returns the mask with contiguous keys, and its other strides, 0 along dimensions of size 1."""
    if mask is None:
        return None, (0, 0, 0)
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.shape[3] != keys or (keys > 1 and mask.stride(3) != 1):
        mask = mask.expand(*mask.shape[:3], keys).contiguous()
    batch, head, row = (0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    return mask, (batch, head, row)


def _fake(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _fake_appended(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads, past, size = k.shape
    keys = past + new_k.shape[2]
    return _fake(q), *(x.new_empty((batch, kv_heads, keys, size)) for x in (k, v))  # type: ignore[return-value]


_HOW = "Tensor? mask, float scale, float? cap"
attend_cached = Operation(f"attend_cached(Tensor q, Tensor k, Tensor v, {_HOW}) -> Tensor", _attend, fake=_fake).register()
attend_appended = Operation(
    f"attend_appended(Tensor q, Tensor k, Tensor v, Tensor new_k, Tensor new_v, {_HOW}) -> (Tensor, Tensor, Tensor)",
    _append,
    fake=_fake_appended,
).register()
