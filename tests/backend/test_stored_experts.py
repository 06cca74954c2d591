"""Compiled experts that store their nonzeros alone: regions in inference, an operation on the stored values in training."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

import gossamer
from tests.backend.harness import compile_and_run

SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2}
TOP = 2


class Model(nn.Module):
    """A router and its experts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(48, 4)
        self.experts = MixtralExperts(MixtralConfig(**SIZES, experts_implementation="eager"))
        for weight in (self.experts.gate_up_proj, self.experts.down_proj):
            nn.init.normal_(weight, 0, 0.3)
            weight.data[torch.rand_like(weight) > 0.2] = 0
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = (x.double() @ self.router.weight.double().t()).softmax(1).topk(TOP)  # the same for all types
        found: torch.Tensor = self.experts(x, chosen, scores.to(x.dtype))
        return found


def pair_of(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model with stored experts, and one with the same as plain weights in float64."""
    plain = Model(dtype)
    return gossamer.store_sparse(copy.deepcopy(plain), only="experts"), plain.double()


def names_of(run: Any) -> list[str]:
    return [each.name for each in run.decisions if each.op == "experts" and each.sparse]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_inference_runs_a_region_for_each_expert(dtype: torch.dtype, error: float, dynamic: bool | None) -> None:
    stored, plain = pair_of(dtype)
    x = torch.randn(64, 48).to(dtype)
    run = compile_and_run(stored, x, dynamic=dynamic)
    assert names_of(run) == ["experts.gate_up_proj", "experts.down_proj"]
    (first, _) = (each for each in run.decisions if each.op == "experts")
    assert first.shape == (4, 80, 48) and first.density == pytest.approx(0.2, abs=0.02)
    assert "a region for each of 4, and a chain of its products, one operation for the layer" in first.reason
    with torch.no_grad():
        for tokens in (64, 1, 7, 200, 0):
            x = torch.randn(tokens, 48).to(dtype)
            wanted = plain(x.double())
            found = run.function(x)
            assert found.dtype == dtype and found.shape == wanted.shape
            torch.testing.assert_close(found.double(), wanted, rtol=error, atol=error)


def test_changed_values_are_packed_again() -> None:
    stored, plain = pair_of()
    x = torch.randn(64, 48)
    run = compile_and_run(stored, x)
    with torch.no_grad():
        for model in (stored, plain):
            model.experts.down_proj.mul_(-2)
        torch.testing.assert_close(run.function(x).double(), plain(x.double()), rtol=1e-5, atol=1e-5)


def test_products_that_gain_nothing_stay_on_the_stored_values() -> None:
    stored, plain = pair_of()
    x = torch.randn(64, 48)
    run = compile_and_run(stored, x, min_gain=1e9, regions=0)
    reasons = [each.reason for each in run.decisions if each.op == "experts"]
    assert len(reasons) == 2 and all("for a gain of" in reason for reason in reasons)
    torch.testing.assert_close(run.output.double(), plain(x.double()), rtol=1e-5, atol=1e-5)


def test_biases_and_transposed_weights_run_as_products() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    torch.manual_seed(0)
    plain = GptOssExperts(GptOssConfig(**SIZES, experts_implementation="eager")).eval()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, 0, 0.3)
        if parameter.dim() == 3:
            parameter.data[torch.rand_like(parameter) > 0.2] = 0
    stored = gossamer.store_sparse(nn.ModuleDict({"experts": copy.deepcopy(plain)}))["experts"]
    chosen, scores = torch.randint(0, 4, (64, TOP)), torch.rand(64, TOP)
    x = torch.randn(64, 48)
    run = compile_and_run(stored, x, chosen, scores)
    assert names_of(run) == ["gate_up_proj", "down_proj"]
    with torch.no_grad():
        torch.testing.assert_close(run.output, plain(x, chosen, scores), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_has_the_gradients_of_stored_values(dynamic: bool | None) -> None:
    stored, plain = pair_of()
    compiled = torch.compile(
        stored, backend="sparse", fullgraph=True, dynamic=dynamic, options={"dense": "eager", "strict": True, "min_gain": 0}
    )
    for tokens in (64, 33):
        x = torch.randn(tokens, 48)
        for call, model, given in ((compiled, stored, x), (plain, plain, x.double())):
            model.zero_grad()
            (call(given) ** 2).sum().backward()
        for name in ("gate_up_proj", "down_proj"):
            wanted = getattr(plain.experts, name)
            found = getattr(stored.experts, name).grad.to_dense().double()
            torch.testing.assert_close(found, wanted.grad * (wanted != 0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stored.router.weight.grad.double(), plain.router.weight.grad, rtol=1e-4, atol=1e-4)
