"""Layers of int8 on processors that multiply floats faster than bytes: the same layers as kernels of float32."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.weights import bytes_as_floats
from tests.backend.harness import Run, compile_and_run, prune_
from tests.backend.test_quantized import Sums, bytes_of

BYTES = ("quads", "lookup8", "amxexpand", "amxquads")


@pytest.fixture(params=["floats", "bytes"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is predicted to be faster."""

    def us(products: list[Any]) -> float:
        return float(products[0].quantized == (request.param == "floats"))

    monkeypatch.setattr(bytes_as_floats, "_us", us)
    return str(request.param)


def run_of(model: nn.Module, x: Tensor, regions: int, **how: Any) -> Run:
    return compile_and_run(model, x, regions=regions, min_gain=1e-9, **how)


def multiplies(run: Run) -> set[str]:
    return {"bytes" if d.schedule in BYTES else "floats" for d in run.regions}


def quantized(*widths: int, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for k, m in pairwise(widths) for each in (nn.Linear(k, m), nn.GELU())]
    return gossamer.quantize(prune_(nn.Sequential(*layers)).eval(), **how)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers(faster: str, dtype: torch.dtype) -> None:
    """Any number of tokens, NaN, infinities, zeros and changed weights."""
    model, x = quantized(96, 160, 64).to(dtype), torch.randn(2, 9, 96, dtype=dtype)
    torch._dynamo.mark_dynamic(x, 1)
    run = run_of(model, x, 2)
    assert multiplies(run) == {faster}
    tolerance = 5e-3 if dtype is torch.float32 else 5e-2  # GELU is approximate before bytes
    for tokens in (9, 0, 1, 65):
        x = torch.randn(2, tokens, 96, dtype=dtype)
        x[:, 1:2] = 0
        torch.testing.assert_close(run.function(x), model(x), rtol=tolerance, atol=tolerance)
    x[0, 2, 7], x[1, 3, 5] = torch.inf, torch.nan
    model[0].weight_int8.copy_(model[0].weight_int8.roll(1, 1))
    torch.testing.assert_close(run.function(x), model(x), rtol=tolerance, atol=tolerance, equal_nan=True)


@torch.no_grad()
def test_calibrated_inputs(faster: str) -> None:
    """One step for all tokens, and a zero point. Values beyond the range are clipped."""
    x = torch.randn(12, 96) + 1
    model = quantized(96, 160, data=[x])
    run = run_of(model, x, 1)
    assert multiplies(run) == {faster}
    for given in (x, 3 * x):
        torch.testing.assert_close(run.function(given), model(given), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("training", [False, True])
def test_gradients(faster: str, training: bool) -> None:
    model, x = quantized(96, 160).train(training), torch.randn(12, 96, requires_grad=True)
    run = run_of(copy.deepcopy(model), x, 2 if training else 1, grad=True)
    assert multiplies(run) >= {faster}
    (found,) = torch.autograd.grad(run.output.square().sum(), x)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_sums_that_are_read_in_another_type_are_those_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 lacks integers that float64 has."""
    monkeypatch.setattr(bytes_as_floats, "_us", lambda products: float(products[0].quantized))
    model, x = Sums(bytes_of(40, 70, density=0.3)), bytes_of(20, 70)
    run = run_of(model, x, 1)
    assert multiplies(run) == {"bytes"} and torch.equal(run.output, model(x))


class Truncated(nn.Module):
    """A layer that cuts fractions off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(bytes_of(40, 70, density=0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x.to(torch.int8), self.weight.t()).float()


@torch.no_grad()
def test_floats_that_are_not_rounded_become_integers(faster: str) -> None:
    model, x = Truncated(), 50 * torch.randn(20, 70)
    run = run_of(model, x.clamp(-120, 120), 1)
    assert multiplies(run) == {faster}
    assert torch.equal(run.output, model(x.clamp(-120, 120)))
