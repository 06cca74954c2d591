"""Each test starts with Dynamo forgotten, the same random numbers, and predictions for a machine that nobody calibrated; what
earlier ones compiled is not found again in torch's cache."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime.target import host


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", lambda: Machine.usual(host().vector_bits))
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    with functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def no_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that follow each other are a region each, whatever is predicted to be faster."""
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: False)
