"""Chains for a few tokens: products and what lies between them in one call, each product by the schedule that it would have
alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.run.compiled_region import CompiledRegion
from tests.backend.harness import assert_same, compile_and_run, prune_


class Block(nn.Module):
    """A gated MLP between norms, its residual, and queries and keys of the next layer: three results."""

    def __init__(self, width: int = 64, hidden: int = 200) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, hidden) for _ in range(2))
        self.down, self.norm = nn.Linear(hidden, width), nn.LayerNorm(width)
        self.q, self.k = nn.Linear(width, 32, bias=False), nn.Linear(width, 50, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        y = self.norm(x)
        return self.q(y), self.k(y), x


def made(dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return prune_(Block(**sizes).to(dtype)).eval().requires_grad_(False)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_all_results_of_a_few_tokens(tokens: int, dtype: torch.dtype) -> None:
    model, x = made(dtype), given(1, tokens, 64, dtype=dtype)
    run = compile_and_run(model, x, regions=5)
    assert {d.reason for d in run.regions} == {"in a chain of 5"}
    for found, expected in zip(run.output, model.double()(x.double()), strict=True):
        assert_same(found, expected.to(dtype))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_rows_of_each_product(threads: int) -> None:
    model, x, before = made(width=400, hidden=1100), given(2, 400), torch.get_num_threads()
    run = compile_and_run(model, x, regions=5)
    torch.set_num_threads(threads)
    try:
        for found, expected in zip(run.function(x), model(x), strict=True):
            assert_same(found, expected)
    finally:
        torch.set_num_threads(before)


def test_the_greatest_of_a_row_and_columns_beside_it() -> None:
    """A softmax between products; lanes behind the end of a row count neither as 0 nor as exp(0)."""
    torch.manual_seed(0)
    first, second = (prune_(nn.Linear(*sizes)).requires_grad_(False) for sizes in ((32, 37), (37, 21)))

    def layers(x: Tensor) -> Tensor:
        y = first(x) - 30
        y = torch.exp(y - y.amax(-1, keepdim=True))
        result: Tensor = second(y / y.sum(-1, keepdim=True))
        return result

    run = compile_and_run(layers, given(3, 32), regions=2)
    assert {d.reason for d in run.regions} == {"in a chain of 2"}
    x = given(3, 32)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    torch.testing.assert_close(run.function(x), layers(x), equal_nan=True, rtol=1e-4, atol=1e-5)


def test_changed_and_dense_weights() -> None:
    model, x = made(), given(1, 2, 64)
    run = compile_and_run(model, x, regions=5)
    with torch.no_grad():
        model.down.weight.mul_(2)
    for found, expected in zip(run.function(x), model(x), strict=True):
        assert_same(found, expected)
    with torch.no_grad():
        model.up.weight.copy_(torch.randn_like(model.up.weight))
    for _ in range(3):
        for found, expected in zip(run.function(x), model(x), strict=True):
            assert_same(found, expected)


def test_one_call_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([prune_(Block()) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                q, k, x = layer(x)
                x = torch.cumsum(x, -1) * q.sum() * k.sum()  # which no chain computes
            return x

    called: list[int] = []
    call = CompiledRegion.__call__

    def counted(self: CompiledRegion, operands: list[Tensor]) -> Tensor | list[Tensor]:
        called.append(len(self.weights))
        return call(self, operands)

    torch.manual_seed(0)
    model = Layers().eval().requires_grad_(False)
    run = compile_and_run(model, given(1, 1, 64), regions=10, dense="inductor")
    monkeypatch.setattr(CompiledRegion, "__call__", counted)
    found, expected = run.function(given(1, 1, 64)), model(given(1, 1, 64))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert called == [5, 5]
