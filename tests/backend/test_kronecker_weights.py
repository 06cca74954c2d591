"""Weights that are exactly Kronecker products are multiplied by their factors for as long as they are."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gossamer.backend.report.report import Decision, collect
from gossamer.backend.structures.kronecker_weights import _left, _rest, _right, _split

OPTIONS = {"strict": True, "dense": "eager"}


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Its first weight, [320, 288], is kron of 16x24 and 20x12."""
    made = nn.Sequential(nn.Linear(288, 320, dtype=dtype), nn.ReLU(), nn.Linear(320, 64, dtype=dtype))
    with torch.no_grad():
        made[0].weight.copy_(torch.kron(torch.randn(16, 24, dtype=dtype), torch.randn(20, 12, dtype=dtype)))
    return made


def found_in(decisions: list[Decision]) -> list[str]:
    return [each.reason for each in decisions if each.format == "factors" and each.reason.startswith("its weight is")]


def close(y: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


FOUND = ["its weight is kron of 16x24 and 20x12"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(200, 288), (4, 50, 288)])
def test_a_weight_that_is_a_product_takes_its_factors(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    made, x = model(dtype), torch.randn(sizes, dtype=dtype)
    with torch.no_grad(), collect() as found:
        y = torch.compile(made, backend="sparse", fullgraph=True, options=OPTIONS)(x)
        close(y, made(x))
    assert found_in(found.decisions) == FOUND
    assert any(each.reason == "x times kron of 24x16 and 12x20" for each in found.decisions)


def test_factors_are_exact_up_to_rounding() -> None:
    a, b = torch.randn(6, 10), torch.randn(4, 5)
    weight = torch.kron(a, b)
    assert _split(weight) == (4, 5)
    made = torch.kron(_left(weight, 4, 5), _right(weight, 4, 5))
    assert float(((made - weight) / weight).abs().max()) < 1e-6
    assert not _rest(weight, 4, 5).any()


@pytest.mark.parametrize("error", [1e-5, float("nan"), float("inf")])
def test_nearly_is_not_enough(error: float) -> None:
    weight = torch.kron(torch.randn(6, 10), torch.randn(4, 5))
    weight[7, 11] *= 1 + error
    assert _split(weight) is None


def test_dense_weights_and_zeros_have_no_factors() -> None:
    assert _split(torch.randn(24, 50)) is None and _split(torch.zeros(24, 50)) is None and _split(torch.randn(7, 1)) is None


def test_other_values_are_factored_anew_and_other_matrices_run_whole() -> None:
    made, x = model(), torch.randn(200, 288)
    compiled = torch.compile(made, backend="sparse", fullgraph=True, options=OPTIONS)
    weight = made[0].weight
    with torch.no_grad():
        close(compiled(x), made(x))
        weight.mul_(2)
        close(compiled(x), made(x))
        weight[3, 4] = 7
        close(compiled(x), made(x))
        weight.copy_(torch.kron(torch.randn(16, 24), torch.randn(20, 12)))
        close(compiled(x), made(x))
        made.load_state_dict(model().state_dict())
        close(compiled(x), made(x))
        other = copy.deepcopy(made)
        other[0].weight.neg_()
        close(torch.compile(other, backend="sparse", options=OPTIONS)(x), other(x))


def test_an_open_number_of_tokens() -> None:
    made = model()
    compiled = torch.compile(made, backend="sparse", fullgraph=True, dynamic=True, options=OPTIONS)
    with torch.no_grad(), collect() as found:
        for tokens in (200, 33, 1):
            x = torch.randn(tokens, 288)
            close(compiled(x), made(x))
    assert found_in(found.decisions)[:1] == FOUND


def test_frozen_weights_let_gradients_through() -> None:
    made, x = model().requires_grad_(False), torch.randn(200, 288, requires_grad=True)
    with collect() as found:
        y = torch.compile(made, backend="sparse", fullgraph=True, options=OPTIONS)(x)
        (got,) = torch.autograd.grad(y.square().sum(), x)
    assert found_in(found.decisions) == FOUND
    (expected,) = torch.autograd.grad(made(x).square().sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=float(1e-5 * expected.abs().max()))


def test_weights_that_train_stay_whole() -> None:
    made, x = model(), torch.randn(200, 288)
    with collect() as found:
        torch.compile(made, backend="sparse", fullgraph=True, options=OPTIONS)(x).sum().backward()
    assert not found_in(found.decisions) and made[0].weight.grad is not None


def test_rows_of_zeros_behind_it_are_still_left_out() -> None:
    made, x = model(), torch.randn(200, 288)
    with torch.no_grad(), collect() as found:
        made[2].weight[:, ::2] = 0
        y = torch.compile(made, backend="sparse", fullgraph=True, options=OPTIONS)(x)
        close(y, made(x))
    assert found_in(found.decisions) == FOUND


def test_the_option_disable_keeps_weights_whole() -> None:
    made, x = model(), torch.randn(200, 288)
    with torch.no_grad(), collect() as found:
        y = torch.compile(made, backend="sparse", options=OPTIONS | {"disable": ["structured-weights"]})(x)
        close(y, made(x))
    assert not found_in(found.decisions)


def test_a_weight_that_the_graph_writes_to_through_a_view_stays_whole() -> None:
    made, x = model().requires_grad_(False), torch.randn(200, 288)

    def function(x: Tensor) -> Tensor:
        made[0].weight[:, :5].mul_(1.5)
        return made(x)

    other = copy.deepcopy(made)
    with torch.no_grad(), collect() as found:
        compiled = torch.compile(function, backend="sparse", fullgraph=True, options=OPTIONS)
        for _ in range(2):
            y = compiled(x)
            other[0].weight[:, :5].mul_(1.5)
            torch.testing.assert_close(y, other(x), rtol=1e-4, atol=1e-2)
    assert not found_in(found.decisions)
