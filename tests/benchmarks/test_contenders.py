"""Contenders compute what the model computes, on every kind of input that the workloads have; ours says what it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import mkl, registry
from benchmarks.contenders.csr import CsrLinear
from benchmarks.contenders.mkl import MklLinear
from benchmarks.contenders.scipy import ScipyLinear
from benchmarks.measure import race
from benchmarks.models import PrunedModel, with_sparse_linears
from benchmarks.registry import Settings, Unsupported
from benchmarks.workloads import linear, prediction, transformer

QUICK = Settings(2, 1e-6)


@pytest.mark.parametrize("leading", [(1,), (3,), (9,), (2, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [CsrLinear, ScipyLinear, MklLinear])
def test_sparse_linears_are_the_linear(kind: type[nn.Module], leading: tuple[int, ...], bias: bool) -> None:
    if kind is MklLinear and (mkl.missing() or mkl.mixed_up()):
        pytest.skip("MKL is not installed, or hidden by that of PyTorch")
    dense = nn.Linear(16, 12, bias=bias)
    x = torch.randn(*leading, 16)
    with torch.no_grad():
        dense.weight[torch.rand(12, 16) < 0.8] = 0
        torch.testing.assert_close(kind(dense)(x), dense(x))


def test_only_linears_with_zeros_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[1].weight[:4] = 0
    found = with_sparse_linears(PrunedModel(model, (), {}), CsrLinear)
    assert [type(layer) for layer in found] == [nn.Linear, CsrLinear]  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="no Linear of the model has a tenth of zeros"):
        with_sparse_linears(PrunedModel(nn.Linear(4, 4), (), {}), CsrLinear)
    with pytest.raises(Unsupported, match="float32 only"):
        with_sparse_linears(PrunedModel(model.bfloat16(), (), {}), CsrLinear)


@pytest.mark.parametrize("name", ["openvino", "openvino-bf16", "onnxruntime"])
def test_engines_compute_the_model(name: str) -> None:
    if why := registry.contender(name).missing():
        pytest.skip(why)
    problem = linear.build((48, 40), "unstructured", 0.5, 3)
    assert "median_ms" in race(problem, {name: registry.contender(name)}, settings=QUICK)[name]


@pytest.mark.parametrize("name", ["sparse", "sparse-graph"])
def test_gossamer_says_what_it_made_sparse(name: str) -> None:
    problem = linear.build((384, 768), "unstructured", 0.9, 64)
    found = race(problem, {name: registry.contender(name)}, settings=QUICK)[name]
    notes = found["notes"]
    assert notes["sparse"] == len(notes["schedules"]) == 1
    assert 0 < notes["packed_bytes"] < notes["dense_bytes"] == 4 * 384 * 768
    assert notes["weight_bytes"] == notes["packed_bytes"] + 4 * 768


def test_gossamer_that_sees_no_zeros_is_an_error() -> None:
    problem = PrunedModel(nn.Linear(8, 8).eval(), (torch.ones(2, 8),), {"f32": 1e-5})
    found = race(problem, {"sparse": registry.contender("sparse")}, settings=QUICK)["sparse"]
    assert "nothing was compiled" in found["error"]


def test_prediction_measures_schedules_and_skips_those_that_refuse() -> None:
    everyone = prediction.contenders()
    assert "reference" not in everyone
    chosen = {name: everyone[name] for name in ("dense", "auto", "broadcast", "block")}
    found = race(linear.build((384, 768), "unstructured", 0.9, 32), chosen, settings=QUICK)
    assert found["dense"]["notes"]["sparse"] == 0
    assert found["broadcast"]["notes"]["schedules"] == ["broadcast"]
    assert found["block"] == {"skipped": "it has no way to compute this"}
    assert prediction.choice(found) is not None


def results(auto: float, schedule: str | None, **others: float) -> dict[str, dict[str, object]]:
    schedules = [schedule] if schedule else []
    timed: dict[str, dict[str, object]] = {name: {"median_ms": ms} for name, ms in others.items()}
    return timed | {"auto": {"median_ms": auto, "notes": {"schedules": schedules}}}


def test_prediction_is_judged_by_the_best_of_all() -> None:
    assert prediction.choice(results(2.0, "broadcast", dense=5.0, broadcast=2.1, rowpairs=1.0)) == ("broadcast", 2.0)
    assert prediction.choice(results(1.0, None, dense=1.1, broadcast=4.0)) == ("dense", 1.0)
    assert prediction.choice({"auto": {"error": "no"}}) is None
    cases = [{"name": "a", "results": results(1.0, "x", y=1.0)}, {"name": "b", "results": results(4.0, "x", y=1.0)}]
    first, *rest = prediction.conclude(cases)
    assert "1 of 2 cases (50%)" in first and "2.000 times" in first
    assert rest[-1] == "- b: x, 4.00"


def test_gpt_layer_is_causal() -> None:
    layer = transformer.GptLayer().eval()
    x = torch.randn(1, 5, transformer.WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[:, :3], layer(x[:, :3]), rtol=1e-4, atol=1e-5)
