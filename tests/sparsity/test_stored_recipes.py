"""Recipes on weights that store their nonzeros alone: steps are those under masks, nonzeros move as the papers say."""

import copy
import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gossamer
from gossamer import OptionError, SparseTensor, SparseTraining
from gossamer.sparsity.training.stored_weight import StoredWeight
from tests.backend.harness import prune_

STEPS = 20
X = torch.randn(256, 24, generator=torch.Generator().manual_seed(1))
Y = X[:, :8].argmax(1)
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.02)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return prune_(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8)), 0.2)  # type: ignore[return-value]


def trained(
    model: nn.Module, recipe: str, *, compiled: bool = False, make: Optimizer = adam, steps: int = STEPS, **options: Any
) -> tuple[list[float], SparseTraining]:
    optimizer = make(model.parameters())
    training = gossamer.train_sparse(model, optimizer, recipe, steps=STEPS, **options)
    run = torch.compile(model, backend="sparse", options={"dense": "eager"}) if compiled else model
    return [train(run, optimizer, step) for step in range(steps)], training


def train(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, step: int) -> float:
    rows = torch.randint(0, len(X), (64,), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = F.cross_entropy(run(X[rows]), Y[rows])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 8))


def stored_in(model: nn.Module) -> list[SparseTensor]:
    return [p for p in model.parameters() if isinstance(p, SparseTensor)]


RECIPES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "one-shot": {"sparsity": 0.9, "at": 7},
    "gradual": {"sparsity": 0.9, "every": 5},
    "random": {"sparsity": 0.9, "distribution": "uniform"},
}


FALLING: dict[str, dict[str, Any]] = {
    "one-shot": {"sparsity": 0.8, "at": 7},
    "gradual": {"sparsity": 0.8, "every": 2},
}
ALL = {"dense": "eager", "min_gain": 0}


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_those_under_masks(recipe: str) -> None:
    plain, model = network(), gossamer.store_sparse(network())
    losses, under_masks = trained(plain, recipe, **RECIPES[recipe])
    found, training = trained(model, recipe, **RECIPES[recipe])
    if recipe != "random":  # which draws other nonzeros
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-4)
        for one, same in zip(stored_in(model), (plain[0].weight, plain[2].weight), strict=True):
            torch.testing.assert_close(one.to_dense(), same, rtol=1e-3, atol=1e-4)
    assert training.densities() == pytest.approx(under_masks.densities(), abs=2e-3)


@pytest.mark.parametrize("recipe", ["rigl", "set", "gradual"])
def test_compiled_steps_are_eager_ones(recipe: str) -> None:
    options = {"sparsity": 0.9} if recipe == "gradual" else {"sparsity": 0.8}
    losses, training = trained(gossamer.store_sparse(network()), recipe, every=5, **options)
    torch._dynamo.reset()
    counters.clear()
    found, other = trained(gossamer.store_sparse(network()), recipe, every=5, compiled=True, **options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-3)
    for one, same in zip(training.masks.layers, other.masks.layers, strict=True):
        assert torch.equal(one.mask, same.mask)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (
        2 if recipe == "rigl" else 1
    )  # with the gradient of all elements, and without


@pytest.mark.parametrize("recipe", [*FALLING])
@pytest.mark.parametrize("store", [True, False])
def test_what_becomes_sparse_is_compiled_for_it(recipe: str, store: bool) -> None:
    """Once as dense, and once for what it will be: more and more zeros need no other code."""
    gc.collect()  # recipes that nobody has detached keep sizes open as long as they are there
    options = {"skip": ["2"], **FALLING[recipe]}
    losses, eager = trained(wide(), recipe, store=store, **options)
    eager.detach()
    torch._dynamo.reset()
    counters.clear()
    model = wide()
    optimizer = adam(model.parameters())
    training = gossamer.train_sparse(model, optimizer, recipe, steps=STEPS, store=store, **options)
    run = torch.compile(model, backend="sparse", options=ALL)
    found = [train(run, optimizer, step) for step in range(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-3)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
    assert counters["gossamer"]["regions"] >= 1
    assert training.masks.layers[0].density < 0.21 and bool(torch.compiler.config.dynamic_sources) == store
    training.detach()
    assert torch.compiler.config.dynamic_sources == ""


@pytest.mark.parametrize("distribution", ["erdos-renyi", "global"])
def test_layers_that_get_sparse_at_other_times_are_compiled_together(distribution: str) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        sizes = (24, 16, 96, 96, 8)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))

    options = {"sparsity": 0.8, "every": 1, "distribution": distribution, "store": True}
    losses, eager = trained(network(), "gradual", **options)
    eager.detach()
    torch._dynamo.reset()
    counters.clear()
    found, training = trained(network(), "gradual", compiled=True, **options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-3)
    assert counters["stats"]["unique_graphs"] <= 4
    stored = [layer.density <= 0.5 for layer in training.masks.layers]
    assert [isinstance(layer, StoredWeight) for layer in training.masks.layers] == stored and any(stored)


