"""Adapters beside layers of int8 and 4-bit weights, not merged: one kernel, which trains the factors alone."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.report.report import Decision, collect
from gossamer.runtime.target import host

OPTIONS = {"strict": True, "dense": "eager", "min_gain": 0.01}
"""Small layers are sparse on every machine, and factors without zeros, which `min_gain` of 0 would take too, are not."""


@pytest.fixture(autouse=True)
def always_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer and its adapter are one kernel, whatever the machine is predicted to gain by it."""
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: True)


class Adapted(nn.Module):
    """A quantized layer with 90 % zeros, and `b(a(x)) * 2` beside it."""

    def __init__(self, weights: str, rank: int = 16) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(512, 512))
        with torch.no_grad():
            layer[0].weight *= (torch.rand(512, 32) < 0.1).repeat_interleave(16, 1)
        gossamer.quantize(layer, weights=weights, group=16 if weights == "int4" else None)
        self.layer = layer.requires_grad_(False)
        self.a, self.b = nn.Linear(512, rank, bias=False), nn.Linear(rank, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.b(self.a(x)) * 2.0


def run(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Decision]]:
    """The result, with gradients those of the factors and of x, too."""
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    with collect() as found:
        return outcome(model, compiled, x), found.decisions


def outcome(model: nn.Module, call: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    y: Tensor = call(x)
    if not torch.is_grad_enabled():
        return [y]
    factors = [each for each in model.parameters() if each.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *factors])]


def close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def together(decisions: list[Decision]) -> int:
    return sum("a rank of 16 beside it" in each.reason for each in decisions)


@pytest.mark.parametrize(
    ("weights", "tokens", "grad", "kernels"),
    [("int4", 64, False, 1), ("int4", 64, True, 2), ("int8", 64, False, 1), ("int8", 64, True, 1), ("int8", 2, False, 1)],
)
def test_the_adapter_is_in_the_kernel_of_the_quantized_layer(weights: str, tokens: int, grad: bool, kernels: int) -> None:
    """With gradients, that of x takes a kernel for floats, and with 4 bits the adapter's part, too."""
    model, x = Adapted(weights), torch.randn(tokens, 512)
    with torch.set_grad_enabled(grad):
        got, decisions = run(model, x)
        close(got, outcome(model, model, x))
    in_chains = weights == "int4" or "bytedots" in host().instructions  # chains need dot products of bytes
    assert together(decisions) == (kernels if in_chains else 0)
    assert sum(each.sparse for each in decisions) == 1 + grad


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_steps_change_the_factors_alone(weights: str) -> None:
    model, x = Adapted(weights), torch.randn(64, 512)
    other = copy.deepcopy(model)
    before = {name: each.clone() for name, each in model.layer.state_dict().items() if isinstance(each, Tensor)}
    for each, call in ((model, torch.compile(model, backend="sparse", options=OPTIONS)), (other, other)):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    close([model.a.weight, model.b.weight], [other.a.weight, other.b.weight], 1e-4)
    for name, each in model.layer.state_dict().items():
        if isinstance(each, Tensor):
            assert torch.equal(each, before[name])


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_saved_and_loaded_model(weights: str, tmp_path: Path) -> None:
    model, other, x = Adapted(weights), Adapted(weights), torch.randn(64, 512)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    compiled = torch.compile(other, backend="sparse", options=OPTIONS)
    with torch.no_grad():
        compiled(x)
        other.load_state_dict(torch.load(tmp_path / "model.pt"))
        close([compiled(x)], [model(x)])
