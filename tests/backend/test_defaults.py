"""Compiled models run under any default device and default dtype of the user, which are for the user's own tensors."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gossamer.sparsity.compiler.kept_entries import KeptEntries
from tests.backend.harness import assert_same, compile_and_run, prune_


@pytest.fixture(autouse=True)
def usual_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def test_inner_tensors_are_on_the_cpu_beside_another_default_device() -> None:
    mask, values = (torch.rand(48, 64) < 0.2).float(), torch.randn(48, 64)
    with torch.device("meta"):
        kept = KeptEntries.of(mask)
        found = kept.values(values)
    assert_same(found, values[mask != 0])


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
            return [*first, *torch.autograd.grad(torch.stack([each.square().sum() for each in first]).sum(), [x])]

    for _ in range(2):
        for ours, theirs in zip(gradients(run.function), gradients(model), strict=True):
            assert ours.dtype is torch.float64
            assert_same(ours, theirs)
