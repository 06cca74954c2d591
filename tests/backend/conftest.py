"""Each test starts with Dynamo forgotten, the same random numbers, and predictions for a machine that nobody calibrated."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from gossamer.passes.machine import Machine
from gossamer.runtime.target import host


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("gossamer.backend.cost.this_machine", lambda: Machine.usual(host().vector_bits))
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
