"""Products and chains whose predicted gain is in doubt are measured, and decided by what was measured."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.chains.chain_cost import ChainCosts
from gossamer.backend.devices import budget, calibrated
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.measuring import tune
from tests.backend.doubts import Stopwatch, directory, doubt_all, explained, layer, stopwatch
from tests.backend.harness import prune_
from tests.backend.test_chains import D, PostNorm, PreNorm

__all__ = ["directory", "stopwatch"]


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
