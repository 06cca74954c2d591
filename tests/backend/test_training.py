"""Gradients through sparse regions are those of dense torch, and the gradient of x is a sparse region itself."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.backend.harness import Run, assert_same, compile_and_run, prune_, pruned


class Mask(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def gradients(module: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Of every parameter, then of x."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    output = (module if call is None else call)(x)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [*found, x.grad]  # type: ignore[list-item]


def assert_trains_alike(module: nn.Module, x: Tensor, **options: object) -> Run:
    expected = gradients(module, x)
    run = compile_and_run(module, x.clone().requires_grad_(), grad=True, **options)
    actual = gradients(module, x, run.function)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    return run


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.SiLU()])
def test_mlp(dense: str, activation: nn.Module) -> None:
    model = prune_(nn.Sequential(nn.Linear(64, 96), activation, nn.Linear(96, 64)))
    run = assert_trains_alike(model, torch.randn(2, 5, 64), dense=dense)
    assert [(d.name, d.op) for d in run.regions] == [
        ("0.weight", "linear"),
        ("2.weight", "linear"),
        ("2.weight", "linear backward"),
        ("0.weight", "linear backward"),
    ]


def test_a_weight_of_what_the_forward_pass_writes_to_is_not_static() -> None:
    """Spectral norm divides by what it takes from buffers, and turns those toward the next step in the same pass."""
    normed = [torch.nn.utils.parametrizations.spectral_norm(layer) for layer in (nn.Linear(64, 96), nn.Linear(32, 64))]
    model = nn.Sequential(normed[0], nn.ReLU(), prune_(nn.Linear(96, 32)), nn.ReLU(), normed[1])
    own, x = copy.deepcopy(model), torch.randn(5, 64)
    run = compile_and_run(own, x, grad=True)
    model(x)
    for _ in range(2):
        for ours, theirs in zip(gradients(own, x, run.function), gradients(model, x), strict=True):
            assert_same(ours, theirs)
    assert {("2.weight", "linear"), ("2.weight", "linear backward")} <= {(d.name, d.op) for d in run.regions}


def test_no_gradient_of_x_needs_no_backward_region() -> None:
    model, x = prune_(nn.Linear(64, 32)), torch.randn(5, 64)
    run = compile_and_run(model, x, grad=True)
    run.output.sum().backward()
    assert [d.op for d in run.regions] == ["linear"]
    assert_same(model.weight.grad, x.sum(0).expand(32, 64))


def test_frozen_weights() -> None:
    model = prune_(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))).requires_grad_(False)
    run = assert_trains_alike(model, torch.randn(5, 64))
    assert len(run.regions) == 4


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_mask_as_parametrization(dense: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", Mask((torch.rand_like(layer.weight) < 0.2).float()))
    run = assert_trains_alike(model, torch.randn(5, 64), dense=dense)
    assert [d.name for d in run.regions] == ["0.weight", "2.weight", "2.weight", "0.weight", "2.weight", "0.weight"]
    assert [d.op for d in run.regions[4:]] == ["gradient"] * 2
    assert all(0.1 < d.density < 0.3 for d in run.regions)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_prune_hooks(dense: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    prune.l1_unstructured(model[0], "weight", amount=0.8)
    prune.random_unstructured(model[2], "weight", amount=0.9)
    run = assert_trains_alike(model, torch.randn(5, 64), dense=dense)
    assert {d.name for d in run.regions} == {"0.weight", "2.weight"}
    assert {round(d.density, 1) for d in run.regions} == {0.2, 0.1}


def test_a_computed_mask() -> None:
    class TopHalf(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.where(self.weight.abs() > 0.08, self.weight, 0.0), self.bias)

    run = assert_trains_alike(TopHalf(64, 64), torch.randn(5, 64))
    assert len(run.regions) == 2 and all(d.density < 0.5 for d in run.regions)


def test_shared_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(pruned(96, 64))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(F.linear(x, self.weight)), self.weight.t())

    run = assert_trains_alike(Tied(), torch.randn(5, 64))
    assert len(run.regions) == 4


def test_dynamic_batch() -> None:
    model = prune_(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)))
    run = assert_trains_alike(model, torch.randn(2, 5, 64), dense="inductor", dynamic=True)
    assert len(run.regions) == 4
    for shape in ((3, 4, 64), (2, 9, 64)):
        x = torch.randn(shape)
        for a, b in zip(gradients(model, x, run.function), gradients(model, x), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, partial(torch.optim.AdamW, fused=True)])
def test_training_with_a_mask_follows_dense_training(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    parametrize.register_parametrization(model[0], "weight", Mask((torch.rand(64, 32) < 0.2).float()))
    parametrize.register_parametrization(model[2], "weight", Mask((torch.rand(32, 64) < 0.2).float()))
    twin = copy.deepcopy(model)
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    compiled = compile_and_run(model, x, grad=True).function
    losses = []
    for call, module in ((compiled, model), (twin, twin)):
        steps = optimizer(module.parameters(), lr=0.01)
        for _ in range(10):
            steps.zero_grad()
            loss = F.mse_loss(call(x), target)
            loss.backward()
            steps.step()
        losses.append(loss.detach())
    assert_same(losses[0], losses[1])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(a.detach(), b.detach())


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    run = assert_trains_alike(prune_(Checkpointed()), torch.randn(5, 64))
    assert len(run.regions) == 4


def test_autocast() -> None:
    model, x = prune_(nn.Linear(64, 48)), torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = compile_and_run(model, x)
        expected = model(x).detach()
        assert_same(run.function(x).detach(), expected)
    assert len(run.regions) == 1 and run.output.dtype == torch.bfloat16
    assert_same(run.output, expected)
