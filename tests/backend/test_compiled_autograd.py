"""Backward passes that torch compiles itself (torch._dynamo.config.compiled_autograd) have eager's gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gossamer
from tests.backend.harness import compile_and_run, prune_


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def model_in_eval_mode() -> nn.Module:
    torch.manual_seed(0)
    return prune_(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))).eval()


def differentiate(loss: Tensor, retain_graph: bool = False) -> None:
    """loss.backward(), compiled."""

    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="aot_eager")
        def backward(loss: Tensor) -> None:
            loss.backward(retain_graph=retain_graph)

        backward(loss)
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"]


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def test_a_model_in_eval_mode_has_eagers_gradients() -> None:
    model, x = model_in_eval_mode(), torch.randn(16, 32)
    run = compile_and_run(model, x, grad=True)
    assert run.regions
    model(x).square().sum().backward()
    wanted = gradients(model)
    for _ in range(4):  # with the third, the forward pass expects a backward pass
        loss = run.function(x).square().sum()
        differentiate(loss)
        torch.testing.assert_close(gradients(model), wanted, rtol=1e-4, atol=1e-4)


def test_two_calls_add_up_and_a_kept_graph_serves_twice() -> None:
    model, x = model_in_eval_mode(), torch.randn(16, 32)
    function = compile_and_run(model, x, grad=True).function
    (model(x).square().sum() + model(-x).sum()).backward()
    wanted = gradients(model)
    for _ in range(4):
        loss = function(x).square().sum() + function(-x).sum()
        for keep in (True, False):
            differentiate(loss, keep)
            torch.testing.assert_close(gradients(model), wanted, rtol=1e-4, atol=1e-4)


def test_a_weight_that_changed_before_the_backward_pass_is_an_error() -> None:
    model, x = model_in_eval_mode(), torch.randn(16, 32)
    loss = compile_and_run(model, x, grad=True).function(x).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate(loss)


def test_a_product_with_a_sparse_tensor_has_eagers_gradients() -> None:
    sparse = gossamer.SparseTensor.from_dense(torch.randn(32, 48) * (torch.rand(32, 48) < 0.2))
    x = torch.randn(48, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad((sparse.to_dense() @ x).square().sum(), x)
    differentiate((sparse @ x).square().sum())
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4)
