"""In training, an activation and its derivative are two results of the kernel of the layer before."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gossamer
from tests.backend.harness import Run, assert_same, compile_and_run

DERIVED = re.compile(r"\d+ ops fused, 2 results")


class Tanhshrink(nn.Module):
    """x - tanh(x), written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.tanh(x)


ACTIVATIONS = {"gelu": nn.GELU(), "gelu (tanh)": nn.GELU(approximate="tanh"), "tanhshrink": Tanhshrink(), "silu": nn.SiLU()}


def network(activation: nn.Module, sizes: tuple[int, int, int] = (48, 80, 40)) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes[:2]), activation, nn.Linear(*sizes[1:]))
    return gossamer.sparsify(model, "magnitude", density=0.2)


def gradients(model: nn.Module) -> list[Tensor]:
    """Those of all elements that are stored or kept, in their order."""
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        found.append(gradient.to_dense() if isinstance(gradient, gossamer.SparseTensor) else gradient)
    return found


def check(model: nn.Module, run: Run, x: Tensor) -> None:
    """Output and gradients against float64, where the zeros stay."""
    exact = copy.deepcopy(model).double()
    compared = []
    for call, module, given in ((run.function, model, x.clone()), (exact, exact, x.double())):
        module.zero_grad()
        given.requires_grad_()
        y = call(given)
        y.square().sum().backward()
        compared.append([y.detach(), given.grad, *gradients(module)])
    for ours, theirs in zip(*compared, strict=True):
        assert_same(ours, torch.where(ours == 0, 0, theirs).to(ours.dtype) if ours.dim() == 2 else theirs.to(ours.dtype))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_float64(activation: str, dynamic: bool) -> None:
    model = gossamer.store_sparse(network(ACTIVATIONS[activation]))
    run = compile_and_run(model, torch.randn(33, 48), grad=True, dense="inductor", dynamic=dynamic, regions=5)
    assert DERIVED.match(run.regions[0].reason)
    assert [DERIVED.match(d.reason) for d in run.regions[1:3]] == [None, None]
    for tokens in (33, 70, 1) if dynamic else (33,):
        check(model, run, torch.randn(tokens, 48) * 3)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.components[-1] if isinstance(parameter, gossamer.SparseTensor) else parameter).mul_(1.5)
    check(model, run, torch.randn(33, 48))


def test_sequences_of_tokens_and_a_size_that_nobody_knows() -> None:
    model = gossamer.store_sparse(network(nn.GELU()))

    def kept(x: Tensor) -> Tensor:
        y: Tensor = model(x[x[:, 0] > 0])
        return y

    x = torch.randn(3, 21, 48)
    check(model, compile_and_run(model, x, grad=True, dense="inductor", regions=5), x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compile_and_run(kept, x[0], grad=True, dense="inductor", dynamic=True)
    assert any(DERIVED.match(d.reason) for d in run.regions)
    for rows in (x[0], x[0].abs(), -x[0].abs()):  # some, all, none
        model.zero_grad()
        ours = run.function(rows)
        ours.sum().backward()
        assert_same(ours, kept(rows))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_reach_the_tokens_that_have_them(value: float) -> None:
    model = gossamer.store_sparse(network(nn.GELU()))
    run = compile_and_run(model, torch.randn(20, 48), grad=True, dense="inductor", regions=5)
    x = torch.randn(20, 48)
    x[3] = value
    results = []
    for call in (run.function, model):
        given = x.clone().requires_grad_()
        y = call(given)
        y.sum().backward()
        results.append((y.detach(), given.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_under_masks() -> None:
    model = network(nn.GELU(approximate="tanh"))
    gossamer.prepare(model)
    run = compile_and_run(model, torch.randn(33, 48), grad=True, dense="inductor")
    assert DERIVED.match(run.regions[0].reason)
    check(model, run, torch.randn(33, 48))


def test_steps_in_checkpointed_layers() -> None:
    layers = gossamer.store_sparse(network(nn.GELU()))

    def model(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(layers, x, use_reentrant=False)
        return y

    x = torch.randn(33, 48)
    run = compile_and_run(model, x, grad=True, dense="inductor")
    assert any(DERIVED.match(d.reason) for d in run.regions)
    check(layers, run, x)


def test_what_is_wanted_besides_its_activation_stays_a_result_of_its_own() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = gossamer.store_sparse(network(nn.GELU()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.layers[0](x)
            return h, self.layers[2](torch.nn.functional.gelu(h))

    model, x = Both(), torch.randn(33, 48)
    run = compile_and_run(model, x, grad=True, dense="inductor")
    assert not any(DERIVED.match(d.reason) for d in run.regions)
    for ours, theirs in zip(run.function(x), model(x), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("model", [network(nn.ReLU()), network(nn.GELU()).double()])
def test_one_result_where_a_second_one_would_not_pay(model: nn.Sequential) -> None:
    """The derivative of relu is in its result; exponential functions of doubles are not computed in vectors."""
    stored = gossamer.store_sparse(model)
    x = torch.randn(33, 48, dtype=stored[0].bias.dtype)
    run = compile_and_run(stored, x, grad=True, dense="inductor", regions=5)
    assert not any(DERIVED.match(d.reason) for d in run.regions)
    check(stored, run, x)
