"""Layers in groups through the backend: sums are those of the dequantized weight, in every state that a model can be in."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from tests.backend.harness import compile_and_run, prune_

LARGE, SMALL = (256, 192), (70, 33)


def model_of(bits: int = 4, sizes: tuple[int, int] = LARGE, density: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    inputs, hidden = sizes
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, inputs, bias=False)).eval()
    prune_(model, density, (1, 16))
    return gossamer.quantize(model, weights=f"int{bits}", group=16, only=nn.Linear)  # type: ignore[arg-type]


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """In float64, of the floats that the integers stand for."""
    y = x.double()
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, GroupedLinear):
            y = y @ layer.weight.double().t() + (0 if layer.bias is None else layer.bias.double())
        else:
            y = layer(y)
    return y


def check(model: nn.Module, compiled: Any, x: Tensor, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        y = compiled(x)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), exact(model, x).detach(), rtol=tolerance, atol=tolerance)


SCHEDULES = ("groups", "reference", "auto")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", [LARGE, SMALL, (1, 1), (17, 2)], ids=str)
def test_tokens(sizes: tuple[int, int], bits: int, schedule: str) -> None:
    """Every number of tokens with each of the sizes, bits and schedules, though not with all three of them."""
    model = model_of(bits, sizes)
    for tokens in ((1, 9), (2, 5))[(SCHEDULES.index(schedule) + bits // 4) % 2]:
        x = torch.randn(tokens, sizes[0])
        run = compile_and_run(model, x, regions=2, schedule=schedule)
        check(model, run.function, x)
        if schedule == "groups":
            assert {d.schedule for d in run.regions} == {"groups"}
            assert all(d.format == f"groups(reduction=1, bits={bits}, places=8, scale=16)" for d in run.regions)
            assert run.regions[0].packed_bytes < 0.25 * run.regions[0].dense_bytes or sizes != LARGE
        torch._dynamo.reset()


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_sizes_that_change(dynamic: bool, dense: str) -> None:
    model = model_of()
    run = compile_and_run(model, torch.randn(3, 256), dynamic=dynamic, dense=dense, regions=2)
    for tokens in (3, 1, 8, 20, 0):
        check(model, run.function, torch.randn(tokens, 256))


def test_unbacked_sizes() -> None:
    model = model_of()

    def some(x: Tensor, chosen: Tensor) -> Tensor:
        return model(x[chosen.nonzero().flatten()])

    x, chosen = torch.randn(10, 256), torch.arange(10) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compile_and_run(some, x, chosen, regions=2)
        for mask in (chosen, ~chosen, torch.ones(10, dtype=torch.bool), torch.zeros(10, dtype=torch.bool)):
            with torch.no_grad():
                y = run.function(x, mask)
            torch.testing.assert_close(y.double(), exact(model, x[mask]).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_of_inputs(dtype: torch.dtype, dense: str) -> None:
    model, x = model_of(), torch.randn(2, 256).to(dtype)
    run = compile_and_run(model, x, schedule="groups", dense=dense, regions=2)
    assert {d.schedule for d in run.regions} == {"groups"}
    check(model, run.function, x, {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-5}[dtype])


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_rows_without_groups_and_full_ones(density: float) -> None:
    model, x = model_of(density=density), torch.randn(2, 256)
    run = compile_and_run(model, x, schedule="groups", regions=2)
    check(model, run.function, x)


def test_gradients() -> None:
    model, x = model_of().train(), torch.randn(4, 256, requires_grad=True)
    other, wide = copy.deepcopy(model), x.detach().clone().requires_grad_()
    run = compile_and_run(model, x, grad=True)
    run.output.square().sum().backward()
    other(wide).square().sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model[0].bias.grad, other[0].bias.grad, rtol=1e-4, atol=1e-4)


def test_other_integers_and_other_groups_are_noticed() -> None:
    model, x = model_of(), torch.randn(1, 256)
    run = compile_and_run(model, x, schedule="groups", regions=2)
    with torch.no_grad():
        model[0].weight_scale.mul_(2)
    check(model, run.function, x)
    torch.manual_seed(1)
    prune_(fresh := nn.Sequential(nn.Linear(256, 192), nn.SiLU(), nn.Linear(192, 256, bias=False)), 0.4, (1, 16))
    gossamer.quantize(fresh, weights="int4", only=nn.Linear)
    model.load_state_dict(fresh.state_dict())
    check(model, run.function, x)


@torch.no_grad()
def test_nan_and_infinity_reach_what_uses_them() -> None:
    model, x = model_of(sizes=SMALL)[:1], torch.randn(6, 70)
    x[1, 3], x[2, 69], x[4, 40] = torch.nan, torch.inf, -torch.inf
    y = compile_and_run(model, x, schedule="groups", regions=1).output
    weight, kept = model[0].weight, torch.zeros(33, 80, dtype=torch.bool)
    kept[:, :70] = weight != 0
    groups = kept.view(33, 5, 16).any(2)
    for token, column in ((1, 3), (2, 69), (4, 40)):
        used = groups[:, column // 16]
        assert not used.all()
        assert used.any()
        assert not y[token, used].isfinite().any()
        expected = (x[token].nan_to_num(0, 0, 0).double() @ weight.double().t() + model[0].bias)[~used]
        torch.testing.assert_close(y[token, ~used].double(), expected, rtol=1e-5, atol=1e-5)
    # As in dense products, 0 times infinity is NaN within a group; else it is an infinity of the right sign.
    stays = (weight[:, 69] != 0) & groups[:, 4]
    assert torch.equal(y[2, stays], torch.inf * weight[stays, 69].sign())


def test_many_tokens_have_another_schedule() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024)
    prune_(layer, 0.5, (1, 16))
    model = gossamer.quantize(nn.Sequential(layer), weights="int4")
    for tokens, few in ((1, True), (256, False)):
        run = compile_and_run(model, torch.randn(tokens, 1024), min_gain=1.1)
        assert (run.regions[0].schedule == "groups") == few
        check(model, run.function, torch.randn(tokens, 1024))
        torch._dynamo.reset()
