"""Compiled models run under any default device and default dtype of the user, which are for the user's own tensors."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.prepare import Mask
from tests.backend.harness import assert_same, compile_and_run, prune_, pruned


@pytest.fixture(autouse=True)
def usual_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def masked(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Mask((torch.rand_like(layer.weight) < 0.05).float()))
    return layer


@pytest.mark.parametrize("convolution", [False, True])
def test_masked_layers_train_beside_another_default_device(convolution: bool) -> None:
    layer = masked(nn.Conv2d(32, 32, 3, padding=1) if convolution else nn.Linear(128, 128))
    x = torch.randn(2, 32, 16, 16) if convolution else torch.randn(64, 128)
    run = compile_and_run(layer, x, grad=True)

    def gradients(call: Callable[..., Tensor]) -> list[Tensor | None]:
        layer.zero_grad()
        call(x).square().mean().backward()
        return [each.grad for each in layer.parameters()]

    for _ in range(2):
        with torch.no_grad():
            layer.parametrizations.weight[0].mask.copy_(layer.parametrizations.weight[0].mask.roll(1, 0))
        with torch.device("meta"):
            found = gradients(run.function)
        for ours, theirs in zip(found, gradients(layer), strict=True):
            assert ours is not None and theirs is not None
            assert_same(ours, theirs)


def test_a_changed_weight_is_packed_beside_another_default_device() -> None:
    weight, x = nn.Parameter(pruned(48, 64)), torch.randn(5, 64)
    run = compile_and_run(lambda x: F.linear(x, weight), x, regions=1)
    for _ in range(3):
        with torch.no_grad():
            weight.copy_(pruned(48, 64))
            with torch.device("meta"):
                for _ in range(2):
                    assert_same(run.function(x), F.linear(x, weight))


class Positions(nn.Module):
    """Makes a constant of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() * torch.linspace(0, 1, 64))


@pytest.mark.parametrize("trained", [False, True])
def test_gradients_of_eval_mode_have_the_defaults_of_the_forward_pass(trained: bool) -> None:
    torch.set_default_dtype(torch.float64)
    model = prune_(Positions()).eval().requires_grad_(trained)
    x = torch.randn(6, 32, requires_grad=True)
    run = compile_and_run(model, x, grad=True)
    leaves = [x, *model.parameters()] if trained else [x]

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.set_default_dtype(torch.float64)
        y = call(x)
        torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), [x])]

    for _ in range(2):
        for ours, theirs in zip(gradients(run.function), gradients(model), strict=True):
            assert ours.dtype is torch.float64
            assert_same(ours, theirs)
