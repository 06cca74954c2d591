"""Makes `nn.MultiheadAttention` call its projections as linear layers. Normally it reads their weights itself.

in_proj_weight = [q_proj.weight; k_proj.weight; v_proj.weight]    y = out_proj(attention(q_proj(q), k_proj(k), v_proj(v)))
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@contextmanager
def open_attention(model: nn.Module) -> Iterator[None]:
    """Gives attention of torch.nn its projections as linear layers within the context, and makes it call them.

    Hooks see the inputs of these layers. Changes of their weights and biases reach the parameters that contain them. Attention
    with masked, computed or sharded parameters, or with another `forward`, stays as it is. torch's fused path, which would skip
    the layers, is off.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    made: dict[tuple[int, int], tuple[nn.Parameter, Tensor]] = {}
    opened = {module: vars(module).get("forward") for module in model.modules() if _can_be_opened(module)}
    for attention in opened:
        _open(attention, made)
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for attention, forward in opened.items():
            del vars(attention)["forward"]
            if forward is not None:
                vars(attention)["forward"] = forward
            for name in PROJECTIONS:
                del attention._modules[name]
        with torch.no_grad():
            for parameter, part in made.values():
                if parameter.data_ptr() != part.data_ptr():
                    part.copy_(parameter)


def is_open(module: nn.Module) -> bool:
    """Whether a module is attention that `open_attention` has opened."""
    return isinstance(module, nn.MultiheadAttention) and PROJECTIONS[0] in module._modules


def _can_be_opened(module: nn.Module) -> bool:
    plain = getattr(module.forward, "__func__", None) is nn.MultiheadAttention.forward
    return plain and any(type(module._parameters.get(f"{name}_weight")) is nn.Parameter for name in ("in_proj", *PROJECTIONS))


def _open(attention: nn.Module, made: dict[tuple[int, int], tuple[nn.Parameter, Tensor]]) -> None:
    def part(of: nn.Parameter, number: int, parts: int) -> nn.Parameter:
        """Returns a parameter over a part of another's memory; the same object for tied parameters."""
        if (id(of), number) not in made:
            view = of.detach().chunk(parts)[number]
            made[id(of), number] = nn.Parameter(view, of.requires_grad), view
        return made[id(of), number][0]

    packed, bias = attention._parameters.get("in_proj_weight"), attention._parameters.get("in_proj_bias")
    for number, name in enumerate(PROJECTIONS):
        weight = part(packed, number, 3) if packed is not None else part(attention.get_parameter(f"{name}_weight"), 0, 1)
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        linear.weight = weight
        linear.register_parameter("bias", None if bias is None else part(bias, number, 3))
        attention.add_module(name, linear.train(attention.training))
    vars(attention)["forward"] = partial(_forward, attention)


def _forward(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes nn.MultiheadAttention. torch's function does the work between the projections, with identities as its own."""
    q, k, v = attention.q_proj(query), attention.k_proj(key), attention.v_proj(value)
    swapped = attention.batch_first and q.dim() == 3
    if swapped:
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    one = torch.eye(attention.embed_dim, dtype=q.dtype, device=q.device)
    y, weights = F.multi_head_attention_forward(
        q, k, v, attention.embed_dim, attention.num_heads, None, None, attention.bias_k, attention.bias_v,
        attention.add_zero_attn, attention.dropout, one, None, attention.training, key_padding_mask, need_weights, attn_mask,
        use_separate_proj_weight=True, q_proj_weight=one, k_proj_weight=one, v_proj_weight=one,
        average_attn_weights=average_attn_weights, is_causal=is_causal,
    )  # fmt: skip
    return attention.out_proj(y.transpose(0, 1) if swapped else y), weights
