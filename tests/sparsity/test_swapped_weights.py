"""train_sparse(store=True): plain weights store their nonzeros alone while a recipe trains them, and are plain after it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gossamer
from gossamer import OptionError, SparseTensor
from tests.backend.harness import prune_
from tests.sparsity.test_stored_recipes import STEPS, X, adam, stored_in, train, trained

RECIPES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "one-shot": {"sparsity": 0.9, "at": 7},
    "gradual": {"sparsity": 0.9, "every": 5},
    "random": {"sparsity": 0.9},
    "set": {"sparsity": 0.8, "every": 5},
    "rigl": {"sparsity": 0.8, "every": 5},
}


def network(zeros: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8))
    return prune_(model, 0.2) if zeros else model  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_those_of_masks_and_weights_are_plain_again(recipe: str) -> None:
    plain, model = network(recipe == "fixed"), network(recipe == "fixed")
    losses, under_masks = trained(plain, recipe, **RECIPES[recipe])
    before = dict(model.named_parameters())
    found, training = trained(model, recipe, store=True, **RECIPES[recipe])
    assert len(stored_in(model)) == 2 and list(before) == [name for name, _ in model.named_parameters()]
    assert before["0.weight"].numel() == 0
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4)
    assert training.densities() == under_masks.densities()
    optimizer = training.optimizer
    assert all(isinstance(optimizer.state[p]["exp_avg"], SparseTensor) for p in stored_in(model))
    training.detach()
    under_masks.detach()
    training.detach()  # once more is nothing
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is before[name] for name in before) and list(parameters) == list(before)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in before.values()]
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(parameters[name], expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(parameters[name] == 0, expected == 0)
        for key, value in optimizer.state[parameters[name]].items():
            torch.testing.assert_close(value, under_masks.optimizer.state[expected][key], rtol=1e-2, atol=1e-4)
    loss = train(model, optimizer, STEPS)
    assert loss == pytest.approx(train(plain, under_masks.optimizer, STEPS), rel=1e-2)


@pytest.mark.parametrize("recipe", ["one-shot", "rigl"])
def test_compiled_steps_are_eager_ones_on_sparse_kernels(recipe: str) -> None:
    losses, _ = trained(network(False), recipe, store=True, **RECIPES[recipe])
    torch._dynamo.reset()
    counters.clear()
    model = network(False)
    found, training = trained(model, recipe, compiled=True, store=True, **RECIPES[recipe])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2
    training.detach()
    run = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager"})
    torch.testing.assert_close(run(X), model(X))


@pytest.mark.parametrize("recipe", ["gradual", "rigl", "one-shot"])
@pytest.mark.parametrize("saved_at", [3, 4, 10])  # the next step moves nonzeros after 4
@pytest.mark.parametrize("order", ["training last", "training first"])
def test_training_resumes(recipe: str, saved_at: int, order: str) -> None:
    """From before and after weights are stored, bit for bit."""
    model = network(False)
    _, training = trained(model, recipe, store=True, steps=saved_at, **RECIPES[recipe])
    states = copy.deepcopy([model.state_dict(), training.optimizer.state_dict(), training.state_dict()])
    losses = [train(model, training.optimizer, step) for step in range(saved_at, STEPS)]
    again = network(False)
    optimizer = adam(again.parameters())
    resumed = gossamer.train_sparse(again, optimizer, recipe, steps=STEPS, store=True, **RECIPES[recipe])
    loads = list(zip((again, optimizer, resumed), states, strict=True))
    for each, state in loads if order == "training last" else reversed(loads):
        each.load_state_dict(state)
    assert [train(again, optimizer, step) for step in range(saved_at, STEPS)] == losses


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(
    ("make", "name", "first"),
    [
        (lambda parameters: torch.optim.Rprop(parameters, 0.01), "step_size", 0.01),
        (lambda parameters: torch.optim.Adagrad(parameters, 0.01, initial_accumulator_value=0.1), "sum", 0.1),
    ],
)
def test_the_state_of_nonzeros_that_grow_is_that_before_the_first_step(make: Any, name: str, first: float, store: bool) -> None:
    model = network(False)
    _, training = trained(model, "rigl", store=store, make=make, steps=10, **RECIPES["rigl"])
    for layer in training.masks.layers:
        value, new = training.optimizer.state[layer.parameter][name], layer.mask & (layer.weight() == 0)
        found = (value.to_dense() if isinstance(value, SparseTensor) else value)[new]
        assert len(found) and torch.equal(found, torch.full_like(found, first))
    training.detach()
    value = training.optimizer.state[model[0].weight][name]
    assert torch.equal(value[model[0].weight == 0].unique(), torch.tensor([first]))


def test_copies_compute_between_steps_that_look_at_all_gradients() -> None:
    model = network(False)
    trained(model, "rigl", store=True, steps=4, **RECIPES["rigl"])
    assert "forward" in model[0].__dict__  # the next step is one of those
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again[0].__dict__["forward"].__self__ is again[0]
        torch.testing.assert_close(again(X), model(X))


def test_masks_are_taken_over() -> None:
    """Zeros that a mask keeps train on."""
    model = gossamer.sparsify(network(False), "magnitude", density=0.2)
    kept = model[0].parametrizations.weight[0].mask.bool().clone()
    with torch.no_grad():
        model[0].parametrizations.weight.original.masked_fill_(torch.rand(48, 24) < 0.5, 0.0)
    optimizer = adam(model.parameters())
    original, bias = model[0].parametrizations.weight.original, model[0].bias
    expected = model(X)
    training = gossamer.train_sparse(model, optimizer, "fixed", steps=STEPS, store=True)
    torch.testing.assert_close(model(X), expected)
    assert stored_in(model)[0].nnz == int(kept.sum())
    for step in range(3):
        train(model, optimizer, step)
    training.detach()
    assert model[0].weight is original and model[0].bias is bias and list(model[0]._parameters) == ["weight", "bias"]
    trained_on = model[0].weight.detach() != 0
    assert not bool((trained_on & ~kept).any()) and int(trained_on.sum()) > 0.8 * int(kept.sum())  # of dead units they stay 0


def test_what_cannot_be_stored_stays_plain() -> None:
    """Convolutions, shared weights, layers that are still dense."""
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3), "one": nn.Linear(8, 8), "same": nn.Linear(8, 8), "own": nn.Linear(8, 8)})
    model["same"].weight = model["one"].weight
    optimizer = adam(model.parameters())
    options: dict[str, Any] = {"sparsity": 0.8, "steps": 10, "only": ["conv", "one", "own"], "store": True}
    gossamer.train_sparse(model, optimizer, "one-shot", **options)
    assert [isinstance(layer.weight, SparseTensor) for layer in model.values()] == [False, False, False, True]
    dense = nn.Linear(8, 8)
    training = gossamer.train_sparse(dense, adam(dense.parameters()), "one-shot", steps=10, sparsity=0.4, store=True)
    assert not isinstance(dense.weight, SparseTensor) and training.densities() == {"": pytest.approx(0.6, abs=0.01)}


def test_refusals() -> None:
    model = network(False)
    for recipe, options in (
        ("sr-ste", {}),
        ("soft", {"sparsity": 0.9}),
        ("gradual", {"sparsity": 0.9, "saliency": "first-order", "begin": 1}),
    ):
        with pytest.raises(OptionError, match="store=True keeps only nonzeros"):
            gossamer.train_sparse(model, adam(model.parameters()), recipe, steps=10, store=True, **options)
