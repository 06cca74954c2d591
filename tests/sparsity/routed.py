"""Mixtures of experts and routed products by plain loops over tokens, to compare with."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def expert(x: Tensor, gate_up: Tensor, bias: Tensor | None, activation: str, layout: str) -> Tensor:
    """The hidden elements of one token and one expert."""
    sums = F.linear(x, gate_up, bias)
    if layout == "up":
        return ACTIVATIONS[activation](sums)
    gate, up = sums.split(len(sums) // 2) if layout == "halves" else (sums[::2], sums[1::2])
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return ACTIVATIONS[activation](gate) * up


def by_tokens(
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    layout: str = "halves",
) -> Tensor:
    """What `gossamer.routed_mlp` computes."""
    out = []
    for token, chosen, weights in zip(x, experts.tolist(), scores, strict=True):
        total = torch.zeros(down.shape[1], dtype=x.dtype)
        for e, score in zip(chosen, weights, strict=True):
            hidden = expert(token, gate_up[e], None if gate_up_bias is None else gate_up_bias[e], activation, layout)
            total = total + score * F.linear(hidden, down[e], None if down_bias is None else down_bias[e])
        out.append(total)
    return torch.stack(out) if out else x.new_zeros(0, down.shape[1])


def linear_by_tokens(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `gossamer.routed_linear` computes of experts [tokens, top]."""
    out = weight.new_zeros(*experts.shape, weight.shape[1])
    for t, chosen in enumerate(experts.tolist()):
        for s, e in enumerate(chosen):
            out[t, s] = F.linear(x[t] if x.dim() == 2 else x[t, s], weight[e], None if bias is None else bias[e])
    return out


def quantized(weight: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers as `routed_mlp` takes them, their scales, and the floats that they stand for."""
    most = (1 << bits - 1) - 1
    parts = weight.unflatten(-1, (groups, -1))
    scales = parts.abs().amax(-1) / most
    integers = (parts / scales[..., None]).round()
    floats = (integers * scales[..., None]).flatten(-2)
    codes = integers.flatten(-2).to(torch.int8)
    if bits == 4:
        codes = ((codes[..., ::2] & 15) | ((codes[..., 1::2] & 15) << 4)).view(torch.uint8)
    return codes, scales, floats
