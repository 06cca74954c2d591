"""Gradients of models in eval mode that take floats, which dynamic=True leaves open."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.runtime.torch_internals import TensorifyScalarRestartAnalysis
from tests.backend.harness import Run, compile_and_run, prune_

USES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a factor": lambda y, number: y * number + number,
    "of a norm": lambda y, number: F.group_norm(y, 4, eps=number),
    "a slope": F.leaky_relu,
}


class Net(nn.Module):
    """A pruned layer, and a use of a float."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(32, 48), USES[use]

    def forward(self, x: Tensor, number: float) -> Tensor:
        return self.use(self.layer(x), number)


def compiled(use: str) -> tuple[Net, Run]:
    torch.manual_seed(0)
    model = Net(use).eval()
    prune_(model)
    return model, compile_and_run(model, torch.randn(16, 32, requires_grad=True), 0.5, grad=True, dynamic=True)


def assert_gradients(model: Net, function: Callable[[Tensor, float], Tensor], number: float) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    ours, theirs = (torch.autograd.grad(each(x, number).square().sum(), [x, *model.parameters()]) for each in (function, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("error")
def test_floats_of_any_value_have_gradients(use: str) -> None:
    model, found = compiled(use)
    for number in (0.5, 0.25, 0.5, 0.125):
        assert_gradients(model, found.function, number)


@pytest.mark.filterwarnings("error")
def test_gradients_are_compiled_for_a_few_values_of_a_float_that_torch_cannot_leave_open() -> None:
    model, found = compiled("a factor")
    node: Any = found.output.grad_fn
    training = node.call.function.training

    def compile_(module: Any, values: Any) -> Any:
        if any(user.target == "item" for node in module.graph.find_nodes(op="placeholder") for user in node.users):
            raise TensorifyScalarRestartAnalysis
        return compiler.compile(module, values)

    compiler, training._compiler = training._compiler, SimpleNamespace(compile=compile_)
    for number in [*[1 / n for n in range(2, 12)], 0.5]:
        assert_gradients(model, found.function, number)
    assert [*training._compiled] == [(1 / n,) for n in range(2, 10)]
