"""Gradients of routed products and mixtures: of any order, in every type and layout, through graphs and transforms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

import gossamer
from gossamer.sparsity.experts import kernels
from gossamer.sparsity.experts.expert_weights import Weight
from gossamer.sparsity.experts.routed_mlp import mixture, mixture_backward
from tests.sparsity.made import team_of
from tests.sparsity.routed import ACTIVATIONS, DOUBLE, by_tokens, close, in_type, layer, quantized, routing


def test_gradients_of_any_order() -> None:
    operands, experts = layer(4, 5, 3), routing(4)
    names = list(operands)
    leaves = [each.requires_grad_() for each in operands.values()]

    def function(*given: Tensor) -> Tensor:
        return gossamer.routed_mlp(experts=experts, **dict(zip(names, given, strict=True)))

    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves)
    product = lambda x, weight, bias: gossamer.routed_linear(x, experts, weight, bias)
    given = operands["x"], operands["gate_up"], operands["gate_up_bias"]
    assert gradcheck(product, given, check_forward_ad=True)
    assert gradgradcheck(product, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["halves", "interleaved", "up"])
def test_gradients_are_those_of_the_plain_loop(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for tokens in (1, 30):
        operands, experts = in_type(layer(tokens, layout=layout), dtype), routing(tokens)
        plain = {name: each.double().requires_grad_() for name, each in operands.items()}
        for each in operands.values():
            each.requires_grad_()
        given = {"layout": layout, "activation": "gelu"}
        y, expected = gossamer.routed_mlp(experts=experts, **operands, **given), by_tokens(experts=experts, **plain, **given)
        weights = torch.randn(expected.shape, dtype=DOUBLE)
        y.backward(weights.to(dtype))
        expected.backward(weights.to(dtype).double())
        for name, each in operands.items():
            assert each.grad is not None and each.grad.dtype == dtype
            wanted = plain[name].grad
            assert wanted is not None
            close(each.grad, wanted, dtype)
        assert operands["gate_up"].grad is not None and not operands["gate_up"].grad[2].any()  # nobody chose it


def gradients(operands: dict[str, Tensor], experts: Tensor, function: Callable[..., Tensor], **given: str) -> dict[str, Tensor]:
    """Those of all operands, by a gradient of the result that is the same for all functions."""
    leaves = {name: each.detach().requires_grad_() for name, each in operands.items()}
    y = function(experts=experts, **leaves, **given)
    upstream = torch.linspace(0.2, 1, y.numel(), dtype=DOUBLE).view(y.shape).to(y.dtype)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), upstream), strict=True))


@pytest.mark.parametrize("layout", ["halves", "interleaved", "up"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_gradients_of_every_activation(activation: str, layout: str) -> None:
    if (activation, layout) == ("clamped_swiglu", "up"):
        pytest.skip("needs gates")
    operands, experts = layer(12, layout=layout), routing(12)
    given = {"activation": activation, "layout": layout}
    expected = gradients(operands, experts, by_tokens, **given)
    for name, found in gradients(in_type(operands, torch.float32), experts, gossamer.routed_mlp, **given).items():
        close(found, expected[name], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 160])
def test_transposed_weights_and_their_gradients_stay_so(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    operands, experts = in_type(layer(tokens, 40, 34), dtype), routing(tokens)
    turned = {name: operands[name].mT.contiguous().mT for name in ("gate_up", "down")}
    assert all(kernels.served(operands["x"], Weight(each, None, None)) for each in turned.values())
    expected = gradients(in_type(operands, DOUBLE), experts, by_tokens)
    found = gradients({**operands, **turned}, experts, gossamer.routed_mlp)
    for name, each in found.items():
        close(each, expected[name], dtype)
    assert all(found[name].stride() == each.stride() for name, each in turned.items())


@pytest.mark.parametrize("threads", [1, 3])
def test_any_team_gives_the_same_gradients(threads: int) -> None:
    torch.manual_seed(0)
    operands, experts = in_type(layer(230, 96, 80), torch.float32), routing(230)
    with team_of(1):
        alone = gradients(operands, experts, gossamer.routed_mlp)
    with team_of(threads):
        found = gradients(operands, experts, gossamer.routed_mlp)
    assert all(torch.equal(found[name], each) for name, each in alone.items())


@pytest.mark.parametrize("name", ["x", "scores", "gate_up", "down", "gate_up_bias", "down_bias"])
def test_any_one_operand_may_want_a_gradient(name: str) -> None:
    operands, experts = layer(7), routing(7)
    all_of_them = {each: value.clone().requires_grad_() for each, value in operands.items()}
    gossamer.routed_mlp(experts=experts, **all_of_them).sum().backward()
    operands[name].requires_grad_()
    gossamer.routed_mlp(experts=experts, **operands).sum().backward()
    torch.testing.assert_close(operands[name].grad, all_of_them[name].grad)


def test_a_backward_without_kept_sums_computes_them_again() -> None:
    operands, experts = layer(7), routing(7)
    given = (
        operands["x"], experts, operands["scores"], operands["gate_up"], None, operands["gate_up_bias"], operands["down"], None,
        operands["down_bias"], "silu", "halves",
    )  # fmt: skip
    y, kept = mixture(*given, True)
    assert mixture(*given, False)[1].shape == (0, kept.shape[1])
    with_sums = mixture_backward(torch.ones_like(y), kept, *given, [True] * 6)
    without = mixture_backward(torch.ones_like(y), kept[:0], *given, [True] * 6)
    assert all(map(torch.equal, with_sums, without))


def test_function_transforms() -> None:
    operands, experts = layer(3, 5, 4), routing(3)
    function = lambda x: gossamer.routed_mlp(experts=experts, **{**operands, "x": x})
    x = operands["x"]
    torch.testing.assert_close(jacrev(function)(x), jacfwd(function)(x))
    torch.testing.assert_close(vmap(function)(torch.stack([x, 2 * x])), torch.stack([function(x), function(2 * x)]))
    second = grad(lambda x: grad(lambda x: function(x).sum())(x).square().sum())(x)
    assert second.isfinite().all()


def test_batched_gradients_are_those_of_each_direction() -> None:
    operands, experts = layer(3, 5, 4), routing(3)
    x = operands["x"].requires_grad_()
    y = gossamer.routed_mlp(experts=experts, **operands)
    directions = torch.randn(4, *y.shape, dtype=y.dtype)
    (found,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in directions]
    torch.testing.assert_close(found, torch.stack(wanted))
    function = lambda x: gossamer.routed_mlp(experts=experts, **{**operands, "x": x})
    jacobian = torch.autograd.functional.jacobian(function, x, vectorize=True)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(function, x))


def test_x_and_scores_have_gradients_through_integers() -> None:
    operands, experts = in_type(layer(5, 64, 32), torch.float32), routing(5)
    gate_up, gate_up_scales, floats = quantized(operands["gate_up"], 8, 1)
    down, down_scales, other = quantized(operands["down"], 4, 1)
    leaves = [operands["x"].requires_grad_(), operands["scores"].requires_grad_()]
    plain = in_type({**operands, "gate_up": floats, "down": other}, DOUBLE)
    y = gossamer.routed_mlp(
        experts=experts,
        **{**operands, "gate_up": gate_up, "down": down},
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
    )
    expected = by_tokens(experts=experts, **plain)
    for found, wanted in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), [plain["x"], plain["scores"]]), strict=True
    ):
        close(found, wanted, torch.float32)


@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_in_graphs() -> None:
    operands, experts = in_type(layer(12), torch.float32), routing(12)
    leaves = [each.requires_grad_() for each in operands.values()]
    call = lambda experts, **operands: gossamer.routed_mlp(experts=experts, **operands).square().sum()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    own = torch.autograd.grad(compiled(experts, **operands), leaves)
    assert all(map(torch.equal, own, torch.autograd.grad(call(experts, **operands), leaves)))
