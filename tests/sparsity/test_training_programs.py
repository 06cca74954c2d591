"""Programs as users write them train stored weights as weights under masks: closures, averages, frozen layers, evaluation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gossamer
from gossamer import SparseTensor
from tests.backend.harness import assert_same

STEPS = 18
OPTIONS: dict[str, dict[str, Any]] = {
    "rigl": {"sparsity": 0.8, "every": 4},
    "set": {"sparsity": 0.8, "every": 4},
    "gradual": {"sparsity": 0.9, "every": 4},
}
Program = Callable[[nn.Module, torch.optim.Optimizer, Callable[[Tensor], Tensor]], list[float]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x[:, :8].argmax(1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.005)


def dense(model: nn.Module) -> list[Tensor]:
    weights = (p.detach() for p in model.parameters())
    return [p.to_dense() if isinstance(p, SparseTensor) else p.clone() for p in weights]


def by_closures(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> list[float]:
    def loss_of(step: int) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(run(batch(step)[0]), batch(step)[1])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return closure

    return [float(optimizer.step(loss_of(step)).detach()) for step in range(STEPS)]


def trained(
    recipe: str, program: Program, store: bool, make: Any = adamw, compiled: bool = False
) -> tuple[list[float], nn.Module]:
    model = network()
    optimizer = make(model.parameters())
    training = gossamer.train_sparse(model, optimizer, recipe, steps=STEPS, store=store, **OPTIONS.get(recipe, {}))
    run = torch.compile(model, backend="sparse", options={"dense": "eager", "min_gain": 0}) if compiled else model
    losses = program(model, optimizer, run)
    assert any(isinstance(p, SparseTensor) for p in model.parameters()) == store and training.step == STEPS
    training.detach()
    return losses, model


@pytest.mark.parametrize("recipe", OPTIONS)
@pytest.mark.parametrize("make", [adamw, lambda parameters: torch.optim.LBFGS(parameters, 0.3, max_iter=3)])
def test_closures(recipe: str, make: Any) -> None:
    """Which compute the gradients within the step, LBFGS several times."""
    if recipe == "set" and make is not adamw:
        return  # what grows at random is no descent
    (losses, model), (found, other) = (trained(recipe, by_closures, store, make) for store in (False, True))
    assert found == pytest.approx(losses, abs=1e-8)
    for one, same in zip(dense(other), dense(model), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("recipe", ["rigl", "gradual"])
def test_compiled_closures(recipe: str) -> None:
    losses, _ = trained(recipe, by_closures, True)
    torch._dynamo.reset()
    counters.clear()
    found, _ = trained(recipe, by_closures, True, compiled=True)
    assert found == pytest.approx(losses, abs=1e-8)
    assert counters["gossamer"]["regions"] > 0 and not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # with all gradients and without; plain and stored
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["sr-ste", "step"])
def test_decay_and_variance_are_those_of_steps_without_a_closure(recipe: str) -> None:
    models = network(), network()
    for model, closed in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), 0.005)
        gossamer.train_sparse(model, optimizer, recipe, steps=STEPS, decay=0.3)
        if closed:
            by_closures(model, optimizer, model)
            continue
        for step in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for one, same in zip(dense(models[1]), dense(models[0]), strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", OPTIONS)
@pytest.mark.parametrize("function", [{"multi_avg_fn": get_ema_multi_avg_fn(0.8)}, {}])
def test_averages_hold_what_was_there_once(recipe: str, function: dict[str, Any]) -> None:
    averages: list[AveragedModel] = []

    def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> list[float]:
        averages.append(AveragedModel(model, use_buffers=True, **function))
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = F.cross_entropy(run(batch(step)[0]), batch(step)[1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            averages[-1].update_parameters(model)
            with torch.no_grad():
                losses.append(float(F.cross_entropy(averages[-1](batch(0)[0]), batch(0)[1])))
        return losses

    (losses, _), (found, _) = (trained(recipe, averaged, store) for store in (False, True))
    assert found == pytest.approx(losses, abs=1e-9)
    for one, same in zip(*map(dense, averages), strict=True):
        assert_same(same, one)


@pytest.mark.parametrize("recipe", OPTIONS)
def test_a_frozen_layer_stays_as_it_is(recipe: str) -> None:
    """But for zeros that a recipe adds; and its nonzeros move again when it is trained again."""

    def frozen(model: Any, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> list[float]:
        losses = []
        for step in range(STEPS):
            if step in (3, 12):
                model[0].weight.requires_grad_(step == 12)
                before = dense(model)[0]
            optimizer.zero_grad()
            loss = F.cross_entropy(run(batch(step)[0]), batch(step)[1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
            same = torch.equal(dense(model)[0], before) if step >= 3 else None
            assert recipe == "gradual" or step < 3 or same == (step < 12)
        return losses

    (losses, _), (found, _) = (trained(recipe, frozen, store) for store in (False, True))
    assert found == pytest.approx(losses, abs=1e-9)


def test_nonzeros_stay_where_no_gradient_comes() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(24, 16).double(), nn.Linear(24, 16).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = Branch()
    optimizer = adamw(model.parameters())
    training = gossamer.train_sparse(model, optimizer, "rigl", steps=STEPS, sparsity=0.8, every=2)
    masks = [layer.mask.clone() for layer in training.masks.layers]
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)[0]).square().sum().backward()
        optimizer.step()
    assert [torch.equal(layer.mask, mask) for layer, mask in zip(training.masks.layers, masks, strict=True)] == [False, True]
    other = Branch()
    optimizer = adamw(other.parameters())
    gossamer.train_sparse(other, optimizer, "one-shot", steps=STEPS, sparsity=0.8, at=1, saliency="first-order")
    other(batch(0)[0]).square().sum().backward()
    with pytest.raises(gossamer.OptionError, match=r"no gradient has come to 'unused' by step 1, and saliency 'first-order'"):
        optimizer.step()


def test_states_are_taken_under_inference_mode() -> None:
    """And are no tensors of inference, as those of dense parameters."""
    model = gossamer.store_sparse(gossamer.finalize(gossamer.sparsify(network(), "magnitude", density=0.2)))
    with torch.inference_mode():
        state = model.state_dict()
        values = model[0].weight.detach()
    assert not state["0.weight"].is_inference() and not values.is_inference()
    expected = copy.deepcopy(dense(model))
    for parameter in model.parameters():
        parameter.detach().zero_()
    assert not values.values().any()  # over the same arrays
    model.load_state_dict(state)
    assert not any(each.any() for each in dense(model)) and expected[0].any()


@pytest.mark.parametrize("store", [True, False])
def test_evaluation_under_inference_mode_leaves_what_training_writes_to(store: bool) -> None:
    def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> list[float]:
        losses: list[float] = []
        for step in range(STEPS):
            x, target = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(run(x), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad() if step % 4 else torch.inference_mode():
                losses.append(float(F.cross_entropy(run(x), target)))
        return losses

    expected, model = trained("gradual", with_evaluation, store=store)
    torch._dynamo.reset()
    counters.clear()
    losses, compiled = trained("gradual", with_evaluation, store=store, compiled=True)
    assert losses == pytest.approx(expected, rel=1e-5) and counters["gossamer"]["regions"] and not counters["graph_break"]
    torch.testing.assert_close(dense(compiled), dense(model), rtol=1e-5, atol=1e-7)
