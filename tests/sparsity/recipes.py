"""A small network, and how tests of recipes train it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer import SparseTraining

STEPS = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "one-shot": {"sparsity": 0.8, "at": 5, "saliency": "second-order", "distribution": "global"},
    "gradual": {"sparsity": 0.8, "every": 5, "pattern": "4x2", "saliency": "first-order", "begin": 2},
    "random": {"sparsity": 0.8},
    "set": {"sparsity": 0.8, "every": 5},
    "rigl": {"sparsity": 0.8, "every": 5},
    "soft": {"sparsity": 0.8, "every": 5},
    "bi-mask": {"every": 10},
    "step": {"latest": 12},
}
RULED = {"sr-ste", "mask-decay", "progressive-gradient-flow", "structure-decay", "step", "bi-mask"}


def network(name: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(64, 32) if name == "bi-mask" else nn.Conv2d(1, 16, 3, padding=1, stride=2)
    rest = nn.Flatten(), nn.Linear(32 if name == "bi-mask" else 256, 48), nn.ReLU(), nn.Linear(48, 8)
    model = nn.Sequential(*([nn.Flatten()] if name == "bi-mask" else []), first, nn.ReLU(), *rest)
    return gossamer.finalize(gossamer.sparsify(model, "magnitude", density=0.3)) if name == "fixed" else model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 1, 8, 8, generator=generator), torch.randint(8, (32,), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def attached(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> SparseTraining:
    return gossamer.train_sparse(model, optimizer, name, steps=STEPS, **OPTIONS.get(name, {}))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, target = batch(step)
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
