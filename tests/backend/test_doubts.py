"""Products, chains and convolutions whose predicted gain is in doubt are measured, and decided by what was measured.

Times are given, not taken.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.chains import time_chain
from gossamer.backend.chains.chain_cost import ChainCosts
from gossamer.backend.convolution import cost, time_convolution
from gossamer.backend.devices import budget, calibrated
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.measuring import calibrate, tune
from gossamer.backend.run.packed_weights import Packings
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime.target import host
from tests.backend.harness import prune_
from tests.backend.test_chains import D, PostNorm, PreNorm

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


@pytest.mark.parametrize(
    ("gain", "dense_us", "density", "doubted"),
    [
        (0.5, 1e3, 0.3, False), (0.7, 1e3, 0.3, True), (1.9, 1e3, 0.3, True), (2.1, 1e3, 0.3, False),
        (5.0, 20.0, 0.3, True), (0.5, 20.0, 0.3, False), (5.0, 1e3, 0.7, True),
    ],
)  # fmt: skip
def test_what_is_in_doubt(gain: float, dense_us: float, density: float, doubted: bool) -> None:
    assert Budget().doubts(gain, dense_us, density) is doubted


def test_predictions_by_a_calibration_that_is_in_doubt_are_believed_less() -> None:
    certain = Budget.of(False)
    calibrated.doubt()
    uncertain = Budget.of(False)
    assert certain is not None and uncertain is not None
    for gain, doubts in ((0.4, (False, True)), (3.0, (False, True)), (0.2, (False, False)), (5.0, (False, False))):
        assert (certain.doubts(gain, 1e3, 0.3), uncertain.doubts(gain, 1e3, 0.3)) == doubts


@pytest.mark.parametrize(("dense", "sparse"), [(90.0, False), (1000.0, True)])
def test_a_product_in_doubt_is_decided_by_its_times(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, dense: float, sparse: bool
) -> None:
    doubt_all(monkeypatch)
    stopwatch.us = {DENSE: dense}
    (decision,) = explained(layer())
    assert (decision.sparse, decision.measured) == (sparse, True) and f"dense {dense:.0f} us" in decision.reason.replace(
        "e+03", "000"
    )
    assert len(stopwatch.asked) == 1 and DENSE in stopwatch.asked[0]


def test_what_is_not_in_doubt_is_not_measured(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_all(monkeypatch, doubts=False)
    monkeypatch.setattr(budget, "CLOSE", 0.0)
    explained(layer(), torch.randn(64, 512))
    assert stopwatch.asked == []


@pytest.mark.parametrize("winner", ["broadcast", "rowpairs"])
def test_close_schedules_are_measured_where_the_gain_is_not_in_doubt(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, winner: str
) -> None:
    doubt_all(monkeypatch, doubts=False)
    stopwatch.us = {DENSE: 1000.0, winner: 90.0}
    (decision,) = explained(layer())
    assert decision.sparse and decision.measured and decision.schedule == winner
    assert len(stopwatch.asked) == 1 and {"broadcast", "rowpairs"} <= {*stopwatch.asked[0]}


@pytest.mark.parametrize(
    ("gain", "us", "seconds", "compared"),
    [
        (5.0, (10.0, 19.0), 6.0, True), (5.0, (10.0, 21.0), 6.0, False), (5.0, (10.0,), 6.0, False),
        (0.5, (10.0, 11.0), 6.0, False), (5.0, (10.0, 11.0), 1.0, False),
    ],
)  # fmt: skip
def test_which_schedules_are_close(gain: float, us: tuple[float, ...], seconds: float, compared: bool) -> None:
    """Close ones of products that gain, while there is time for what is in doubt."""
    assert Budget(seconds=seconds).compares(gain, us) is compared


def test_what_is_in_doubt_is_measured_before_schedules_that_are_close(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "doubts", lambda self, gain, us, density: density > 0.4)
    sizes = list[int]()
    calls = tune.Product.calls

    def noted(product: tune.Product, *given: Any) -> Any:
        sizes.append(product._weight.shape[0])
        return calls(product, *given)

    monkeypatch.setattr(tune.Product, "calls", noted)
    both = nn.ModuleList([layer(1024), layer(256, density=0.5)])
    explained(type("Both", (nn.Module,), {"forward": lambda self, x: [m(x) for m in both]})())
    assert sizes == [256, 1024]


@pytest.mark.parametrize("given", [{"min_gain": 0}, {"schedule": "broadcast"}])
def test_what_a_user_has_decided_is_not_measured(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    doubt_all(monkeypatch)
    explained(layer(), **given)
    assert stopwatch.asked == []


@pytest.mark.parametrize("setting", [("GOSSAMER_CALIBRATE", "0"), ("GOSSAMER_CACHE_DIR", "")])
def test_nothing_is_measured_where_that_is_off(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]
) -> None:
    """As it is on the machines that tests pretend to be."""
    doubt_all(monkeypatch)
    monkeypatch.setenv(*setting)
    assert Budget.of(False) is None
    explained(layer())
    assert stopwatch.asked == []


def test_equal_products_are_measured_once_and_never_again(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_all(monkeypatch)
    stopwatch.us = {DENSE: 90.0}
    model = nn.Sequential(layer(), nn.Tanh(), layer())
    with torch.no_grad():
        model[2].weight.copy_(model[0].weight)  # type: ignore[operator, union-attr, arg-type]
    explained(model)
    measured = [asked for asked in stopwatch.asked if "chain" not in asked]
    explained(model)
    assert len(measured) == 1 and [asked for asked in stopwatch.asked if "chain" not in asked] == measured


def test_without_time_predictions_decide(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_all(monkeypatch)
    spent = Budget(seconds=0.0)
    monkeypatch.setattr("gossamer.backend.rewrite.Budget.of", lambda _: spent)
    (decision,) = explained(layer())
    assert stopwatch.asked == [] and not decision.measured and not spent.settled


def test_what_is_measured_takes_from_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5])
    monkeypatch.setattr(budget.time, "thread_time", lambda: next(times))
    spent = Budget()
    monkeypatch.setattr(budget, "Others", lambda: type("Quiet", (), {"disturb": False, "beside": None}))
    with spent.spend():
        pass
    assert spent.seconds == budget._SECONDS - 2.5 and spent.settled and spent.allows()


def test_measurements_that_others_disturbed_are_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = Budget()
    monkeypatch.setattr("gossamer.backend.devices.others.Others.share", 0.5)
    with disturbed.spend(decides=False):
        pass
    assert disturbed.settled, "schedules side by side are slowed down alike"
    with disturbed.spend():
        pass
    assert not disturbed.settled and disturbed.allows()


def test_a_measurement_that_contradicts_the_calibration_has_it_repeated(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt_all(monkeypatch)
    stopwatch.us = {DENSE: 1e6}
    explained(layer())
    assert calibrated.in_doubt()


@pytest.mark.parametrize(("chain", "sparse"), [(400.0, True), (1900.0, False)])
def test_a_chain_in_doubt_is_decided_by_its_times(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, chain: float, sparse: bool
) -> None:
    """Whatever is predicted, even where each product by itself is left dense."""
    doubt_all(monkeypatch)
    stopwatch.us = {DENSE: 2000.0, "chain": chain}
    for name in gossamer.backend.report.options.SCHEDULES:  # type: ignore[attr-defined]
        stopwatch.us.setdefault(name, 2300.0)
    found = explained(nn.Sequential(layer(), nn.GELU(), layer(256)))
    assert ["chain", DENSE] in stopwatch.asked
    assert [decision.sparse for decision in found] == [sparse] * 2
    assert all(decision.gain is not None and decision.measured for decision in found)
    if sparse:
        said = "in a chain of 2; gain of the whole kernel, measured; alone, measured"
        assert [decision.reason[: len(said)] for decision in found] == [said] * 2
        assert all(decision.gain > 1.1 for decision in found)  # type: ignore[operator]


def test_a_gain_that_is_predicted_for_a_chain_is_not_taken_for_that_of_its_products(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were measured alone, and are slower than dense there. The chain was not measured."""
    doubt_all(monkeypatch)
    monkeypatch.setattr("gossamer.backend.weights.plan._Planner._doubts", lambda *_: False)
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_costs", lambda *_: ChainCosts(100.0, 200.0, 450.0, 0.0))
    stopwatch.us = {DENSE: 2000.0, **dict.fromkeys(gossamer.backend.report.options.SCHEDULES, 2100.0)}  # type: ignore[attr-defined]
    found = explained(nn.Sequential(layer(), nn.GELU(), layer(256)))
    assert [(each.sparse, each.gain, each.measured) for each in found] == [(True, 4.5, False)] * 2
    for each in found:
        assert each.reason.startswith("in a chain of 2; gain of the whole kernel, predicted; alone, measured: dense 2000 us")
        assert each.details is not None and each.details.whole and "predicted 4.5x of dense" in str(each)


