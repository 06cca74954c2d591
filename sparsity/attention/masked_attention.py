"""Scaled dot-product attention that computes only the tiles which a mask leaves.

gossamer::attend_masked(q, k, v, mask, scale, cap) -> (Tensor, Tensor)     the mask's tiles are found at the call
gossamer::attend_tiles(q, k, v, table, scale, cap) -> (Tensor, Tensor)     they are known
gossamer::attend_masked_backward, attend_tiles_backward                         the gradients of q, k and v

They give what `aten::_scaled_dot_product_flash_attention_for_cpu` and its backward give: the weighted values, the logarithm of
each query's sum of exp(score), and the gradients. With a cap a score is cap * tanh(scale * <q, k> / cap), before the mask
adds to it. Queries that see no key get 0. The scores are kept by none of them.
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.attention import TANH, TILE_QUERIES, Step
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.region_kernel import RegionKernel, SparseOperand
from gossamer.runtime.remembered import Remembered
from gossamer.runtime.torch_internals import cpu_attention, cpu_attention_backward
from gossamer.sparsity.attention.blocks_ir import attend_blocks
from gossamer.sparsity.attention.tile_table import TileTable, tile_table
from gossamer.sparsity.kernels.compile_kernel import compile_region

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MOST_SHARE = 0.8
"""The share of tiles above which torch's own kernel, which computes all, may be the faster."""

_tables = Remembered[Any]("all", most=16)
"""Of masks that graphs compute: Inductor uses a buffer for one mask after the other, and torch does not count what it writes
there."""


@lru_cache(256)
def attention_kernel(what: str, head_size: int, scale: float, score: Sequence[Step] = ()) -> RegionKernel:
    """The kernel for heads of a size: "forward", or the gradients of "queries" or "keys". CompileError if it cannot be made."""
    return compile_region(attend_blocks(what, head_size, scale, score), schedule="blocks")


def cap_steps(cap: float | None) -> tuple[Step, ...]:
    """The steps of a soft cap."""
    return () if cap is None else (1 / cap, TANH, cap)


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: TileTable, scale: float, score: Sequence[Step] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of [batch, heads, queries, size] to [batch, kv heads, keys, size] where the table says.

    f32, bf16 or f16, computed with in f32; heads is a multiple of kv heads. The steps of the score function are by default
    that the floats of the table are added. The result has the type and strides of q, the logarithms are f32
    [batch, heads, queries].
    """
    steps = table.steps if score is None else tuple(score)
    out = torch.empty_like(q)
    given = [_rows(q), _streamed(k), _streamed(v)]
    wide = out if out.dtype == torch.float32 else torch.empty_like(given[0])
    statistics = torch.empty(q.shape[:3], dtype=torch.float32)
    if not out.numel() or not k.shape[2]:
        return out.zero_(), statistics.zero_()
    sizes = _sizes(q, k, table, q.shape[2], [*given, wide])
    attention_kernel("forward", q.shape[3], scale, steps).into([wide, statistics], [*given, *table.tensors, *sizes])
    if wide is not out:
        out.copy_(wide)
    return out, statistics


def gradients(
    upstream: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    statistics: Tensor,
    tables: tuple[TileTable, TileTable],
    scale: float,
    score: Sequence[Step] | None = None,
    of_statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v for that of the result, of `attend(*given, table, scale, score)`, and for that of the statistics.
    Two tables are needed: of the mask, and of the mask with queries and keys in each other's place."""
    q, k, _ = given
    of = tuple(_result(x, x.dtype) for x in given)
    if not out.numel() or not k.numel():
        return tuple(x.zero_() for x in of)  # type: ignore[return-value]
    wide = [x if x.dtype == torch.float32 else _result(x, torch.float32) for x in of]
    read = [_streamed(x) for x in (*given, upstream)]
    delta = (read[3] * out).sum(-1, dtype=torch.float32).contiguous()
    if of_statistics is not None:
        delta -= of_statistics
    for what, table, made in (("queries", tables[0], wide[:1]), ("keys", tables[1], wide[1:])):
        sizes = _sizes(q, k, table, q.shape[2] if what == "queries" else k.shape[2], [*read, *made])
        operands: list[Tensor | SparseOperand | int] = [
            read[3],
            statistics.contiguous(),
            delta,
            *read[:3],
            *table.tensors,
            *sizes,
        ]
        attention_kernel(what, q.shape[3], scale, table.steps if score is None else tuple(score)).into(made, operands)
    for x, computed in zip(of, wide, strict=True):
        if x is not computed:
            x.copy_(computed)
    return of  # type: ignore[return-value]


def _rows(x: Tensor) -> Tensor:
    """In f32, the elements of a head next to each other."""
    x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _streamed(x: Tensor) -> Tensor:
    """In f32, the tokens of a head next to each other: a power of two apart, they would share few lines of the cache."""
    return x.float().contiguous()


def _result(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a gradient, token by token, as torch's own operation gives it."""
    batch, heads, tokens, size = x.shape
    return x.new_empty((batch, tokens, heads, size), dtype=dtype).transpose(1, 2)


def _sizes(q: Tensor, k: Tensor, table: TileTable, rows: int, strided: Sequence[Tensor]) -> list[int]:
    """What kernels take as sizes; `rows` queries or keys are those that the table goes by."""
    positions, (by_batch, by_head, by_row) = table.positions, table.positions.stride()
    strides = (
        by_batch if positions.shape[0] > 1 else 0,
        by_head if positions.shape[1] > 1 else 0,
        by_row if positions.shape[2] > 2 or rows <= TILE_QUERIES else 0,
    )
    sizes = [q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], *strides]
    for x in strided:
        sizes += x.stride()[:3]
    return sizes


