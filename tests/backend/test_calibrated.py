"""Layers with calibrated inputs through the backend, alone and in chains: bit for bit integers, where floats are exact."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.runtime.target import host
from tests.backend.harness import compile_and_run, prune_
from tests.backend.test_quantized import SCHEDULES
from tests.fuzz.references import by_integers

in_chains = pytest.mark.skipif("bytedots" not in host().instructions, reason="chains need dot products of bytes")


def calibrated(*layers: nn.Module, dtype: torch.dtype = torch.float32, shift: float = 0.5, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model: Any = prune_(nn.Sequential(*layers)).eval().to(dtype)
    first = next(layer for layer in layers if isinstance(layer, nn.Linear))
    return gossamer.quantize(model, [(torch.randn(50, first.in_features) + shift).to(dtype)], **kwargs)


def exact_(model: nn.Module) -> nn.Module:
    """Scales that are powers of two, biases on their grid: floats that come of small integers are exact then."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.input_scale.copy_(2.0 ** layer.input_scale.log2().round())
            layer.weight_scale.copy_(2.0 ** layer.weight_scale.log2().round())
            layer.bias.copy_((layer.bias * 256).round() / 256)
    return model


@torch.no_grad()
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("inputs", "outputs"), [(70, 33), (64, 64), (3, 1)])
def test_a_layer_is_exact_for_every_number_of_tokens(inputs: int, outputs: int, schedule: str) -> None:
    model = exact_(calibrated(nn.Linear(inputs, outputs), only="0"))
    run = compile_and_run(model, torch.randn(9, inputs), dynamic=True, regions=1, schedule=schedule)
    for sizes in ((9,), (), (1,), (2, 3), (0,), (66,), (131,)):
        x = torch.randn(*sizes, inputs) * 2
        assert torch.equal(run.function(x).double(), by_integers(x, model[0])), sizes


@in_chains
@torch.no_grad()
def test_a_chain_is_exact_for_every_number_of_tokens() -> None:
    model = exact_(calibrated(nn.Linear(64, 1200), nn.ReLU(), nn.Linear(1200, 40), nn.Linear(40, 33)))
    x = torch.randn(2, 9, 64)
    torch._dynamo.mark_dynamic(x, 1)
    run = compile_and_run(model, x, regions=3)
    assert [d.reason for d in run.regions] == ["in a chain of 3"] * 3
    assert float(model[2].input_zero_point) == -128  # of what a ReLU gives
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (9, 65, 2, 130):
            x = torch.randn(2, tokens, 64) * 2
            y = by_integers(by_integers(by_integers(x, model[0]).relu(), model[2]), model[3])
            assert torch.equal(run.function(x).double(), y)
    assert torch.equal(run.function(x[:, :1]), model(x[:, :1]))
    assert run.function(x[:, :0]).shape == (2, 0, 33)


@in_chains
@torch.no_grad()
def test_a_token_that_is_not_finite_gives_nan_in_a_chain_and_what_is_huge_is_clipped() -> None:
    model = calibrated(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 40), nn.LayerNorm(40), nn.Linear(40, 24))
    x = torch.randn(2, 9, 64)
    run = compile_and_run(model, x, regions=3)
    assert [d.reason for d in run.regions] == ["in a chain of 3"] * 3
    x[1, 3, 5], x[0, 2, 7], x[0, 4, 1], x[0, 5, 1] = torch.nan, -torch.inf, 3e38, -3e38
    y = run.function(x)
    assert y.isnan().any(2).nonzero().tolist() == [[0, 2], [1, 3]]
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=5e-3, equal_nan=True)  # some bytes behind GELU are others


@in_chains
@torch.no_grad()
def test_grids_may_change() -> None:
    model = calibrated(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 40))
    other, x = calibrated(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 40), shift=-3), torch.randn(20, 64)
    run = compile_and_run(model, x, regions=2)
    with torch.compiler.set_stance("fail_on_recompile"):
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(run.function(x), other(x), rtol=1e-4, atol=5e-3)


class Heads(nn.Module):
    """Attention, whose three layers of one input have one grid."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, 4, 16).transpose(1, 2) for p in self.project)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(b, s, 64))


@in_chains
@torch.no_grad()
def test_layers_of_one_input_quantize_it_once(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = gossamer.quantize(prune_(Heads()).eval(), [torch.randn(3, 20, 64)])
    x = torch.randn(2, 33, 64)
    run = compile_and_run(copy.deepcopy(model), x, regions=4, dump_ir=str(tmp_path))
    assert [d.reason for d in run.regions] == ["in a chain of 4"] * 4
    (kernel,) = tmp_path.glob("*_schedule.mlir")
    assert kernel.read_text().count("arith.fptosi") == 2  # what the three and what `out` multiply
    torch.testing.assert_close(run.output, model(x), rtol=0, atol=6e-2)  # attention multiplies pairs of bf16


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_of_other_types(dtype: torch.dtype) -> None:
    model = calibrated(nn.Linear(40, 24), dtype=dtype, only="0")
    x = torch.randn(7, 40).to(dtype)
    run = compile_and_run(model, x, regions=1)
    assert run.output.dtype == dtype
    torch.testing.assert_close(run.output, model(x))
    torch.testing.assert_close(run.output, by_integers(x, model[0]).to(dtype), rtol=1e-2, atol=1e-3)


@in_chains
@torch.no_grad()
def test_chains_of_bf16() -> None:
    model = calibrated(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40), dtype=torch.bfloat16)
    x = torch.randn(20, 64).bfloat16()
    run = compile_and_run(model, x, regions=2)
    assert [d.reason for d in run.regions] == ["in a chain of 2"] * 2
    torch.testing.assert_close(run.output, model(x), rtol=3e-2, atol=3e-2)


def test_training_goes_straight_through() -> None:
    model = calibrated(nn.Linear(70, 90), nn.GELU(), nn.Linear(90, 40)).train()
    reference = copy.deepcopy(model)
    x = torch.randn(11, 70, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    run = compile_and_run(model, x, grad=True)
    run.output.square().sum().backward()
    reference(other).square().sum().backward()
    torch.testing.assert_close(run.output, reference(other), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-3, atol=1e-4)
    assert {d.name for d in run.regions} >= {"0.weight_int8", "2.weight_int8"}
