"""Weights that a model computes in its forward pass, by operations with several results and with constants in its code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.backend.harness import assert_same, compile_and_run, pruned


class Largest(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * (weight.abs() > weight.abs().flatten().kthvalue(int(0.8 * weight.numel())).values)


class LargestOfEight(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        groups = weight.reshape(-1, 8)
        places = groups.abs().topk(1, 1).indices
        return (groups * torch.zeros_like(groups).scatter(1, places, 1.0)).view_as(weight)


class Scored(nn.Module):
    """Writes numbers into a mask at places in the order of scores."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.rand_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        order, dropped = self.scores.flatten().sort().indices, int(0.8 * weight.numel())
        mask = self.scores.detach().flatten().clone()
        mask[order[:dropped]] = 0
        mask[order[dropped:]] = 1
        return weight * mask.view_as(weight)


class Standardized(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand_like(weight) < 0.2).float())

    def forward(self, weight: Tensor) -> Tensor:
        variance, mean = torch.var_mean(weight, dim=list(range(1, weight.dim())), keepdim=True)
        return (weight - mean) * torch.rsqrt(variance + 1e-5) * self.mask


def normalize(layer: nn.Linear | nn.Conv1d, dim: int = 0) -> None:
    layer.weight.data = pruned(*layer.weight.shape)
    parametrizations.weight_norm(layer, dim=dim)


def normalize_columns(layer: nn.Linear | nn.Conv1d) -> None:
    normalize(layer, layer.weight.dim() - 1)


def parametrized(make: Callable[[Tensor], nn.Module]) -> Callable[[nn.Linear | nn.Conv1d], Any]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", make(layer.weight))


KINDS: dict[str, Callable[[nn.Linear | nn.Conv1d], Any]] = {
    "weight norm": normalize,
    "weight norm of columns": normalize_columns,
    "kthvalue": parametrized(lambda _: Largest()),
    "topk": parametrized(lambda _: LargestOfEight()),
    "sort": parametrized(Scored),
    "var_mean": parametrized(Standardized),
}


def layer_of(kind: str, convolves: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.Conv1d(16, 32, 3) if convolves else nn.Linear(48, 32)
    KINDS[kind](layer)
    return layer.eval(), torch.randn(2, 16, 20) if convolves else torch.randn(8, 48)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_layers_are_sparse_until_their_parameters_change(kind: str, convolves: bool, grad: bool) -> None:
    layer, x = layer_of(kind, convolves)
    made = compile_and_run(layer, x, grad=grad, regions=1)
    assert len(made.decisions) == 1  # the report lists no part of the weight beside it
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            assert_same(made.function(x), layer(x))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convolves", [False, True])
def test_gradients_are_those_of_eager_code(kind: str, convolves: bool) -> None:
    layer, x = layer_of(kind, convolves)
    made, expected = compile_and_run(layer.train(), x, grad=True), layer(x)
    for found, wanted in zip(
        torch.autograd.grad(made.output.square().sum(), [*layer.parameters()], allow_unused=True),
        torch.autograd.grad(expected.square().sum(), [*layer.parameters()], allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_numbers_in_the_code_of_a_model_belong_to_the_weight(dense: str) -> None:
    weight, filters = pruned(32, 32), pruned(16, 8, 3)

    def function(x: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        return x @ (weight * torch.tensor(2.0)), nn.functional.conv1d(images, filters * torch.tensor(0.5))

    x, images = torch.randn(8, 32), torch.randn(2, 8, 20)
    made = compile_and_run(function, x, images, dense=dense, regions=2)
    for found, expected in zip(made.output, function(x, images), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_matrices_and_filters_in_the_code_of_a_model(dense: str) -> None:
    def function(x: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        differences = torch.tensor([[[[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]]])
        return x @ torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]), nn.functional.conv2d(images, differences)

    x, images = torch.randn(8, 3), torch.randn(2, 1, 9, 9)
    made = compile_and_run(function, x, images, dense=dense, regions=0 if dense == "inductor" else None)
    for found, expected in zip(made.output, function(x, images), strict=True):
        assert_same(found, expected)
