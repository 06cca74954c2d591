"""Measurements with times that are given, not taken, for decisions that are in doubt."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.chains import time_chain
from gossamer.backend.convolution import time_convolution
from gossamer.backend.devices import budget, calibrated
from gossamer.backend.devices.budget import Budget
from gossamer.backend.measuring import calibrate, tune
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime.target import host
from tests.backend.harness import prune_

Calls = Mapping[str, Callable[[], object]]


class Stopwatch:
    """Stands for measurements: runs and notes the contenders, and gives each its time, 100 us by default."""

    def __init__(self, **us: float) -> None:
        self.us, self.asked = us, []  # type: ignore[var-annotated]

    def __call__(self, calls: Calls, *_: int) -> dict[str, float]:
        self.asked.append(sorted(calls))
        for call in calls.values():
            call()
        return {name: self.us.get(name, 100.0) for name in calls}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a usual machine that counts as calibrated, where things may be measured."""
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    usual = replace(Machine.usual(host().vector_bits), measured=frozenset(calibrate._TYPES))
    monkeypatch.setattr(calibrated, "this_machine", lambda: usual)
    monkeypatch.setattr(budget, "_SECONDS", 1e6)
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", lambda: usual)
    return tmp_path


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    found = Stopwatch()
    for module in (tune, time_chain, time_convolution):
        monkeypatch.setattr(module, "fastest", found)
    return found


def doubt_all(monkeypatch: pytest.MonkeyPatch, doubts: bool = True) -> None:
    monkeypatch.setattr(Budget, "doubts", lambda *_: doubts)


def layer(rows: int = 512, columns: int = 512, density: float = 0.3) -> nn.Module:
    return prune_(nn.Linear(columns, rows), density).eval()


def explained(model: nn.Module, x: torch.Tensor | None = None, **options: Any) -> list[gossamer.Decision]:
    with torch.no_grad():
        given = torch.randn(64, 512) if x is None else x
        return gossamer.explain(model, given, options={"dense": "eager", **options}).decisions
