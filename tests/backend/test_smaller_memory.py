"""Layers with rows of zeros, around writes in place, values that share memory, and modes such as torch.no_grad()."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import assert_same
from tests.backend.smaller import Pair, empty_, run, small_layers_pay, smaller

__all__ = ["small_layers_pay"]


def remainder_(y: Tensor) -> None:
    y %= 1.0


@pytest.mark.parametrize(
    "write",
    [remainder_, lambda y: y[:, 24:].mul_(2), lambda y: y.t()[3].zero_(), nn.RReLU(inplace=True).eval()],
    ids=["an operator", "a slice", "a view of a view", "by position"],
)
def test_a_write_to_memory_that_is_read_later_is_seen(write: Callable[[Tensor], object]) -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    empty_(pair.second.weight)

    def function(x: Tensor) -> Tensor:
        y = pair.first(x)
        write(y)
        return pair.second(y)

    made = run(function, x)
    assert smaller(made) == {"pair.second.weight": "12x32"}
    assert_same(made.output, function(x).detach())


def test_layers_read_features_as_they_are_after_each_update_in_place() -> None:
    layers, x = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), torch.randn(7, 16)
    for layer in layers:
        with torch.no_grad():
            layer.weight[:, :8] = 0

    def function(x: Tensor) -> Tensor:
        y = x.clone()
        for layer in layers:
            y.add_(layer(y))
        return y

    made = run(function, x)
    assert len(smaller(made)) == 3
    assert_same(made.output, function(x).detach())


def test_constants_that_something_is_added_to_in_place_are_none() -> None:
    first, second, x = nn.Linear(16, 16), nn.Linear(16, 24), torch.randn(7, 16)
    with torch.no_grad():
        first.weight[:8] = 0
        second.weight[:12, 8:], second.weight[:, :2] = 0, 0

    def function(x: Tensor) -> Tensor:
        y = first(x)
        y.add_(x)
        return second(y)

    made = run(function, x)
    assert smaller(made) == {"second.weight": "24x14"}
    assert_same(made.output, function(x).detach())


def test_results_that_are_views_of_one_value_share_memory() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    empty_(layer.weight)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, y.view(-1, 4, 8)

    made = run(function, x)
    assert smaller(made) == {"layer.weight": "16x16"}
    y, heads = made.output
    assert_same(y, layer(x).detach())
    heads.fill_(7)
    assert bool((y == 7).all())


def test_parts_of_a_split_that_are_returned_lose_channels_each() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    empty_(layer.weight)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        a, b = layer(x).chunk(2, -1)
        return a, b, torch.tanh(a) @ b.t()

    made = run(function, x)
    assert smaller(made) == {"layer.weight": "16x16"}
    for found, expected in zip(made.output, function(x), strict=True):
        assert_same(found, expected.detach())


def test_a_statistic_without_gradients_takes_none_from_later_readers() -> None:
    layer, norm, x = nn.Linear(16, 32), nn.LayerNorm(32), torch.randn(7, 16, requires_grad=True)
    empty_(layer.weight)
    layer.requires_grad_(False)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        with torch.no_grad():
            largest = y.amax(-1)
        return norm(y), largest

    made = run(function, x, grad=True)
    assert smaller(made) == {"layer.weight": "16x16"} and not made.output[1].requires_grad
    found, expected = (torch.autograd.grad(each[0].square().sum(), x)[0] for each in (made.output, function(x)))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_norm_without_gradients_is_a_constant_of_the_weight() -> None:
    layer, mask, x = nn.Linear(16, 32), (torch.arange(32) % 2).float()[:, None], torch.randn(7, 16)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = torch.linalg.vector_norm(layer.weight, dim=1, keepdim=True)
        return F.linear(x, layer.weight / norm * mask, layer.bias)

    made = run(function, x, grad=True)
    assert smaller(made) == {"layer.weight": "16x16"}
    found, expected = (torch.autograd.grad(each.square().sum(), layer.weight)[0] for each in (made.output, function(x)))
    assert_same(found, expected)


def stopped(pair: Pair, x: Tensor, weight: Tensor) -> Tensor:
    return pair.second(torch.relu(F.linear(x, weight, pair.first.bias)).detach())


def frozen(pair: Pair, x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        features = torch.relu(F.linear(x, weight, pair.first.bias))
    return pair.second(features)


def straight_through(pair: Pair, x: Tensor, weight: Tensor) -> Tensor:
    features = F.linear(x, weight, pair.first.bias)
    return pair.second(features + (features.clamp(-0.1, 0.1) - features).detach())


def returned(pair: Pair, x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        features = F.linear(x, weight, pair.first.bias)
    return F.linear(features, pair.second.weight) + features.sum()


@pytest.mark.parametrize("model", [stopped, frozen, straight_through, returned])
def test_constants_of_rows_without_gradients_have_none(model: Callable[[Pair, Tensor, Tensor], Tensor]) -> None:
    pair, mask, x = Pair(), (torch.arange(32) % 2).float()[:, None], torch.randn(7, 16)

    def function(x: Tensor) -> Tensor:
        return model(pair, x, pair.first.weight * mask)

    made = run(function, x, grad=True)
    assert smaller(made)["pair.first.weight"] == "16x16"
    assert_same(made.output.detach(), function(x).detach())
    trained = list(pair.parameters())
    results = [torch.autograd.grad(each.square().sum(), trained, allow_unused=True) for each in (made.output, function(x))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(0 * x.sum() if found is None else found, 0 * x.sum() if expected is None else expected)


def test_gradients_that_the_model_enables_itself_are_recorded() -> None:
    pair, x = Pair().requires_grad_(False), torch.randn(7, 16, requires_grad=True)
    empty_(pair.first.weight)

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return pair(x)

    made = run(function, x, regions=0)
    found, expected = (torch.autograd.grad(each.square().sum(), x)[0] for each in (made.output, function(x)))
    assert_same(found, expected)


def test_a_weight_that_is_drawn_is_drawn_at_every_call() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.first.weight)
    empty_(pair.second.weight, axis=1)

    def function(x: Tensor) -> Tensor:
        return pair.second(F.linear(x, pair.first.weight * torch.rand_like(pair.first.weight)))

    torch.manual_seed(3)
    made = run(function, x)
    assert smaller(made) == {"pair.second.weight": "24x16"}
    for _ in range(2):
        torch.manual_seed(3)
        found = made.function(x), made.function(x)
        torch.manual_seed(3)
        for each in found:
            assert_same(each, function(x).detach())


def test_heads_under_vmap_read_whole_features() -> None:
    pair, heads, x = Pair(), nn.Parameter(torch.randn(4, 5, 24)), torch.randn(7, 16)
    empty_(pair.first.weight)
    empty_(pair.second.weight)

    def function(x: Tensor) -> Tensor:
        y = pair(x)
        return torch.vmap(lambda head: F.linear(y, head) + F.linear(pair(x), head))(heads)

    made = run(function, x)
    assert smaller(made) == {"pair.first.weight": "16x16", "pair.second.weight": "12x16"}
    assert_same(made.output, function(x).detach())


def test_a_scale_computed_under_autocast_keeps_its_type() -> None:
    layer, film, style = nn.Linear(16, 32, bias=False), nn.Linear(8, 32), nn.Parameter(torch.randn(1, 8))
    empty_(layer.weight)

    def function(x: Tensor) -> Tensor:
        return layer(x) * film(style)

    x = torch.randn(7, 16)
    with torch.autocast("cpu", torch.bfloat16):
        made, expected = run(function, x), function(x).detach()
    assert smaller(made) == {"layer.weight": "16x16", "film.weight": "16x8"} and made.output.dtype is torch.bfloat16
    assert_same(made.output, expected)


def test_a_convolution_of_repeated_channels_gives_contiguous_results() -> None:
    layer, x = nn.Conv2d(16, 24, 3), torch.randn(2, 1, 6, 5)
    empty_(layer.weight, axis=1)
    made = run(lambda x: layer(x.expand(-1, 16, -1, -1)), x)
    expected = layer(x.expand(-1, 16, -1, -1)).detach()
    assert smaller(made)
    assert_same(made.output, expected)
    assert made.output.stride() == expected.stride()
