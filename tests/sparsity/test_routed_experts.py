"""Routed products and mixtures of experts as operations: numbers, graphs, errors."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import gossamer
from gossamer.dialects.errors import ArgumentError
from tests.sparsity.made import team_of
from tests.sparsity.routed import (
    ACTIVATIONS,
    DOUBLE,
    EXPERTS,
    TOP,
    by_tokens,
    close,
    in_type,
    layer,
    linear_by_tokens,
    quantized,
    routing,
)


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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns, hidden", [(64, 48), (96, 24), (160, 300), (1088, 32)])
def test_many_tokens_of_bf16(columns: int, hidden: int, turned: bool) -> None:
    """Sizes that fill tiles of 16 rows and 32 columns, whole blocks of them, and sizes that do not."""
    torch.manual_seed(0)
    for tokens, top in ((19, TOP), (130, 1)):
        operands = in_type(layer(tokens, columns, hidden), torch.bfloat16)
        operands["scores"] = operands["scores"][:, :top]
        if turned:
            operands |= {name: operands[name].mT.contiguous().mT for name in ("gate_up", "down")}
        experts = routing(tokens) if top > 1 else torch.full((tokens, 1), EXPERTS - 1)
        expected = by_tokens(experts=experts, **in_type(operands, DOUBLE))
        close(gossamer.routed_mlp(experts=experts, **operands), expected, torch.bfloat16)


@pytest.mark.parametrize("columns, hidden", [(96, 48), (320, 20)])
def test_many_tokens_and_integers_with_a_scale_a_row(columns: int, hidden: int) -> None:
    operands, experts = layer(130, columns, hidden), torch.full((130, 1), 1)
    operands["scores"] = operands["scores"][:, :1]
    gate_up, gate_up_scales, floats = quantized(operands["gate_up"].float(), 8, 1)
    down, down_scales, other = quantized(operands["down"].float(), 8, 1)
    given = {**in_type(operands, torch.bfloat16), "gate_up": gate_up, "down": down}
    found = gossamer.routed_mlp(experts=experts, **given, gate_up_scales=gate_up_scales, down_scales=down_scales)
    expected = {**in_type(in_type(operands, torch.bfloat16), DOUBLE), "gate_up": floats.double(), "down": other.double()}
    close(found, by_tokens(experts=experts, **expected), torch.bfloat16)


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


@pytest.mark.parametrize("integers", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integers_name_experts(integers: torch.dtype) -> None:
    operands, experts = in_type(layer(6), torch.float32), routing(6)
    assert torch.equal(
        gossamer.routed_mlp(experts=experts.to(integers), **operands), gossamer.routed_mlp(experts=experts, **operands)
    )
    x, weight = operands["x"], operands["down"].mT.contiguous()
    assert torch.equal(gossamer.routed_linear(x, experts.to(integers), weight), gossamer.routed_linear(x, experts, weight))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_gives_what_it_gives_for_linear_layers(dtype: torch.dtype, compiled: bool) -> None:
    operands, experts = in_type(layer(9), torch.float32), routing(9)
    leaves = {name: operands[name].requires_grad_() for name in ("x", "gate_up", "down")}
    call = torch.compile(gossamer.routed_mlp, backend="aot_eager", fullgraph=True) if compiled else gossamer.routed_mlp
    with torch.autocast("cpu", dtype=dtype):
        found, expected = call(experts=experts, **operands), by_tokens(experts=experts, **operands)
        product = gossamer.routed_linear(operands["x"], experts, operands["gate_up"])
        assert found.dtype == product.dtype == dtype
        close(product, linear_by_tokens(operands["x"], experts, operands["gate_up"]).double(), dtype)
    close(found, expected.double(), dtype)
    own = torch.autograd.grad(found.float().sum(), leaves.values())
    for each, wanted in zip(own, torch.autograd.grad(expected.sum(), leaves.values()), strict=True):
        assert each.dtype == torch.float32
        close(each.to(dtype), wanted.double(), dtype)
    with torch.autocast("cpu", dtype=dtype):
        doubles = in_type(operands, DOUBLE)
        assert gossamer.routed_mlp(experts=experts, **doubles).dtype == DOUBLE
