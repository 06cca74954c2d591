"""The two times of a chain that is in doubt are kept each for itself, and come from one measurement."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.chains import time_chain
from gossamer.backend.devices import calibrated, pace
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.identity import identity
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.measuring import calibrate, tune
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime import records
from gossamer.runtime.target import host
from tests.backend.harness import learn, prune_
from tests.backend.test_chain_outputs import Decoder
from tests.backend.test_chains import HEADS, D, model


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything is in doubt, and chains turn out fast."""

    def timed(calls: Mapping[str, Callable[[], object]], *_: object) -> dict[str, float]:
        for call in calls.values():
            call()
        pace.note(12.0)
        return {name: 400.0 if name == "chain" else 2000.0 for name in calls}

    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    usual = replace(Machine.usual(host().vector_bits), measured=frozenset(calibrate._TYPES))
    monkeypatch.setattr(calibrated, "this_machine", lambda: usual)
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", lambda: usual)
    monkeypatch.setattr("gossamer.backend.devices.others.Others.share", 0.5)
    monkeypatch.setattr(Budget, "doubts", lambda *_: True)
    for module in (tune, time_chain):
        monkeypatch.setattr(module, "fastest", timed)
    learn(11.0)


def test_both_have_the_loop_beside_them(measured: None) -> None:
    """Else the second one counts as disturbed, and every process measures it again."""
    module = nn.Sequential(prune_(nn.Linear(512, 512), 0.3), nn.GELU(), prune_(nn.Linear(512, 256), 0.3)).eval()
    with torch.no_grad():
        found = gossamer.explain(module, torch.randn(64, 512), options={"dense": "eager"}).decisions
    assert [decision.sparse for decision in found] == [True] * 2 and "in a chain of 2" in found[0].reason
    lines = [line for name in ("chain", DENSE) for line in records.lines(f"chain-{name}-{identity()}")]
    assert len(lines) == 2
    assert all(isinstance(line, dict) and line["beside"] == 12.0 and "disturbed" not in line for line in lines)


def test_heads_that_are_turned_one_by_one_are_measured_with_the_others(measured: None) -> None:
    """What attention takes from them is a matrix of all heads, although the graph has it head by head."""
    module, x = model(Decoder(1)), [torch.randn(2, 40, D), *torch.randn(2, 1, 40, D // HEADS)]
    with torch.no_grad():
        found = gossamer.explain(module, *x, options={"dense": "eager", "strict": True}).decisions
    assert len(found) == 7 and all("in a chain of 7; gain of the whole kernel, measured" in each.reason for each in found)
