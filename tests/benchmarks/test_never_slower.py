"""The workloads that show where a user could lose: any architecture, new processes, empty rows, zeros that come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import zoo
from benchmarks.measure import race
from benchmarks.models import PrunedModel
from benchmarks.registry import Case, Settings
from benchmarks.workloads import empty_rows, fresh, regained, training
from benchmarks.workloads import zoo as zoo_workload


def test_a_network_of_the_zoo_is_pruned_in_its_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {key: min(value, 64) if value in (384, 1536) else value for key, value in zoo._SIZES.items()}
    monkeypatch.setattr(zoo, "_SIZES", small | {"num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 32})
    problem = zoo_workload.build("bert", "inference", 0.8)
    assert isinstance(problem, PrunedModel) and not problem.model.training
    weights = [layer.weight for layer in problem.model.modules() if isinstance(layer, nn.Linear)]
    assert len(weights) == 7  # of one layer six, and the pooler
    assert all(float((weight == 0).float().mean()) == pytest.approx(0.8, abs=0.01) for weight in weights)
    contenders = zoo_workload.contenders()
    outcomes = race(problem, {name: contenders[name] for name in ("dense", "sparse")}, settings=Settings(2, 1e-6))
    assert all("median_ms" in outcome for outcome in outcomes.values()), outcomes
    step = zoo_workload.build("bert", "training", 0.8)
    assert isinstance(step, training.Training) and step.fused is None
    hooked = training.under_hooks(step)
    assert sum("weight_mask" in name for name, _ in hooked.named_buffers()) == 6  # the pooler gets no gradient
    steps = [training.hooked(False, step), training.ours("hooks", step)]
    assert all(step.error(each.call(), step.reference()[0]) <= 1e-4 for each in steps)
    assert "sparse" in steps[1].notes()  # how many layers depends on the machine


def test_convolutions_of_the_input_and_depthwise_ones_stay_dense() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1), nn.Embedding(4, 4))
    assert zoo.pruned(model, 0.5) == ["2"]


def test_busy_starts_are_timed_alone_in_the_caches_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def process(names: Any, case: Case, threads: int, caches: Path, repeats: int) -> dict[str, Any]:
        seen.append(caches)
        return {"dense": {"ms": 3.0}, "inductor": {"ms": 2.0}, "sparse": {"ms": 1.0 + len(seen) % 4 / 4, "sparse": 36}}

    monkeypatch.setattr(fresh, "process", process)
    monkeypatch.setattr(fresh, "PROCESSES", 2)
    contenders = fresh.WORKLOAD.contenders()
    case = Case("MiniLM busy", {"beside": "busy"}, lambda: None)  # type: ignore[arg-type, return-value]
    outcomes = fresh.measure(case, contenders, 1, Settings())
    assert [seen[0] == seen[1], seen[1] == seen[2], seen[2] == seen[3]] == [True, False, True]
    assert outcomes["sparse"] == {"ms": [1.5, 1.0], "sparse": [36, 36]}
    lines = fresh.conclude([{"name": "MiniLM busy", "results": outcomes}])
    assert lines[-1] == "| MiniLM busy | 2 | 2.00 to 3.00x | 1.33 to 2.00x | 36 |"


@pytest.mark.parametrize("name", ["layer", "mlp"])
def test_the_smaller_layer_by_hand_computes_the_same(name: str) -> None:
    problem = empty_rows.build(name, 0.6)
    with torch.no_grad():
        result = empty_rows.smaller(problem.model)(*problem.inputs)
        assert problem.error(result, problem.reference()[0]) <= problem.tolerance["f32"]


def test_weights_come_back_after_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    problem = PrunedModel(model, (torch.randn(64, 256),), {"f32": 1e-5})
    with torch.no_grad():
        prepared = regained.prepare(problem)
        assert problem.error(prepared.call(), problem.reference()[0]) <= 1e-5
    assert prepared.notes()["sparse_before"] == 2