# The operations


def _expanded(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """[batch or 1, heads or 1, queries, keys]"""
    mask = mask if mask.dim() == 4 else mask[None, None]
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])


@dataclass(frozen=True)
class Mask:
    """A mask that is looked at when the call is made.

    value  gives it: [batch or 1, heads or 1, queries or 1, keys] or [queries, keys], of bools, or of numbers to add
    known  (sizes, make) → what `make` returns for this mask, remembered
    """

    value: Callable[[], Tensor]
    known: Callable[[Sequence[Hashable], Callable[[], Any]], Any]

    def table(self, q: Tensor, k: Tensor, turned: bool = False) -> TileTable:
        """Its table, or that of its transpose."""
        sizes = "backward" if turned else "forward", q.shape[2], k.shape[2]

        def make() -> TileTable:
            mask = _expanded(self.value(), q, k)
            return tile_table(mask, turned)

        table: TileTable = self.known(sizes, make)
        return table

    def added(self, dtype: torch.dtype) -> Tensor:
        """As numbers to add to scores: made once for all layers, where torch's own kernel computes them all."""

        def make() -> Tensor:
            mask = self.value()
            if mask.dtype != torch.bool:
                return mask.to(dtype, copy=True)  # what is remembered shares no memory
            return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))

        numbers: Tensor = self.known(("added", dtype), make)
        return numbers


def attend_where(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """`attend` where the mask leaves few tiles or there is a cap, else torch's own kernel."""
    table = mask.table(q, k)
    if cap is not None or table.share(k.shape[2]) <= MOST_SHARE:
        return attend(q, k, v, table, scale, (*cap_steps(cap), *table.steps))
    out, statistics = cpu_attention(q, k, v, 0.0, False, attn_mask=mask.added(q.dtype), scale=scale)
    like = torch.empty_like(q)
    return out if out.stride() == like.stride() else like.copy_(out), statistics.contiguous()


def gradients_where(
    upstream: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    statistics: Tensor,
    mask: Mask,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients` of `attend_where`."""
    q, k, _ = given
    table = mask.table(q, k)
    if cap is not None or table.share(k.shape[2]) <= MOST_SHARE:
        tables = table, mask.table(q, k, turned=True)
        return gradients(upstream, given, out, statistics, tables, scale, (*cap_steps(cap), *table.steps))
    by_token = statistics.transpose(1, 2).contiguous().transpose(1, 2)
    found = cpu_attention_backward(upstream, *given, out, by_token, 0.0, False, attn_mask=mask.added(q.dtype), scale=scale)
    return tuple(_result(x, x.dtype).copy_(x) for x in found)  # type: ignore[return-value]


def _mask(mask: Tensor | None, k: Tensor) -> Mask:
    if mask is None:
        return _everything(k.shape[2])
    return Mask(lambda: mask, lambda more, make: _tables.get([mask], more, make))


@lru_cache(16)
def _everything(keys: int) -> Mask:
    """The mask that hides nothing."""
    found: dict[Sequence[Hashable], Any] = {}

    def known(sizes: Sequence[Hashable], make: Callable[[], Any]) -> Any:
        if sizes not in found:
            found[sizes] = make()
        return found[sizes]

    return Mask(lambda: torch.ones(1, 1, 1, keys, dtype=torch.bool), known)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    return attend_where(q, k, v, _mask(mask, k), scale, cap)


def _attend_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_where(upstream, (q, k, v), out, statistics, _mask(mask, k), scale, cap)


def _attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    table = TileTable(*parts)
    return attend(q, k, v, table, scale, (*cap_steps(cap), *table.steps))


def _attend_tiles_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    parts: list[Tensor],
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tables = TileTable(*parts[:4]), TileTable(*parts[4:])
    return gradients(upstream, (q, k, v), out, statistics, tables, scale, (*cap_steps(cap), *tables[0].steps))


def fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """What tracing sees of attention."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def fake_backward(_upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    """What tracing sees of its gradients."""
    return tuple(_result(x, x.dtype) for x in (q, k, v))


_GIVEN = "Tensor q, Tensor k, Tensor v, "
_SAVED = f"Tensor upstream, {_GIVEN}Tensor out, Tensor statistics, "
for _name, _arguments, _results, _cpu, _meta in (
    ("attend_masked", f"{_GIVEN}Tensor? mask", 2, _attend, fake),
    ("attend_tiles", f"{_GIVEN}Tensor[] table", 2, _attend_tiles, fake),
    ("attend_masked_backward", f"{_SAVED}Tensor? mask", 3, _attend_backward, fake_backward),
    ("attend_tiles_backward", f"{_SAVED}Tensor[] tables", 3, _attend_tiles_backward, fake_backward),
):
    LIBRARY.define(f"{_name}({_arguments}, float scale, float? cap) -> ({', '.join(['Tensor'] * _results)})", tags=TAGS)
    implement(_name, _cpu)
    torch.library.register_fake(f"gossamer::{_name}", _meta, lib=LIBRARY)

attend_masked = torch.ops.gossamer.attend_masked.default
"""Attention that looks at its mask at every call, and may have a soft cap."""
