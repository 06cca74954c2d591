"""Operands of mixtures of experts, and what routed products and mixtures give by plain loops over tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DOUBLE = torch.float64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EXPERTS, TOP = 5, 3

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


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of a type, relative to the largest element."""
    assert found.shape == expected.shape
    if expected.numel():
        assert (found.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def layer(tokens: int, columns: int = 24, hidden: int = 20, layout: str = "halves", biased: bool = True) -> dict[str, Tensor]:
    """The operands of a mixture in float64; nobody chooses expert 2."""
    rows = hidden if layout == "up" else 2 * hidden
    made = {
        "x": torch.randn(tokens, columns, dtype=DOUBLE),
        "scores": torch.rand(tokens, TOP, dtype=DOUBLE),
        "gate_up": torch.randn(EXPERTS, rows, columns, dtype=DOUBLE) / 4,
        "down": torch.randn(EXPERTS, columns, hidden, dtype=DOUBLE) / 4,
    }
    if biased:
        made["gate_up_bias"] = torch.randn(EXPERTS, rows, dtype=DOUBLE)
        made["down_bias"] = torch.randn(EXPERTS, columns, dtype=DOUBLE)
    return made


def routing(tokens: int, top: int = TOP) -> Tensor:
    experts = torch.randint(0, EXPERTS, (tokens, top))
    return torch.where(experts == 2, 1, experts)


def in_type(operands: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: each.to(dtype) for name, each in operands.items()}
