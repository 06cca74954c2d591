"""What workloads conclude from their cases, and how those that are no race measure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import race
from benchmarks.models import PrunedModel
from benchmarks.registry import Case, Contender, Problem, Settings
from benchmarks.workloads import attention, autoencoder, einsum, ffn, lora, startup


def test_autoencoders_are_mirrored() -> None:
    assert autoencoder.layers("small") == [(784, 1024), (1024, 512), (512, 1024), (1024, 784)]
    problem = autoencoder.build("small", 0.9, 3)
    with torch.no_grad():
        assert problem.model(*problem.inputs).shape == (3, 784)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_adapters_are_in_the_type_of_their_layer(dtype: str) -> None:
    options = argparse.ArgumentParser()
    lora.add_arguments(options)
    given = options.parse_args(["--shapes", "32x48", "--tokens", "5", "--dtype", dtype])
    for case, rank in zip(lora.cases(given), (0, 16), strict=True):
        problem = case.build()
        assert isinstance(problem, PrunedModel)
        assert problem.precision == dtype
        with torch.no_grad():
            y = problem.model(*problem.inputs)
        assert problem.error(y, problem.reference()[0]) <= problem.tolerance[dtype]
        names = [name for name, _ in problem.model.named_parameters()]
        assert (names[-2:] == ["a.weight", "b.weight"]) is (rank > 0)


def test_the_chain_is_compared_with_its_layers() -> None:
    def case(part: str, ms: float) -> dict[str, Any]:
        parameters = {"part": part, "tokens": 8}
        return {"parameters": parameters, "results": {"sparse": {"median_ms": ms}, "dense": {"median_ms": 9.0}}}

    found = ffn.conclude([case("chain", 2.0), case("up", 1.5), case("down", 1.5)])
    assert found == ["- tokens 8, sparse: the chain is 1.50x as fast as its two layers"]
    assert ffn.conclude([case("chain", 2.0)]) == []


@pytest.mark.parametrize("case", ["chain", "mttkrp", "attention"])
def test_contenders_compute_einsums_and_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(einsum, "_SHAPES", {"chain": (40, 40), "mttkrp": (9, 9, 9)})
    monkeypatch.setattr(einsum, "_DENSITIES", dict.fromkeys(("chain", "mttkrp"), 0.1))
    problem: Problem = einsum.build(case, 8) if case != "attention" else attention.build("documents", 64, False, "f32")
    everyone = (attention if case == "attention" else einsum).contenders()
    found = {name: each for name, each in everyone.items() if not each.missing() and "Inductor" not in each.label}
    outcomes = race(problem, found, settings=Settings(2, 1e-6))
    assert {"sparse"} < set(outcomes)
    assert not {name: each for name, each in outcomes.items() if "median_ms" not in each and "skipped" not in each}


def test_starts_are_cold_then_warm_in_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def start(name: str, case: Case, threads: int, caches: Path) -> dict[str, Any]:
        if name == "broken":
            raise RuntimeError("no compiler")
        seen.append(caches)
        seconds = float(len(seen))
        return {"total_s": seconds, "own_s": seconds / 2, "notes": {"packed_bytes": 2_000_000, "dense_bytes": 8_000_000}}

    def unused(problem: PrunedModel) -> Any:
        raise AssertionError

    monkeypatch.setattr(startup, "start", start)
    contenders = {name: Contender(name, unused) for name in ("sparse", "broken")}
    outcomes = startup.measure(Case("MiniLM", {}, lambda: unused), contenders, 1, Settings())  # type: ignore[arg-type, return-value]
    assert [seen[i] == seen[i + 1] for i in range(5)] == [True, False, True, False, True]
    assert outcomes["broken"] == {"error": "no compiler"}
    sparse = outcomes["sparse"]
    assert (sparse["cold_total_s"], sparse["cold_own_s"], sparse["warm_total_s"], sparse["warm_own_s"]) == (3, 1.5, 4, 2)
    lines = startup.conclude([{"name": "MiniLM", "results": outcomes}])
    assert lines[2] == "| MiniLM | sparse | 3.00 | 1.50 | 4.00 | 2.00 |"
    assert lines[-1] == "MiniLM: sparse layers of 8.0 MB take 2.0 MB packed."


def test_time_belongs_to_the_innermost_of_gossamer_and_torchs_compilers() -> None:
    frame = "import sys\ndef run(inner):\n    return inner()\n"
    ours: dict[str, Any] = {"__name__": "gossamer.passes.some_pass"}
    torchs: dict[str, Any] = {"__name__": "torch._inductor.compile_fx"}
    tensor: dict[str, Any] = {"__name__": "torch.fx.graph"}
    for module in (ours, torchs, tensor):
        exec(frame, module)
    look = lambda: startup.owner(sys._getframe())
    assert look() is None
    assert ours["run"](look) == "gossamer"
    assert ours["run"](lambda: torchs["run"](look)) == "torch._inductor.compile_fx"
    assert torchs["run"](lambda: ours["run"](lambda: tensor["run"](look))) == "gossamer"


def test_sampler_counts_only_our_code() -> None:
    code = "import time\ndef wait():\n    time.sleep(0.05)\n"
    ours: dict[str, Any] = {"__name__": "gossamer.runtime.jit"}
    other: dict[str, Any] = {"__name__": "torch._inductor.codecache"}
    for module in (ours, other):
        exec(code, module)
    with startup.Sampler() as sampler:
        other["wait"]()
    assert sampler.own_s == 0
    with startup.Sampler() as sampler:
        ours["wait"]()
    assert sampler.own_s > 0
