"""Weights that lose their zeros: after some calls their graph is compiled anew, and is dense; in inference and in training.

Here no guard looks at zeros, as for weights in no module, or with a `guard_filter_fn`; see test_zeros_guard.py.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from gossamer.backend import sparse
from gossamer.backend.convolution import cost
from gossamer.backend.owners.zeros_guard import _SEES_MARKS
from gossamer.backend.report.report import Decision, collect
from gossamer.backend.run import lost_zeros
from tests.backend.harness import assert_same, prune_

CALLS = lost_zeros._PATIENCE + 3

TRAINED_US = 200.0
"""What torch takes for a convolution, if a sparse one is to pay although its weight is read anew after every step."""


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled anew before, and torch's convolutions are slow enough for a pruned one to pay."""
    monkeypatch.setattr("gossamer.backend.entry.guard_zeros", lambda *_: None)
    monkeypatch.setattr(lost_zeros, "_times", 0)
    lost_zeros._calls.clear()
    monkeypatch.setattr(cost, "torch_us", lambda *_, **__: 40.0)
    torch.compiler.reset()
    yield
    lost_zeros._calls.clear()


def convolutions() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
    with torch.no_grad():
        for weight in (layers[0].weight, layers[2].weight):
            weight[torch.rand_like(weight) > 0.1] = 0
    return layers


def linears() -> nn.Module:
    """Under masks, as in training."""
    model = prune_(nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 512)), 0.1)
    for layer in (model[0], model[2]):
        prune.custom_from_mask(layer, "weight", (layer.weight != 0).float())
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "convolutions": (convolutions, (2, 16, 14, 14), 40.0),
    "linear": (linears, (512, 512), 0.0),
}
"""How they are made, the shape of their input, and what torch takes for a convolution in inference, in microseconds."""


@torch.no_grad()
def grow_back_(model: nn.Module) -> None:
    """No weight is zero any more, and no mask hides one."""
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) / 10)
    for mask in model.buffers():
        mask.fill_(1)


@pytest.mark.skipif(not _SEES_MARKS, reason="this torch has no guard for marks of parameters; the guard of zeros serves")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_a_model_whose_zeros_came_back_becomes_dense(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape, us = MODELS[name]
    monkeypatch.setattr(cost, "torch_us", lambda *_, **__: TRAINED_US if training else us)
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    regions = {"dense": "eager", "disable": ["smaller-layers"]}  # which know by themselves when a row is empty no more
    compiled = torch.compile(model, backend=sparse, options=regions)

    def step() -> torch.Tensor:
        y = compiled(x)
        if training:
            y.square().mean().backward()
        return y

    def decided(calls: int) -> list[Decision]:
        with collect() as collected, torch.set_grad_enabled(training):
            for _ in range(calls):
                assert_same(step().detach(), model(x).detach())
        return collected.decisions

    first = decided(2)
    assert any(decision.sparse for decision in first), first
    grow_back_(model)
    again = decided(CALLS)
    assert again == [] or not any(decision.sparse for decision in again)
    assert lost_zeros._times == 1
    assert decided(3) == [] and lost_zeros._times == 1


@pytest.mark.parametrize("torch_us", [TRAINED_US, 50 * TRAINED_US], ids=["some gain", "much gain"])
def test_weights_that_lose_their_zeros_in_training_run_densely_from_then_on(
    torch_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing holds the zeros, so that the first step of an optimizer fills them."""
    monkeypatch.setattr(cost, "torch_us", lambda *_, **__: torch_us)
    torch.manual_seed(0)
    model, x = convolutions(), torch.randn(2, 16, 14, 14)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend=sparse, options={"dense": "eager"})
    for _ in range(CALLS):
        optimizer.zero_grad()
        y = compiled(x)
        assert_same(y.detach(), model(x).detach())
        y.square().mean().backward()
        optimizer.step()
    assert lost_zeros._times == 1
    with collect() as collected:
        compiled(x)
    assert collected.decisions == []


def test_each_time_more_calls_are_waited_for() -> None:
    weights = [torch.randn(4, 4) for _ in range(3)]
    counts = []
    for weight in weights:
        before, calls = lost_zeros._times, 0
        while lost_zeros._times == before:
            lost_zeros.ran_densely([weight], lambda: True)
            calls += 1
        counts.append(calls)
    assert counts == [8, 16, 32]


def test_zeros_that_move_are_waited_for() -> None:
    weight, asked = torch.randn(4, 4), []
    for _ in range(20):
        lost_zeros.ran_densely([weight], lambda: bool(asked.append(1)))
    assert len(asked) == 2 and lost_zeros._times == 0


def test_a_weight_that_has_its_zeros_again_is_sparse_again() -> None:
    """The compiled code stays the same as long as the patience lasts."""
    torch.manual_seed(0)
    model, x = linears(), torch.randn(64, 512)
    compiled = torch.compile(model, backend=sparse, options={"dense": "eager"})
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with collect() as collected, torch.no_grad():
        compiled(x)
        grow_back_(model)
        assert_same(compiled(x), model(x))
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)
        assert_same(compiled(x), model(x))
    assert lost_zeros._times == 0 and sum(decision.sparse for decision in collected.decisions) == 2
