"""Routed products and mixtures of experts as operations: numbers, gradients, graphs, errors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

import gossamer
from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.experts import kernels
from gossamer.sparsity.experts.expert_weights import Weight
from gossamer.sparsity.experts.routed_mlp import mixture, mixture_backward
from tests.sparsity.made import team_of
from tests.sparsity.routed import ACTIVATIONS, by_tokens, linear_by_tokens, quantized

DOUBLE = torch.float64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EXPERTS, TOP = 5, 3


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of a type, relative to the largest element."""
    assert found.shape == expected.shape
    if expected.numel():
        assert (found.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def layer(tokens: int, columns: int = 24, hidden: int = 20, layout: str = "halves", biased: bool = True) -> dict[str, Tensor]:
    """The operands of a mixture in float64; nobody chooses expert 2."""
    rows = hidden if layout == "up" else 2 * hidden
    made = {
        "x": torch.randn(tokens, columns, dtype=DOUBLE),
        "scores": torch.rand(tokens, TOP, dtype=DOUBLE),
        "gate_up": torch.randn(EXPERTS, rows, columns, dtype=DOUBLE) / 4,
        "down": torch.randn(EXPERTS, columns, hidden, dtype=DOUBLE) / 4,
    }
    if biased:
        made["gate_up_bias"] = torch.randn(EXPERTS, rows, dtype=DOUBLE)
        made["down_bias"] = torch.randn(EXPERTS, columns, dtype=DOUBLE)
    return made


def routing(tokens: int, top: int = TOP) -> Tensor:
    experts = torch.randint(0, EXPERTS, (tokens, top))
    return torch.where(experts == 2, 1, experts)


def in_type(operands: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: each.to(dtype) for name, each in operands.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, DOUBLE])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 21, 130])
def test_a_mixture_of_few_and_many_tokens(tokens: int, dtype: torch.dtype) -> None:
    operands, experts = in_type(layer(tokens), dtype), routing(tokens)
    found = gossamer.routed_mlp(experts=experts, **operands)
    assert found.dtype == dtype
    close(found, by_tokens(experts=experts, **in_type(operands, DOUBLE)), dtype)


