"""Convolutions whose predicted gain is in doubt are measured, and decided by what was measured."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.convolution import time_convolution
from gossamer.backend.devices.budget import Budget
from gossamer.backend.run.packed_weights import Packings
from tests.backend.doubts import Calls, Stopwatch, directory, doubt_all, explained, stopwatch

__all__ = ["directory", "stopwatch"]


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
    training: bool, convolving: Stopwatch, monkeypatch: pytest.MonkeyPatch
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
    with torch.set_grad_enabled(training):
        found = gossamer.explain(model, torch.randn(2, 32, 14, 14)).decisions
    assert [(each.sparse, each.measured) for each in found] == [(True, True)]
    assert found[0].gain == pytest.approx(2.0, rel=0.01)  # what was measured has the renewal in it
    assert len(renewed) == (3 if training else 0)
    assert torch.equal(model[0].weight, before)  # type: ignore[arg-type]
