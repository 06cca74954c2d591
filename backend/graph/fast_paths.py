"""Decomposes torch.nn's fast paths for inference. Each is one opaque operation, in which no pass would find the weights.

    _transformer_encoder_layer_fwd(%src, …)      →    linear, attention, linear, layer_norm, linear, gelu, linear, layer_norm
    _native_multi_head_attention(%q, %k, %v, …)  →    linear, attention, linear

As in torch, masks are true (or not 0) for hidden keys. A mask has pairs of query and key or, if it is of type 1, only keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten

_OF_KEYS = 1  # a type of masks, [batch, keys]; the others are [queries, keys] or [batch, heads, queries, keys]


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    def attention(x: Tensor) -> Tensor:
        queries, keys, values = functional.linear(x, qkv_weight, qkv_bias).chunk(3, dim=-1)
        return functional.linear(_attended(queries, keys, values, num_heads, mask, mask_type), proj_weight, proj_bias)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        return functional.linear(functional.gelu(hidden) if use_gelu else functional.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return functional.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return functional.layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attention(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attention(src))
    return norm_2(x + feed_forward(x))


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    if need_weights:
        return NotImplemented  # the operation stays as it is
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    queries, keys, values = (functional.linear(*part) for part in parts)
    attended = _attended(queries, keys, values, num_head, mask, mask_type)
    return functional.linear(attended, proj_weight, proj_bias), None


def _attended(queries: Tensor, keys: Tensor, values: Tensor, heads: int, mask: Tensor | None, mask_type: int | None) -> Tensor:
    """Returns the result of attention, [batch, queries, heads * size], from queries, keys and values of such shapes."""
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (queries, keys, values))
    if mask is not None:
        mask = ~mask.to(torch.bool)
        mask = mask[:, None, None, :] if mask_type == _OF_KEYS else mask
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)


IN_PARTS: dict[Any, Callable[..., Any]] = {
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten._native_multi_head_attention.default: _multi_head_attention,
}
"""A decomposition table for AOTAutograd."""
