"""The gradients that say where nonzeros grow are those that the optimizer gets, however the loop computes them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad
from torch.nn.utils import clip_grad_norm_

import gossamer

STEPS = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)).double()


def batch(step: int) -> Tensor:
    return torch.randn(16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def attached(model: nn.Module, recipe: str = "rigl", **options: bool) -> gossamer.SparseTraining:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return gossamer.train_sparse(model, optimizer, recipe, sparsity=0.8, steps=20, every=2, fraction=0.5, **options)


def masks(
    store: bool = False, compiled: bool = False, passes: int = 1, probe: bool = False, to_none: bool = True
) -> list[Tensor]:  # fmt: skip
    """Trains in so many passes a step, after a `probe` whose gradients the loop discards. Clips scaled gradients.

    Returns the masks that the recipe ends with.
    """
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = attached(model, store=store)
    optimizer = training.optimizer
    run = torch.compile(model, backend="sparse", options={"dense": "eager", "min_gain": 0}) if compiled else model
    for step in range(STEPS):
        if probe:
            optimizer.zero_grad(set_to_none=to_none)
            scaler.scale(run(30 * batch(step + 50).chunk(passes)[0]).square().mean()).backward()
        optimizer.zero_grad(set_to_none=to_none)
        for x in batch(step).chunk(passes):
            scaler.scale(F.mse_loss(run(x), x.flip(1)) / passes).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert training.step == STEPS
    return [layer.mask for layer in training.masks.layers]


@pytest.mark.parametrize(("store", "compiled"), [(False, False), (True, False), (True, True)])
def test_nonzeros_grow_by_the_passes_of_a_step_but_not_by_discarded_ones(store: bool, compiled: bool) -> None:
    """Compiled code computes the gradients of stored and of all elements at once. Torch then adds them in any order."""
    expected = masks()
    torch._dynamo.reset()
    counters.clear()
    for to_none, probe in [(False, True)] if compiled else [(True, False), (True, True), (False, False), (False, True)]:
        found = masks(store, compiled, 2, probe, to_none)
        assert all(torch.equal(one, same) for one, same in zip(found, expected, strict=True)), (to_none, probe)
    if compiled:
        assert counters["gossamer"]["regions"] > 0 and not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 2  # with the gradient of all elements, and without


@pytest.mark.parametrize("recipe", ["rigl", "set"])
def test_assigned_gradients_move_nonzeros_like_those_of_backward(recipe: str) -> None:
    def trained(assigned: bool) -> nn.Module:
        model = network()
        training = attached(model, recipe)
        layer, given = training.masks.layers[0], dict(model.named_parameters())
        first = layer.mask.clone()

        def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
            return F.mse_loss(functional_call(model, given, (x,)), x.flip(1))

        for step in range(STEPS):
            training.optimizer.zero_grad()
            if assigned:
                found = grad(loss)({name: each.detach() for name, each in given.items()}, batch(step))
                for name, each in given.items():
                    each.grad = found[name]
            else:
                loss(given, batch(step)).backward()
            training.optimizer.step()
        assert not torch.equal(layer.mask, first)
        return model

    for one, same in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        torch.testing.assert_close(one, same)
        assert torch.equal(one == 0, same == 0)


def test_an_expanded_gradient_may_be_assigned() -> None:
    model = nn.Linear(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = gossamer.train_sparse(model, optimizer, "random", sparsity=0.5)
    model.weight.grad = torch.ones(()).expand(6, 8)
    optimizer.step()
    assert torch.equal(model.weight.grad, training.masks.layers[0].mask.float())
