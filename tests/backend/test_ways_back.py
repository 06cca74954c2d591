"""Every operation that reads a weight with zeros computes what dense torch does when the zeros come back, and goes again."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.backend import sparse
from gossamer.backend.convolution import cost as convolution_cost
from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.devices import cpu
from gossamer.backend.owners.zeros_guard import _SEES_MARKS
from gossamer.backend.report.report import Decision, collect
from gossamer.backend.run import lost_zeros
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import Prediction, predict
from tests.backend.harness import assert_same
from tests.backend.pruned_kinds import KINDS, Kind, empty_, fill_

CALLS = lost_zeros._PATIENCE + 3

DENSE_US = 1e4


def by_density(matrix: Matrix, *given: Any) -> Prediction:
    """Sparse is faster than dense below a density of one half, on any machine. The order of schedules stays as it is."""
    found = predict(matrix, *given)
    us = max(1.0, 2 * DENSE_US * matrix.density)
    return Prediction(DENSE_US, tuple((name, us * each / found.sparse_us) for name, each in found.by_schedule))


def of_convolution(convolution: Convolution, density: float | None = None) -> float:
    """The same for convolutions."""
    return 2 * DENSE_US * (convolution.weight.density if density is None else density)


@pytest.fixture(autouse=True)
def fake_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled anew before."""
    monkeypatch.setattr(cpu, "_predict", by_density)
    monkeypatch.setattr(convolution_cost, "torch_us", lambda *_, **__: DENSE_US)
    monkeypatch.setattr(convolution_cost, "kernel_us_of", of_convolution)
    monkeypatch.setattr(lost_zeros, "_times", 0)
    lost_zeros._calls.clear()
    torch.compiler.reset()
    yield
    lost_zeros._calls.clear()


def pruned_model(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Tensor, Callable[..., Any]]:
    """The model of a kind with its zeros, its input, and the model compiled."""
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: bool(kind.joined))
    torch.manual_seed(0)
    model, x = kind.make().to(kind.dtype).eval(), torch.randn(kind.sizes).to(kind.dtype)
    empty_(model, kind.block)
    return model, x, torch.compile(model, backend=sparse, fullgraph=True, options={"dense": "eager", "strict": True})


def in_float64(kind: Kind, model: nn.Module) -> nn.Module:
    """A copy of the model. torch does not copy weights that its own pruning has computed."""
    wide = kind.make().double()
    wide.load_state_dict(model.state_dict())
    return wide.train(model.training)


def call(kind: Kind, model: nn.Module, compiled: Callable[..., Any], x: Tensor, calls: int = 1) -> list[Decision]:
    """The decisions about pruned weights that calls make. Each gives what the model gives in float64."""
    with collect() as collected, torch.no_grad():
        for _ in range(calls):
            found, expected = compiled(x), in_float64(kind, model)(x.double()) if kind.exact else model(x)
            for one, other in zip(*([y] if isinstance(y, Tensor) else y for y in (found, expected)), strict=True):
                assert_same(one, other.to(one.dtype))
    return [decision for decision in collected.decisions if decision.sparse and decision.density < 0.9]


def step(kind: Kind, model: nn.Module, compiled: Callable[..., Any], x: Tensor, steps: int = 1) -> list[Decision]:
    """The same for steps of training. Their gradients are those of float64, too."""
    with collect() as collected:
        for _ in range(steps):
            wide = in_float64(kind, model)
            ours, exact = gradients(model, compiled, x), gradients(wide, wide, x.double())
            for one, other in zip(ours, exact, strict=True):
                assert_same(one, other.to(one.dtype))
    return [decision for decision in collected.decisions if decision.sparse and decision.density < 0.9]


def gradients(model: nn.Module, function: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """A result, and the gradients of the input and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *[parameter.grad for parameter in model.parameters()]]
    return [each for each in found if each is not None]


@pytest.mark.skipif(not _SEES_MARKS, reason="this torch has no guard for marks of parameters; the guard of zeros serves")
@pytest.mark.parametrize("name", KINDS)
def test_a_weight_that_loses_its_zeros_without_a_guard_becomes_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is right when it has other zeros again."""
    kind = KINDS[name]
    monkeypatch.setattr("gossamer.backend.entry.guard_zeros", lambda *_: None)
    model, x, compiled = pruned_model(kind, monkeypatch)
    first = call(kind, model, compiled, x, 2)
    assert len(first) == kind.regions
    assert all(kind.joined in decision.reason for decision in first)
    fill_(model)
    assert call(kind, model, compiled, x, CALLS) == []
    assert lost_zeros._times >= 1
    times = lost_zeros._times
    assert call(kind, model, compiled, x, 3) == [] and lost_zeros._times == times
    empty_(model, kind.block)
    call(kind, model, compiled, x, 3)


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_under_a_guard_is_dense_and_sparse_by_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's weights are loaded."""
    kind = KINDS[name]
    model, x, compiled = pruned_model(kind, monkeypatch)
    dense, other = (kind.make().to(kind.dtype) for _ in range(2))
    for each in (dense, other):
        fill_(each)
    empty_(other, kind.block)
    assert len(call(kind, model, compiled, x, 2)) == kind.regions
    model.load_state_dict(dense.state_dict())
    assert call(kind, model, compiled, x, CALLS) == []
    assert lost_zeros._times == 0
    model.load_state_dict(other.state_dict())
    assert len(call(kind, model, compiled, x, CALLS)) == kind.regions


@pytest.mark.skipif(not _SEES_MARKS, reason="this torch has no guard for marks of parameters; the guard of zeros serves")
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.training])
def test_a_weight_that_loses_its_zeros_in_training_becomes_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its gradients are right when it has other zeros again."""
    kind = KINDS[name]
    monkeypatch.setattr("gossamer.backend.entry.guard_zeros", lambda *_: None)
    model, x, compiled = pruned_model(kind, monkeypatch)
    first = step(kind, model.train(), compiled, x, 2)
    assert len(first) == kind.training
    fill_(model)
    assert step(kind, model, compiled, x, CALLS) == []
    assert lost_zeros._times >= 1
    empty_(model, kind.block)
    step(kind, model, compiled, x, 3)
