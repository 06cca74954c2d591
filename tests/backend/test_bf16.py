"""Models in bf16, and models in f32 under autocast: what becomes sparse, and by which schedule."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gossamer.runtime.target import host
from tests.amx_emulator import believe, emulate
from tests.backend.harness import compile_and_run

needs_dot = pytest.mark.skipif(
    host().vector_bits < 512 or "bf16dots" not in host().instructions, reason="this machine has no AVX512-BF16"
)


def model(block: tuple[int, int]) -> nn.Sequential:
    """Two layers, a fifth of whose blocks are not zero."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    with torch.no_grad():
        for layer in (layers[0], layers[2]):
            m, k = layer.weight.shape
            kept = torch.rand(m // block[0], k // block[1]) < 0.2
            layer.weight *= kept.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return layers


@pytest.mark.parametrize(
    ("schedule", "block"),
    [("broadcast", (1, 1)), pytest.param("bf16dot", (32, 32), marks=needs_dot), pytest.param("pairs", (1, 1), marks=needs_dot)],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_layers_become_sparse(autocast: bool, schedule: str, block: tuple[int, int]) -> None:
    """Autocast makes the graph cast the weights, which is a part of what the sparse weights are computed from."""
    layers = model(block)
    reference = copy.deepcopy(layers).double()
    x = torch.randn(40, 256)
    if not autocast:
        layers, x = layers.bfloat16(), x.bfloat16()

    def run(given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return layers(given)

    found = compile_and_run(run, x, schedule=schedule)
    assert [d.schedule for d in found.regions] == [schedule, schedule]
    assert found.output.dtype is torch.bfloat16
    expected = reference(x.double())
    torch.testing.assert_close(found.output.double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.fixture
def on_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, as if it had AMX, whose instructions are emulated; and chains of products on AMX, wanted or not."""
    believe(emulate(monkeypatch, "amx-bf16"), monkeypatch)
    monkeypatch.setattr("gossamer.backend.chains.chain_cost.runs_in_chains", lambda name, matrix: name == "amxcolumns")
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: True)


@needs_dot
@pytest.mark.parametrize(("block", "width", "tokens"), [((32, 32), 32, 75), ((16, 2), 2, 41), ((64, 1), 1, 17)])
def test_chains_run_on_tiles(block: tuple[int, int], width: int, tokens: int, on_amx: None) -> None:
    layers, x = model(block), torch.randn(tokens, 256).bfloat16()
    expected = copy.deepcopy(layers).double()(x.double())
    found = compile_and_run(layers.bfloat16(), x, disable=["smaller-layers"])
    assert [(d.schedule, d.reason) for d in found.regions] == [("amxcolumns", "in a chain of 2")] * 2
    assert {d.format for d in found.regions} == {f"panels(reduction=1, rows={min(block[0], 32)}, width={width})"}
    torch.testing.assert_close(found.output.double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
