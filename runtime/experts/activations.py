"""Computes what an expert does between its products, from the name of its activation and the layout of its first weight.

hidden = activation(gate) * up        layouts "halves" (first all rows of gate, then all of up) and "interleaved" (in turns)
hidden = activation(up)               layout "up"
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import ArgumentError

LAYOUTS = ("halves", "interleaved", "up")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
CLAMPED = "clamped_swiglu"
"""gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most 7 and up to -7 … 7: the activation of gpt-oss."""
ALPHA, LIMIT = 1.702, 7.0


def check_activation(activation: str, layout: str) -> None:
    """Raises ArgumentError for unknown names, and for a combination that does not exist."""
    known = (*ACTIVATIONS, CLAMPED)
    if activation not in known:
        raise ArgumentError(f"unknown activation {activation!r} of experts, there are {', '.join(known)}")
    if layout not in LAYOUTS:
        raise ArgumentError(f"unknown layout {layout!r} of experts, there are {', '.join(LAYOUTS)}")
    if activation == CLAMPED and layout == "up":
        raise ArgumentError(f"{CLAMPED} needs gates, the layout 'up' has none")


def activated(sums: Tensor, activation: str, layout: str) -> Tensor:
    """Returns [..., hidden] from the first product's sums [..., rows of the first weight]."""
    if layout == "up":
        return ACTIVATIONS[activation](sums)
    gate, up = sums.chunk(2, -1) if layout == "halves" else (sums[..., ::2], sums[..., 1::2])
    return gated(gate, up, activation)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns [..., hidden] from gates and the values that they multiply."""
    if activation == CLAMPED:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def hidden_size(rows: int, layout: str) -> int:
    """Returns the hidden size of experts whose first weight has so many rows."""
    return rows if layout == "up" else rows // 2
