"""Experts with pruned weights in graphs: which become regions, what comes out against dense torch, what stays and why."""

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import Tensor, nn

from gossamer.dialects.errors import ArgumentError
from tests.backend.harness import assert_same, compile_and_run, pruned

EXPERTS, K, M = 4, 24, 40


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """torch's own, which compiles in bf16 alone, or what transformers has in its place."""
    if x.dtype is torch.bfloat16:
        return F.grouped_mm(x, weights, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(x, weights, offs=ends)  # type: ignore[no-any-return]


assert transformers.integrations.moe  # has defined it


class Mixture(nn.Module):
    """Tokens that go through their expert; `ends` say how many each gets."""

    def __init__(self, dtype: torch.dtype = torch.float32, density: float = 0.2) -> None:
        super().__init__()
        self.up = nn.Parameter(pruned(EXPERTS, M, K, density=density, dtype=dtype))
        self.down = nn.Parameter(pruned(EXPERTS, K, M, density=density, dtype=dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        h = grouped_mm(x, self.up.transpose(-2, -1), ends)
        return grouped_mm(F.silu(h), self.down.transpose(-2, -1), ends)


def dense(model: Mixture, x: Tensor, ends: Tensor) -> Tensor:
    """The same, expert by expert."""
    out, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        out.append(F.silu(x[start:end] @ model.up[expert].t()) @ model.down[expert].t())
        start = end
    return torch.cat(out)


def ends_of(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_experts_are_regions_for_any_share_of_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Mixture(dtype)
    with torch.no_grad():
        model.up[2] = 0  # an expert that nothing is left of
    shares = [(5, 0, 3, 40), (1, 1, 1, 1), (0, 0, 48, 0), (0, 0, 0, 0), (33, 2, 0, 0)]
    first = ends_of(*shares[0])
    x = torch.randn(int(first[-1]), K).to(dtype)
    run = compile_and_run(model, x, first, dynamic=True, regions=2)
    assert [d.op for d in run.regions] == ["experts", "experts"]
    assert [d.reason for d in run.regions] == ["a region for each of 4"] * 2
    assert [d.shape for d in run.regions] == [(EXPERTS, M, K), (EXPERTS, K, M)]
    assert all(d.packed_bytes > 0 for d in run.regions)
    with torch.no_grad():
        for counts in shares:
            ends = ends_of(*counts)
            x = torch.randn(int(ends[-1]), K).to(dtype)
            assert_same(run.function(x, ends), dense(model, x, ends))
        x[0, 0] = torch.nan
        given = run.function(x, ends)
        assert given[0].isnan().any()
        assert_same(given[1:], dense(model, x, ends)[1:])
        x[0, 0] = 0
        model.down.mul_(3)
        assert_same(run.function(x, ends), dense(model, x, ends))
        model.down[1] = pruned(K, M, dtype=dtype)
        assert_same(run.function(x, ends), dense(model, x, ends))


def test_ends_that_cannot_be_are_refused() -> None:
    model, x = Mixture(), torch.randn(8, K)
    run = compile_and_run(model, x, ends_of(2, 2, 2, 2), regions=2)
    for wrong in ([2, 1, 8, 8], [2, 4, 6, 9], [-1, 4, 6, 8]):
        with torch.no_grad(), pytest.raises(ArgumentError, match=r"experts: the rows of expert \d end at"):
            run.function(x, torch.tensor(wrong, dtype=torch.int32))


def test_tokens_behind_the_last_end_give_zeros() -> None:
    up = pruned(EXPERTS, K, M)
    run = compile_and_run(lambda x, ends: grouped_mm(x, up, ends), torch.randn(9, K), ends_of(3, 0, 2, 1), regions=1)
    assert not run.output[6:].any()
    assert run.output[:6].any()


def test_experts_that_would_not_gain_are_dense_products() -> None:
    model, x, ends = Mixture(), torch.randn(8, K), ends_of(2, 2, 2, 2)
    run = compile_and_run(model, x, ends, regions=2, min_gain=1.1)
    assert all(d.op == "experts" and d.schedule == "routed" for d in run.decisions)
    with torch.no_grad():
        assert_same(run.output, dense(model, x, ends))


def test_in_training_they_are_dense_products() -> None:
    torch.manual_seed(0)
    model, x, ends = Mixture(), torch.randn(8, K), ends_of(3, 0, 4, 1)
    run = compile_and_run(model, x, ends, grad=True, regions=2)
    assert all(d.schedule == "routed" for d in run.decisions)
    run.output.sum().backward()
    found = model.up.grad
    model.up.grad = None
    dense(model, x, ends).sum().backward()
    assert found is not None
    assert model.up.grad is not None
    assert_same(found, model.up.grad)
