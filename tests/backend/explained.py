"""Models that tests explain, and what a report about them has to have."""

from typing import Any

import pytest
from torch import Tensor, nn

import gossamer
from gossamer import Report
from tests.backend.harness import prune_

EAGER = {"dense": "eager", "min_gain": 0}
DEFAULT = {"dense": "eager"}


class Layer(nn.Module):
    """A sparse layer, and with `broken` a line that breaks the graph."""

    def __init__(self, *after: nn.Module, size: int = 64, broken: bool = False) -> None:
        super().__init__()
        self.fc, self.after, self.broken = nn.Linear(size, size), nn.Sequential(*after), broken
        prune_(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if self.broken:
            print(end="")
        return self.after(x)


both = pytest.mark.parametrize("broken", [False, True])


def explained(model: Any, *inputs: Any, options: dict[str, Any] = EAGER, sparse: int = 1, **kwargs: Any) -> Report:
    report = gossamer.explain(model, *inputs, options=options, **kwargs)
    assert sum(report.layers.values()) == sparse, str(report)
    return report