@pytest.mark.parametrize("layout", ["halves", "interleaved", "up"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_every_activation_in_every_layout(activation: str, layout: str) -> None:
    if (activation, layout) == ("clamped_swiglu", "up"):
        pytest.skip("needs gates")
    operands, experts = layer(9, layout=layout), routing(9)
    given = {"activation": activation, "layout": layout}
    expected = by_tokens(experts=experts, **operands, **given)
    close(gossamer.routed_mlp(experts=experts, **operands, **given), expected, DOUBLE)
    close(gossamer.routed_mlp(experts=experts, **in_type(operands, torch.float32), **given), expected, torch.float32)


@pytest.mark.parametrize("columns, hidden", [(1, 1), (7, 5), (16, 16), (33, 50), (64, 17), (200, 40), (1601, 3)])
def test_sizes_that_are_no_vectors(columns: int, hidden: int) -> None:
    torch.manual_seed(0)  # sums of a single element may cancel
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 7, 40):
            operands, experts = in_type(layer(tokens, columns, hidden, biased=False), dtype), routing(tokens)
            expected = by_tokens(experts=experts, **in_type(operands, DOUBLE))
            close(gossamer.routed_mlp(experts=experts, **operands), expected, dtype)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_team_gives_the_same_bits(threads: int) -> None:
    operands, experts = in_type(layer(50, 96, 80), torch.float32), routing(50)
    torch.manual_seed(1)
    with team_of(1):
        alone = gossamer.routed_mlp(experts=experts, **operands)
        products = gossamer.routed_linear(operands["x"], experts, operands["gate_up"])
    with team_of(threads):
        assert torch.equal(gossamer.routed_mlp(experts=experts, **operands), alone)
        assert torch.equal(gossamer.routed_linear(operands["x"], experts, operands["gate_up"]), products)


@pytest.mark.parametrize("tokens", [1, 5, 12, 100, 250])
def test_all_tokens_choose_one_expert(tokens: int) -> None:
    operands, experts = in_type(layer(tokens), torch.float32), torch.full((tokens, 1), 3)
    operands["scores"] = operands["scores"][:, :1]
    close(
        gossamer.routed_mlp(experts=experts, **operands), by_tokens(experts=experts, **in_type(operands, DOUBLE)), torch.float32
    )


def test_a_token_may_choose_an_expert_twice() -> None:
    operands, experts = in_type(layer(4), torch.float32), torch.tensor([[1, 1, 1], [0, 4, 0], [2, 2, 3], [1, 0, 1]])
    close(
        gossamer.routed_mlp(experts=experts, **operands), by_tokens(experts=experts, **in_type(operands, DOUBLE)), torch.float32
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_token(value: float) -> None:
    for tokens in (3, 60):
        operands, experts = in_type(layer(tokens), torch.float32), routing(tokens)
        clean = gossamer.routed_mlp(experts=experts, **operands)
        operands["x"][1, -1] = value
        found = gossamer.routed_mlp(experts=experts, **operands)
        assert not found[1].isfinite().all()
        others = torch.arange(tokens) != 1
        assert torch.equal(found[others], clean[others])


def test_weights_of_experts_that_nobody_chose_are_not_read() -> None:
    operands, experts = in_type(layer(6), torch.float32), routing(6)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        operands[name][2] = torch.nan
    assert gossamer.routed_mlp(experts=experts, **operands).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_that_are_views(dtype: torch.dtype) -> None:
    operands, experts = in_type(layer(11), dtype), routing(11)
    expected = by_tokens(experts=experts, **in_type(operands, DOUBLE))
    changed = {**operands, "x": operands["x"].mT.contiguous().mT, "scores": operands["scores"].mT.contiguous().mT}
    close(gossamer.routed_mlp(experts=experts.mT.contiguous().mT, **changed), expected, dtype)
    turned = {name: operands[name].mT.contiguous().mT for name in ("gate_up", "down")}
    close(gossamer.routed_mlp(experts=experts, **{**operands, **turned}), expected, dtype)
    wider = {name: torch.cat([operands[name]] * 2, 1)[:, : operands[name].shape[1]] for name in ("gate_up", "down")}
    close(gossamer.routed_mlp(experts=experts, **{**operands, **wider}), expected, dtype)


@pytest.mark.parametrize("integers", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integers_name_experts(integers: torch.dtype) -> None:
    operands, experts = in_type(layer(6), torch.float32), routing(6)
    assert torch.equal(
        gossamer.routed_mlp(experts=experts.to(integers), **operands), gossamer.routed_mlp(experts=experts, **operands)
    )


@pytest.mark.parametrize("bits, groups", [(8, 1), (8, 2), (8, 3), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_integers(bits: int, groups: int, dtype: torch.dtype) -> None:
    columns, hidden = 96 if groups == 3 else 128, 48 if groups == 3 else 64
    for tokens in (1, 8, 30):
        operands, experts = layer(tokens, columns, hidden), routing(tokens)
        gate_up, gate_up_scales, floats = quantized(operands["gate_up"].float(), bits, groups)
        down, down_scales, other = quantized(operands["down"].float(), bits, groups)
        given = {**in_type(operands, dtype), "gate_up": gate_up, "down": down}
        found = gossamer.routed_mlp(experts=experts, **given, gate_up_scales=gate_up_scales, down_scales=down_scales)
        expected = {**in_type(in_type(operands, dtype), DOUBLE), "gate_up": floats.double(), "down": other.double()}
        close(found, by_tokens(experts=experts, **expected), dtype)


def test_products_with_a_row_for_each_slot_and_with_one_expert_a_token() -> None:
    weight, bias, experts = torch.randn(EXPERTS, 6, 40), torch.randn(EXPERTS, 6), routing(9)
    x, own = torch.randn(9, 40), torch.randn(9, TOP, 40)
    for given in (x, own):
        expected = linear_by_tokens(given.double(), experts, weight.double(), bias.double())
        close(gossamer.routed_linear(given, experts, weight, bias), expected, torch.float32)
    single = gossamer.routed_linear(x, experts[:, 0], weight, bias)
    close(single, linear_by_tokens(x.double(), experts[:, :1], weight.double(), bias.double())[:, 0], torch.float32)


def test_many_adapters_in_one_batch() -> None:
    """S-LoRA: each sequence has an adapter of its own, of rank 8."""
    a, b, adapters = torch.randn(EXPERTS, 8, 64), torch.randn(EXPERTS, 100, 8), torch.tensor([3, 0, 3, 1])
    x = torch.randn(4, 64)
    found = gossamer.routed_linear(gossamer.routed_linear(x, adapters, a), adapters, b)
    close(
        found,
        torch.stack([b[e].double() @ (a[e].double() @ row.double()) for e, row in zip(adapters, x, strict=True)]),
        torch.float32,
    )


# Gradients


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


# Graphs


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_all_numbers_of_tokens_and_routings() -> None:
    weights = {name: each.float().requires_grad_() for name, each in layer(1).items() if name not in ("x", "scores")}
    counter = CompileCounter()
    call = lambda x, experts, scores: gossamer.routed_mlp(x, experts, scores, **weights)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for tokens in (12, 2, 7, 130):
        operands, experts = in_type(layer(tokens), torch.float32), routing(tokens)
        for each in (operands["x"], operands["scores"], experts):
            torch._dynamo.mark_dynamic(each, 0)
        found = compiled(operands["x"], experts, operands["scores"])
        assert torch.equal(found, call(operands["x"], experts, operands["scores"]))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_in_graphs() -> None:
    operands, experts = in_type(layer(12), torch.float32), routing(12)
    leaves = [each.requires_grad_() for each in operands.values()]
    call = lambda experts, **operands: gossamer.routed_mlp(experts=experts, **operands).square().sum()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    own = torch.autograd.grad(compiled(experts, **operands), leaves)
    assert all(map(torch.equal, own, torch.autograd.grad(call(experts, **operands), leaves)))


@pytest.mark.usefixtures("fresh_dynamo")
def test_sizes_that_only_data_tell() -> None:
    operands, experts = in_type(layer(12), torch.float32), routing(12)

    def call(kept: Tensor) -> Tensor:
        some = kept.nonzero()[:, 0]
        given = {**operands, "x": operands["x"][some], "scores": operands["scores"][some]}
        return gossamer.routed_mlp(experts=experts[some], **given)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, backend="inductor", fullgraph=True)
        for share in (0.0, 0.5, 1.0):
            kept = torch.rand(12) < share
            assert torch.equal(compiled(kept), call(kept))


# Errors


def test_an_expert_that_does_not_exist_is_named() -> None:
    operands, experts = in_type(layer(6), torch.float32), routing(6)
    for wrong, text in ((EXPERTS, "token 4 chose expert 5 in slot 2, there are 5: 0 to 4"), (-1, "chose expert -1")):
        changed = experts.clone()
        changed[4, 2] = wrong
        with pytest.raises(ArgumentError, match=text):
            gossamer.routed_mlp(experts=changed, **operands)
        with pytest.raises(ArgumentError, match=text):
            gossamer.routed_linear(operands["x"], changed, operands["gate_up"])


def test_what_does_not_fit_is_refused() -> None:
    operands, experts = in_type(layer(6), torch.float32), routing(6)
    wrong = {
        "activation": ("nothing", "unknown activation 'nothing' of experts, there are identity"),
        "layout": ("sideways", "unknown layout 'sideways'"),
        "gate_up": (operands["gate_up"][..., :-1], "gate_up has 23 columns, the tokens have 24 elements"),
        "down": (operands["down"].double(), "down is torch.float64, the tokens are torch.float32"),
        "scores": (operands["scores"][:-1], "scores"),
        "down_bias": (operands["down_bias"][:, :-1], "down_bias"),
        "gate_up_scales": (torch.ones(EXPERTS, 40, 1), "only weights of int8 and uint8 have scales"),
    }
    for name, (value, text) in wrong.items():
        with pytest.raises(ArgumentError, match=text):
            gossamer.routed_mlp(experts=experts, **{**operands, name: value})
    with pytest.raises(ArgumentError, match="needs scales"):
        gossamer.routed_mlp(experts=experts, **{**operands, "gate_up": operands["gate_up"].to(torch.int8)})
    with pytest.raises(ArgumentError, match=r"x is \[6, 2, 24\], must be \[6, columns\] or \[6, 3, columns\]"):
        gossamer.routed_linear(torch.randn(6, 2, 24), experts, operands["gate_up"])
