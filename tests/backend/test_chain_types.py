"""Types of values in chains: bools, float64 beside float32, and results that come in pairs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.harness import assert_same, compile_and_run, pruned

torch.manual_seed(0)
UP, DOWN, BESIDE, BIAS, ONE = pruned(48, 32), pruned(32, 48), pruned(32, 48), torch.randn(48), pruned(1, 48)


def in_chains(run) -> int:  # type: ignore[no-untyped-def]
    return sum("in a chain" in d.reason for d in run.regions)


def layers(x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, UP)), DOWN)


@pytest.mark.parametrize("tokens", [4, 40])
def test_a_comparison_stands_behind_a_chain(tokens: int) -> None:
    def labels(x: Tensor) -> Tensor:
        return torch.sigmoid(layers(x)) > 0.5

    x = torch.randn(tokens, 32)
    run = compile_and_run(labels, x, regions=2)
    assert in_chains(run) == 2
    assert torch.equal(run.output, labels(x))


def split(x: Tensor) -> Tensor:
    h = F.linear(x, UP, BIAS)
    seen = h > 0
    return F.linear(torch.where(seen, h, 0.0), DOWN) + F.linear(torch.where(seen, 0.0, -2 * h), BESIDE)


def normed_in_double(x: Tensor) -> Tensor:
    h = F.linear(x, UP).double()
    return F.linear((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-12)).float(), DOWN)


def double_head(x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, UP)).double(), DOWN.double())


@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize("function", [split, normed_in_double, double_head])
def test_bools_and_two_types_between_layers_are_no_values_of_a_chain(function: Callable[[Tensor], Tensor], tokens: int) -> None:
    x = torch.randn(tokens, 32)
    run = compile_and_run(function, x, regions=3 if function is split else 2)
    torch.testing.assert_close(run.output, function(x), rtol=1e-4, atol=1e-4)


def reversible(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    deviation = torch.sqrt(var + 1e-5)
    return layers((x - mean) / deviation) * deviation + mean, mean


@pytest.mark.parametrize("tokens", [4, 40])
def test_mean_and_variance_are_read_before_and_behind_layers(tokens: int) -> None:
    x = torch.randn(tokens, 32)
    run = compile_and_run(reversible, x, regions=2)
    assert in_chains(run) == 2
    for found, expected in zip(run.output, reversible(x), strict=True):
        assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:var_mean")
def test_the_variance_of_one_feature_is_no_number() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.linear(F.gelu(F.linear(x, UP)), ONE)
        var, mean = torch.var_mean(y, -1, keepdim=True)
        return y - mean + var

    x = torch.randn(40, 32)
    run = compile_and_run(function, x, regions=2)
    torch.testing.assert_close(run.output, function(x), equal_nan=True)


def test_one_token_reads_a_number_as_a_number_and_as_a_matrix() -> None:
    def weighed(x: Tensor, given: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x, UP)) * given, ONE) * given

    x, given = torch.randn(1, 32), torch.rand(1, 1) + 0.5
    run = compile_and_run(weighed, x, given, dynamic=False, regions=2)
    assert_same(run.output, weighed(x, given))


def padded(x: Tensor, padding: Tensor) -> Tensor:
    return layers(torch.where(padding[..., None], 0.0, x)) + x


def counted(x: Tensor, padding: Tensor) -> Tensor:
    return layers(x * padding.long()[..., None]) + x


@pytest.mark.parametrize("function", [padded, counted])
def test_masks_from_outside_stand_before_a_chain(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, padding = torch.randn(3, 40, 32), torch.rand(3, 40) < 0.3
    run = compile_and_run(function, x, padding, regions=2)
    assert in_chains(run) == 2
    assert_same(run.output, function(x, padding))