def test_what_is_ripe_is_so_after_a_checkpoint() -> None:
    model, again = wide(), wide()
    optimizer = adam(model.parameters())
    training = gossamer.train_sparse(model, optimizer, "gradual", steps=STEPS, sparsity=0.8, every=2, store=True)
    states = []
    for step in range(STEPS):
        if step in (3, 9):
            states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), training.state_dict())))
        train(model, optimizer, step)
    for start, state in zip((3, 9), states, strict=True):
        other = adam(again.parameters())
        resumed = gossamer.train_sparse(again, other, "gradual", steps=STEPS, sparsity=0.8, every=2, store=True)
        resumed.load_state_dict(state[2])
        again.load_state_dict(state[0])
        other.load_state_dict(state[1])
        for step in range(start, STEPS):
            train(again, other, step)
        for one, same in zip(model.parameters(), again.parameters(), strict=True):
            assert type(one) is type(same)
            assert torch.equal(*(p.to_dense() if isinstance(p, SparseTensor) else p for p in (one, same)))
        resumed.detach()


@pytest.mark.parametrize("backend", ["inductor", "sparse"])
@pytest.mark.parametrize("recipe", ["fixed", "gradual"])
def test_compiled_steps_of_an_optimizer_are_seen_by_a_compiled_model(recipe: str, backend: str) -> None:
    model = gossamer.store_sparse(network())
    optimizer = adam(model.parameters())
    training = gossamer.train_sparse(model, optimizer, recipe, steps=STEPS, **RECIPES[recipe])
    step, run = torch.compile(optimizer.step, backend=backend), torch.compile(model, backend="sparse", options=ALL)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(run(X), Y).backward()
        step()
        with torch.no_grad():
            torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-4)
    assert training.step == STEPS


