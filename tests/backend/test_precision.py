"""torch.set_float32_matmul_precision("medium"): products of f32 may be rounded to bf16, and are where the CPU gains by it."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import predict
from gossamer.runtime.target import host
from tests.backend.harness import assert_same, compile_and_run, prune_

needs_dot = pytest.mark.skipif(
    host().vector_bits < 512 or "bf16dots" not in host().instructions, reason="this machine has no AVX512-BF16"
)


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def model(block: tuple[int, int]) -> nn.Sequential:
    return prune_(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval(), block=block)  # type: ignore[return-value]


@needs_dot
@pytest.mark.parametrize(
    ("tokens", "block", "schedule", "chosen"),
    [
        (200, (32, 32), "auto", {"bf16dot", "amxcolumns"}),
        (200, (1, 1), "auto", {"pairs", "amxexpand"}),
        (200, (1, 1), "broadcast", {"broadcast"}),
        (5, (1, 1), "expand", {"expand"}),
        (40, (32, 32), "bf16dot", {"bf16dot"}),
    ],
)
def test_medium_multiplies_in_bf16_and_sums_in_f32(
    tokens: int, block: tuple[int, int], schedule: str, chosen: set[str]
) -> None:
    """With AMX tiles are chosen."""
    layers, x = model(block), torch.randn(tokens, 256)
    expected = copy.deepcopy(layers).double()(x.double())
    torch.set_float32_matmul_precision("medium")
    run = compile_and_run(layers, x, schedule=schedule)
    assert len(run.regions) == 2 and {d.schedule for d in run.regions} <= chosen
    assert all("in bf16" in d.reason for d in run.regions)
    assert run.output.dtype is torch.float32
    error = (run.output - expected).abs().max() / expected.abs().max()
    assert 1e-6 < error < 1e-2


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_nothing_is_rounded_unasked(setting: str) -> None:
    layers, x = model((1, 1)), torch.randn(40, 256)
    torch.set_float32_matmul_precision(setting)
    run = compile_and_run(layers, x)
    assert len(run.regions) == 2 and not any("bf16" in d.reason for d in run.regions)
    assert_same(run.output, layers(x))


def test_the_reference_schedule_never_rounds() -> None:
    layers, x = model((1, 1)), torch.randn(40, 256)
    expected = layers(x)
    torch.set_float32_matmul_precision("medium")
    run = compile_and_run(layers, x, schedule="reference")
    assert len(run.regions) == 2
    assert_same(run.output, expected)


@needs_dot
def test_a_rounded_weight_is_taken_over_when_it_changes() -> None:
    layers, x = model((1, 1)), torch.randn(40, 256)
    torch.set_float32_matmul_precision("medium")
    run = compile_and_run(layers, x)
    with torch.no_grad():
        layers[0].weight.mul_(2)
        expected = copy.deepcopy(layers).double()(x.double())
    error = (run.function(x) - expected).abs().max() / expected.abs().max()
    assert error < 1e-2


@needs_dot
def test_an_epilogue_and_a_weight_on_the_left_stay_in_f32() -> None:
    weight, x = prune_(nn.Linear(256, 512)).weight.detach(), torch.randn(256, 40)
    torch.set_float32_matmul_precision("medium")
    run = compile_and_run(lambda x: (weight @ x).tanh(), x)
    assert [d.op for d in run.regions] == ["weight @ x"]
    torch.testing.assert_close(run.output, (weight.double() @ x.double()).tanh().float(), rtol=2e-2, atol=2e-2)


def test_the_dense_alternative_is_what_torch_would_do() -> None:
    """On AMX torch rounds, too; elsewhere its products of f32 stay products of f32."""
    f32, bf16 = Matrix(768, 768, 1, "f32", 512), Matrix(768, 768, 1, "bf16", 512)
    plain = Matrix(768, 768, 1, "bf16", 512, features=frozenset({"bf16dots"}), given="f32")
    tiles = Matrix(768, 768, 1, "bf16", 512, features=frozenset({"amx"}), given="f32")
    assert predict(plain, 128).dense_us == predict(f32, 128).dense_us
    assert predict(tiles, 128).dense_us == predict(bf16, 128).dense_us
