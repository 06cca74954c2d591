"""Scaled dot-product attention that computes only the tiles which a mask leaves.

gossamer::attend(q, k, v, mask, scale) -> (Tensor, Tensor)                     the mask's tiles are found at the call
gossamer::attend_tiles(q, k, v, positions, tiles, words, scale) -> (Tensor, Tensor)      they are known

Both give what `aten::_scaled_dot_product_flash_attention_for_cpu` gives: the weighted values, and the logarithm of each
query's sum of exp(score). Queries that see no key get 0. Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.dialects.attention import TILE_QUERIES
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.attention.blocks_ir import attend_blocks
from gossamer.sparsity.attention.tile_table import TileTable, tile_table
from gossamer.sparsity.kernels.compile_kernel import compile_region

MOST_SHARE = 0.6
"""The share of tiles above which torch's own kernel, which computes all, is the faster."""

_tables: Remembered[TileTable] = Remembered(most=8)
_dense = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@lru_cache(256)
def attention_kernel(head_size: int, scale: float) -> RegionKernel:
    """The kernel for heads of a size. CompileError if it cannot be made."""
    return compile_region(attend_blocks(head_size, scale), schedule="blocks")


def attend(q: Tensor, k: Tensor, v: Tensor, table: TileTable, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of [batch, heads, queries, size] to [batch, kv heads, keys, size] where the table says.

    f32, bf16 or f16, computed with in f32; heads is a multiple of kv heads. The result has the type and strides of q, the
    logarithms are f32 [batch, heads, queries].
    """
    q32, k32, v32 = (_rows(x) for x in (q, k, v))
    out = torch.empty_like(q)
    wide = out if out.dtype == torch.float32 else torch.empty_like(q32)
    batch, heads, queries, size = q.shape
    statistics = torch.empty(batch, heads, queries, dtype=torch.float32)
    if not out.numel():
        return out, statistics
    if not k.shape[2]:
        return out.zero_(), statistics.zero_()
    positions = table.positions
    by_batch, by_head, by_row = positions.stride()
    strides = (
        by_batch if positions.shape[0] > 1 else 0,
        by_head if positions.shape[1] > 1 else 0,
        by_row if positions.shape[2] > 2 or queries <= TILE_QUERIES else 0,
    )
    sizes = [batch, heads, heads // k.shape[1], queries, k.shape[2], *strides]
    for x in (q32, k32, v32, wide):
        sizes += x.stride()[:3]
    attention_kernel(size, scale).into([wide, statistics], [q32, k32, v32, positions, table.tiles, table.words, *sizes])
    if wide is not out:
        out.copy_(wide)
    return out, statistics


def _rows(x: Tensor) -> Tensor:
    """In f32, the elements of a head next to each other."""
    x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    shown = mask if mask.dim() == 4 else mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    table = _tables.get([mask], (), lambda: tile_table(shown))
    if table.share(k.shape[2]) > MOST_SHARE:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        out, statistics = _dense(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return _as_strided(out, q), statistics.contiguous()
    return attend(q, k, v, table, scale)


def _as_strided(out: Tensor, q: Tensor) -> Tensor:
    like = torch.empty_like(q)
    return out if out.stride() == like.stride() else like.copy_(out)


def _attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, tiles: Tensor, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, TileTable(positions, tiles, words), scale)


def _fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> (Tensor, Tensor)", tags=TAGS)
LIBRARY.define(
    "attend_tiles(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor tiles, Tensor words, float scale) -> (Tensor, Tensor)",
    tags=TAGS,
)
for _name, _cpu in (("attend", _attend), ("attend_tiles", _attend_tiles)):
    implement(_name, _cpu)
    torch.library.register_fake(f"gossamer::{_name}", _fake, lib=LIBRARY)