def test_nonzeros_move_to_where_the_gradient_is_largest() -> None:
    model = gossamer.store_sparse(network())
    _, training = trained(model, "rigl", sparsity=0.8, every=5, fraction=0.4, until=15, steps=4)
    optimizer, weights = training.optimizer, stored_in(model)
    before = [weight.detach().to_dense() for weight in weights]
    dense = copy.deepcopy(model)  # with the weights that are lent for this step
    rows = torch.randint(0, len(X), (64,), generator=torch.Generator().manual_seed(4))
    for layer, weight in zip((dense[0], dense[2]), before, strict=True):
        layer.__dict__.pop("forward", None)
        layer._parameters["weight"] = nn.Parameter(weight)
    F.cross_entropy(dense(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
    train(model, optimizer, 4)
    for weight, old, layer, now in zip(weights, before, (dense[0], dense[2]), training.masks.layers, strict=True):
        kept, mask = old != 0, now.mask
        assert mask.sum() == kept.sum() == weight.nnz
        new, gone = mask & ~kept, kept & ~mask
        moved = 0.2 * (1 + torch.cos(torch.tensor(torch.pi * 5 / 15)))  # Evci et al., 2020, section 3 (2)
        assert int(gone.sum()) == pytest.approx(float(moved * kept.sum()), abs=3) and gone.sum() == new.sum() > 0
        gradient = layer.weight.grad.abs()
        assert gradient[new].min() >= gradient[~kept & ~mask].max()
        assert not weight.detach().to_dense()[new].any()
        average = optimizer.state[weight]["exp_avg"].to_dense()
        assert not average[new | gone].any() and average[kept & mask].any()


def test_what_is_lent_is_seen_by_forward_alone() -> None:
    model = gossamer.store_sparse(network())
    _, training = trained(model, "rigl", sparsity=0.8, every=5, steps=4)
    assert "forward" in model[0].__dict__
    assert all(isinstance(model[at].weight, SparseTensor) for at in (0, 2))
    scaled = torch.amp.GradScaler("cpu", init_scale=8.0)  # which looks at the gradients of what the optimizer has
    scaled.scale(F.cross_entropy(model(X), Y)).backward()
    scaled.unscale_(training.optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norms = [
        p.grad.values().square().sum() if isinstance(p, SparseTensor) else p.grad.square().sum() for p in model.parameters()
    ]
    torch.testing.assert_close(torch.stack(norms).sum().sqrt(), torch.tensor(0.1), rtol=1e-3, atol=1e-4)
    scaled.step(training.optimizer)
    assert "forward" not in model[0].__dict__
    training.detach()
    assert all(isinstance(model[at].weight, SparseTensor) for at in (0, 2))


class Dropping(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.dropout(input, 0.5, self.training), self.weight, self.bias)


def own() -> nn.Sequential:
    model = network()
    for layer in (model[0], model[2]):
        layer.__class__ = Dropping
    return model.eval()


def test_modules_with_their_own_forward_take_the_same_steps() -> None:
    options: dict[str, Any] = {"sparsity": 0.8, "every": 5}
    losses, _ = trained(own(), "rigl", store=True, **options)
    plain, _ = trained(own(), "rigl", **options)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()
    counters.clear()
    found, training = trained(own(), "rigl", store=True, compiled=True, **options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2
    assert all(isinstance(layer, StoredWeight) for layer in training.masks.layers)


def test_before_a_step_that_moves_nonzeros_modules_follow_their_weights_and_modes() -> None:
    model = gossamer.store_sparse(own().train())
    trained(model, "rigl", sparsity=0.8, every=5, steps=4)
    assert "forward" in model[0].__dict__
    with torch.no_grad():
        assert not torch.equal(model(X), model(X))
        for weight in stored_in(model):
            weight.mul_(0.5)
        first, last = (weight.detach().to_dense() for weight in stored_in(model))
        expected = F.linear(F.linear(X, first, model[0].bias).relu(), last, model[2].bias)
        torch.testing.assert_close(model.eval()(X), expected)


@pytest.mark.parametrize("saved_at", [9, 12])  # the next step moves nonzeros after 9
def test_training_goes_on_from_a_checkpoint(saved_at: int) -> None:
    whole, _ = trained(gossamer.store_sparse(network()), "rigl", sparsity=0.8, every=5)
    model = gossamer.store_sparse(network())
    first, training = trained(model, "rigl", sparsity=0.8, every=5, steps=saved_at)
    states = copy.deepcopy((model.state_dict(), training.optimizer.state_dict(), training.state_dict()))
    other = gossamer.store_sparse(network())
    optimizer = adam(other.parameters())
    again = gossamer.train_sparse(other, optimizer, "rigl", steps=STEPS, sparsity=0.8, every=5)
    other.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    again.load_state_dict(states[2])
    rest = [train(other, optimizer, step) for step in range(saved_at, STEPS)]
    torch.testing.assert_close(torch.tensor(first + rest), torch.tensor(whole), rtol=1e-5, atol=1e-6)


def test_what_needs_the_other_elements_is_refused() -> None:
    model = gossamer.store_sparse(network())
    refused: dict[str, dict[str, Any]] = {
        "soft": {"sparsity": 0.9},
        "sr-ste": {},
        "one-shot": {"saliency": "first-order", "sparsity": 0.9, "at": 1},
    }
    for recipe, options in refused.items():
        with pytest.raises(OptionError, match=r"'0' stores only its nonzeros, and this recipe also needs the zeros"):
            gossamer.train_sparse(model, adam(model.parameters()), recipe, steps=9, **options)
    with pytest.raises(
        OptionError, match=r"'0' stores (19|20)\.\d% of its elements, and their number stays .* give sparsity=0\.[78]"
    ):
        gossamer.train_sparse(model, adam(model.parameters()), "rigl", steps=9, sparsity=0.3)


@pytest.mark.parametrize(("recipe", "options"), [("fixed", {}), ("rigl", {"steps": 6, "sparsity": 0.7, "every": 2})])
def test_a_forward_that_other_code_has_set_stays(recipe: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 24), torch.randn(5, 16)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(24, 16) < 0.3)
    gossamer.store_sparse(layer)
    own = layer.forward
    layer.forward = patched = lambda x: own(x) + 1  # type: ignore[assignment]
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    training = gossamer.train_sparse(layer, optimizer, recipe, **options)
    for _ in range(4):
        weight: Any = layer.weight.detach()
        found = layer(x)
        torch.testing.assert_close(found, F.linear(x, weight.to_dense(), layer.bias) + 1, rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        found.square().sum().backward()
        optimizer.step()
    training.detach()
    assert layer.forward is patched
