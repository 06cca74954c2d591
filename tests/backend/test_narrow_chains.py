"""Chains of int8 and of bf16, whose attention multiplies pairs of bf16 where the CPU does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.runtime.target import host
from tests.backend.harness import compile_and_run
from tests.backend.test_chains import HEADS, Attention, D, PostNorm, PreNorm, model

needs_vnni = pytest.mark.skipif("bytedots" not in host().instructions, reason="chains need dot products of bytes")
TYPES = [torch.bfloat16, pytest.param(torch.int8, marks=needs_vnni)]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "parts": PostNorm,
    "joint": PreNorm,
    "causal": lambda: PreNorm(causal=True),
    "apart": lambda: PreNorm(causal=True, joint=False),
}


def narrow(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return gossamer.quantize(module) if dtype == torch.int8 else module.to(dtype)


def given(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32 if dtype == torch.int8 else dtype)


def check(found: Tensor, expected: Tensor) -> None:
    """Outputs are near 1: what rounds factors to bf16, or to int8, is off by some hundredths."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=6e-2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_one_kernel_serves_every_batch_and_length(layer: str, dtype: torch.dtype) -> None:
    module = narrow(model(LAYERS[layer]()), dtype)
    run = compile_and_run(module, given(dtype, 2, 70, D), dynamic=True)
    assert all("in a chain of" in d.reason for d in run.regions)
    for batch, length in ((2, 70), (2, 17), (3, 16), (5, 9), (2, 64), (2, 150)):
        x = given(dtype, batch, length, D)
        with torch.no_grad():
            check(run.function(x), module(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 1, 1, 41), (1, 1, 41, 41), (3, 1, 41, 41)])
def test_masks_are_added_to_the_scores(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module, x = narrow(model(PostNorm()), dtype), given(dtype, 3, 41, D)
    mask = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, float("-inf")).to(x.dtype)
    mask[..., 0] = 0
    run = compile_and_run(module, x, mask)
    assert all("in a chain of" in d.reason for d in run.regions)
    check(run.output, module(x, mask))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_later_token_has_reaches_no_earlier_one(bad: float) -> None:
    module, x = model(PreNorm(causal=True)).bfloat16(), given(torch.bfloat16, 2, 70, D)
    run = compile_and_run(module, x)
    for at in (0, 3, 32, 63, 64, 69):
        spoilt = x.clone()
        spoilt[0, at, 5] = bad
        with torch.no_grad():
            out, clean = run.function(spoilt), module(x)
        check(out[0, :at], clean[0, :at])
        check(out[1], clean[1])
        assert out[0, at:].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_heads_of_an_odd_size_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    class Odd(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (p(x)[..., : HEADS * 7].reshape(b, s, HEADS, 7).transpose(1, 2) for p in self.project)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(torch.nn.functional.pad(y.transpose(1, 2).reshape(b, s, HEADS * 7), (0, D - HEADS * 7)))

    module, x = narrow(model(Odd()), dtype), given(dtype, 2, 33, D)
    run = compile_and_run(module, x)
    check(run.output, module(x))