def test_a_chain_whose_gain_cannot_be_is_decided_by_its_prediction(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt_all(monkeypatch)
    stopwatch.us = {DENSE: 1e6, "chain": 100.0}
    for name in gossamer.backend.report.options.SCHEDULES:  # type: ignore[attr-defined]
        stopwatch.us.setdefault(name, 100.0)
    found = explained(nn.Sequential(layer(), nn.GELU(), layer(256)))
    assert ["chain", DENSE] in stopwatch.asked
    assert not any(decision.measured or decision.gain is None or decision.gain > 10 for decision in found)


@pytest.mark.parametrize("mask", [None, (1, 1, 1, 20), (1, 1, 20, 20), (3, 1, 20, 20)])
@pytest.mark.parametrize("made", [PostNorm, PreNorm, partial(PreNorm, causal=True, gated=True)], ids=["bert", "gpt", "llama"])
def test_chains_with_attention_are_measured_with_inputs_of_their_sizes(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, made: Callable[[], nn.Module], mask: tuple[int, ...] | None
) -> None:
    """Their kernel and torch's products run; what they compute of random inputs is finite."""
    doubt_all(monkeypatch)
    stopwatch.us = {DENSE: 700.0}
    layer, x = prune_(made(), 0.3).eval(), torch.randn(3, 20, D)
    masks = () if mask is None or isinstance(layer, PreNorm) else (torch.randn(mask),)
    with torch.no_grad():
        found = gossamer.explain(layer, x, *masks, options={"dense": "eager", "strict": True}).decisions
    assert all("in a chain of" in decision.reason for decision in found if decision.op == "linear"), found
    assert any("chain" in asked for asked in stopwatch.asked)


def test_no_tokens_are_not_measured(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_all(monkeypatch)
    explained(nn.Sequential(layer(), nn.GELU(), layer()), torch.randn(0, 512))
    assert stopwatch.asked == []


def network(density: float = 0.7) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter[torch.rand_like(parameter) > density] = 0
    return model.eval()


IMAGES = torch.randn(1, 16, 20, 20)


@pytest.fixture
def convolving(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Every convolution of torch's takes 100 us."""
    for place in ("convolution.cost", "convolution.time_convolution"):
        monkeypatch.setattr(f"gossamer.backend.{place}.torch_us", lambda *_, **__: 100.0)
    for place in ("convolution.filter_gradients", "convolution.planar"):
        monkeypatch.setattr(f"gossamer.backend.{place}.filter_gradient_us", lambda *_, **__: 100.0)
    stopwatch.us = {"torch": 100.0}
    return stopwatch


@pytest.mark.parametrize(("ours", "sparse"), [(20.0, 3), (99.0, 0), (400.0, 0)])
def test_convolutions_in_doubt_are_decided_by_their_times(
    convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch, ours: float, sparse: int
) -> None:
    doubt_all(monkeypatch)
    convolving.us["ours"] = ours
    found = explained(network(), IMAGES)
    assert sum(decision.sparse for decision in found) == sparse
    assert convolving.asked == [["ours", "torch"]] * 3
    assert all(decision.measured for decision in found if decision.sparse)


def test_convolutions_whose_gain_cannot_be_are_decided_by_their_predictions(
    convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt_all(monkeypatch)
    convolving.us["ours"] = 0.01
    for _ in range(2):  # nothing of it is kept
        found = explained(network(), IMAGES)
        assert not any(decision.measured for decision in found)
    assert convolving.asked == [["ours", "torch"]] * 6


def test_gradients_of_convolutions_are_measured_too(convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_all(monkeypatch)
    convolving.us["ours"] = 20.0
    found = gossamer.explain(network().train(), IMAGES, options={"dense": "eager"}).decisions
    assert len(convolving.asked) == 7, "three in inference, and four in training, where one gradient is like a layer"
    assert sum("backward" in decision.op for decision in found if decision.sparse) == 2


def test_equal_convolutions_are_measured_once(convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_all(monkeypatch)
    model = network()
    for _ in range(2):
        explained(model, IMAGES)
    assert len(convolving.asked) == 3


def test_convolutions_for_which_there_is_no_time_are_as_wrong_as_the_others(
    convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt_all(monkeypatch)
    convolving.us["ours"] = 1e4
    left = Budget(seconds=1e-9)
    monkeypatch.setattr("gossamer.backend.rewrite.Budget.of", lambda _: left)
    found = explained(network(0.1), IMAGES)
    assert len(convolving.asked) == 1 and not left.settled
    assert not any(decision.sparse or decision.measured for decision in found)


def test_layers_that_are_taken_for_the_sake_of_their_neighbours_say_what_they_gain_there(
    convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself the last one takes as long as torch, which would have to reorder its images."""
    doubt_all(monkeypatch, doubts=False)
    us = {32: 10.0, 16: 100.0}
    for place in ("cost.ours_us", "planar.ours_us"):
        monkeypatch.setattr(f"gossamer.backend.convolution.{place}", lambda c, *_: us[c.m])
    monkeypatch.setattr("gossamer.backend.convolution.planar.measured_us", lambda _, planar=False: 130.0 if planar else None)
    *_, last = explained(network(), IMAGES)
    assert last.sparse and last.gain is not None and last.gain >= 1.3


@pytest.mark.parametrize("training", [True, False])
def test_in_training_a_measured_convolution_packs_new_values_at_every_call(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt_all(monkeypatch)
    model, renewed = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)).train(training), list[int]()
    model[0].weight.data.mul_(torch.rand_like(model[0].weight) < 0.4)  # type: ignore[union-attr, operator, arg-type]
    before, refreshed = model[0].weight.detach().clone(), Packings._refreshed  # type: ignore[operator]

    def fastest(calls: Calls, *_: int) -> dict[str, float]:
        with monkeypatch.context() as patch:
            patch.setattr(Packings, "_refreshed", lambda *args: (renewed.append(1), refreshed(*args))[1])
            for _ in range(3):
                calls["ours"]()
        return {"ours": 50.0, "torch": 100.0}

    monkeypatch.setattr(time_convolution, "fastest", fastest)
    monkeypatch.setattr(cost, "torch_us", lambda *_, **__: 100.0)
    monkeypatch.setattr(time_convolution, "torch_us", lambda *_, **__: 100.0)
    for place in ("filter_gradients", "planar"):
        monkeypatch.setattr(f"gossamer.backend.convolution.{place}.filter_gradient_us", lambda *_, **__: None)
    with torch.set_grad_enabled(training):
        found = gossamer.explain(model, torch.randn(2, 32, 14, 14)).decisions
    assert [(each.sparse, each.measured) for each in found] == [(True, True)]
    assert found[0].gain == pytest.approx(2.0, rel=0.01)  # what was measured has the renewal in it
    assert len(renewed) == (3 if training else 0)
    assert torch.equal(model[0].weight, before)  # type: ignore[arg-type]
