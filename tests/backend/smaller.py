"""Small models with rows, columns, filters or heads of zeros, and how tests compile them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import Run, compile_and_run


@pytest.fixture(autouse=True)
def small_layers_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these tests are tiny, and so are predicted as if calls and copies took no time."""
    for name, value in (("_CALL_US", 0.0), ("_COPY_CALL_US", 0.0), ("_COPIED", 1e9), ("_FREE", 1.0)):
        monkeypatch.setattr(f"gossamer.backend.smaller.worth.{name}", value)


WHOLE = {"min_gain": 1.1, "disable": ["convolutions"]}
"""What is not smaller stays dense."""


def run(function: Callable[..., Any], *inputs: Any, **options: Any) -> Run:
    """A call through the backend; further calls have gradients, or not, as this one."""
    made = compile_and_run(function, *inputs, **{**WHOLE, **options})
    return made if options.get("grad") else replace(made, function=torch.no_grad()(made.function))


def smaller(made: Run) -> dict[str, str]:
    """What became of the weights that are smaller now."""
    return {d.name: str(d.format) for d in made.decisions if d.schedule == "smaller"}


@torch.no_grad()
def empty_(weight: Tensor, share: float = 0.5, axis: int = 0) -> Tensor:
    """Zeroes some rows, or columns; which they are."""
    chosen = torch.randperm(weight.shape[axis])[: int(share * weight.shape[axis])].sort().values
    weight.index_fill_(axis, chosen, 0)
    return chosen


class Pair(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(16, 32), between, nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Attention(nn.Module):
    """Four heads of eight features, spelled in one of several ways."""

    def __init__(self, spelling: str = "sdpa") -> None:
        super().__init__()
        self.spelling = spelling
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        if self.spelling == "fused":
            q, k, v = self.qkv(x).reshape(batch, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.spelling == "split":
            q, k, v = (part.view(batch, tokens, 4, 8).transpose(1, 2) for part in self.qkv(x).split(32, dim=2))
        else:
            q, k, v = (layer(x).view(batch, tokens, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.spelling == "written":
            scores = torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5
            mixed = torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Residual(nn.Module):
    """A residual block of convolutions with batch norms."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb, self.relu = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.nb(self.b(self.relu(self.na(self.a(x)))))
        y += x
        return self.relu(y)


def shifted(module: nn.Module) -> nn.Module:
    """A module in evaluation, whose batch norms have seen something."""
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            nn.init.normal_(each.weight)
            nn.init.normal_(each.bias)
            nn.init.normal_(each.running_mean)
            nn.init.uniform_(each.running_var, 0.5, 2)
    return module.eval()
