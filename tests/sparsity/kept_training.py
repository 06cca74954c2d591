"""Models under masks, trained by kept entries and by plain torch: for tests of both."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from gossamer.sparsity.pruning.mask import Mask
from gossamer.sparsity.pruning.parametrizations import register_parametrization
from gossamer.sparsity.training import kept_steps
from gossamer.sparsity.training.kept_steps import note_mask

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW, a tensor as rate": lambda parameters: optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "AdamW, one by one": partial(optim.AdamW, lr=0.01, foreach=False, fused=False),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.1, maximize=True),
    "Adam, fused": partial(optim.Adam, lr=0.01, weight_decay=0.1, fused=True, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01, foreach=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, foreach=True),
}


taken_by: dict[Optimizer, int] = {}
"""How many parameters an optimizer has stepped by kept entries since somebody looked."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    step = kept_steps._step

    def counting(optimizer: Optimizer, groups: Any, taken: Any) -> None:
        step(optimizer, groups, taken)
        taken_by[optimizer] = taken_by.get(optimizer, 0) + len(taken)

    taken_by.clear()
    monkeypatch.setattr(kept_steps, "_step", counting)
    monkeypatch.setattr(kept_steps, "_DENSEST_FUSED", 1.0)


class Training:
    """A model under masks with its optimizer: one whose steps are by kept entries, or its twin by plain torch."""

    def __init__(self, make: Make, by_kept: bool, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(128, 150), nn.Tanh(), nn.Linear(150, 130)).to(dtype)
        for layer in self.layers:
            mask = (torch.rand_like(layer.weight) < 0.1).to(dtype)
            register_parametrization(layer, "weight", Mask(mask))
        self.by_kept = by_kept
        self.optimizer = make(self.model.parameters())
        self.x, self.target = torch.randn(32, 128, dtype=dtype), torch.randn(32, 130, dtype=dtype)
        self.note()

    @property
    def layers(self) -> list[Any]:
        return [self.model[0], self.model[2]]

    @property
    def masked(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(each.parametrizations.weight.original, each.parametrizations.weight[0].mask) for each in self.layers]

    def note(self) -> None:
        """What a compiled model does when it packs a weight."""
        for parameter, mask in self.masked if self.by_kept else ():
            note_mask(parameter, mask)

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.x), self.target)

    def steps(self, many: int = 3, taken: int = 2) -> None:
        for _ in range(many):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            self.check_path(taken)

    def check_path(self, taken: int = 2) -> None:
        """The steps since the last look were by the kept entries of so many layers."""
        assert taken_by.pop(self.optimizer, 0) == (taken if self.by_kept else 0)

    def values(self) -> list[Tensor]:
        """All parameters, and all tensors of the state; of masked ones what is kept."""
        kept, found = dict(self.masked), list[Tensor]()
        for parameter in self.model.parameters():
            known = self.optimizer.state[parameter]
            tensors = [parameter.detach(), *(known[key] for key in sorted(known) if isinstance(known[key], Tensor))]
            found += [each[kept[parameter] != 0] if parameter in kept and each.dim() else each for each in tensors]
        return found


def pair(make: Make = OPTIMIZERS["AdamW"], dtype: torch.dtype = torch.float32) -> tuple[Training, Training]:
    return Training(make, True, dtype), Training(make, False, dtype)


def assert_equal(one: Training, other: Training) -> None:
    tolerance = 1e-12 if one.x.dtype is torch.float64 else 1e-6
    torch.testing.assert_close(one.values(), other.values(), rtol=tolerance, atol=tolerance)
