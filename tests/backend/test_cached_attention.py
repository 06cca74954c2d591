"""Attention of a few queries over a cache: against dense float64, in graphs of all spellings, and what stays with torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.backend.report.report import Decision
from gossamer.sparsity.attention.cached_attention import attend_appended, attend_cached
from tests.backend.harness import Run, assert_same, compile_and_run

TYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [(1, 4, 2, 1, 33, 64), (2, 6, 3, 3, 200, 20), (1, 8, 1, 8, 65, 7), (3, 2, 2, 2, 1, 256), (1, 2, 2, 1, 64, 16)]
"""batch, heads, kv heads, queries, keys, size"""


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """In float64, 0 where no key is seen."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    scores = scores if mask is None else scores + mask.double()
    hidden = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(hidden, 0) @ v


def hiding(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask that hides the first third of the keys, and many more."""
    mask = torch.where(made(*shape) < 0.5, 0.0, -torch.inf)
    mask[..., : shape[-1] // 3] = -torch.inf
    return mask.to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("masked", ["no", "each", "all heads", "one row"])
@pytest.mark.parametrize("case", CASES)
def test_computes_what_dense_attention_does(case: tuple[int, ...], masked: str, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, queries, keys, size = case
    q = made(batch, queries, heads, size, dtype=dtype).transpose(1, 2)
    k, v = made(batch, kv_heads, keys, size, dtype=dtype), made(batch, kv_heads, keys, size + 1, dtype=dtype)[..., 1:]
    shapes = {"each": (batch, heads, queries, keys), "all heads": (batch, 1, queries, keys), "one row": (1, 1, 1, keys)}
    mask = hiding(*shapes[masked], dtype=dtype) if masked in shapes else None
    for cap in (None, 5.0):
        found = attend_cached(q, k, v, mask, 0.3, cap)
        assert_same(found, dense(q, k, v, mask, 0.3, cap).to(dtype))
        for new in (1, min(keys, queries)):
            past = keys - new
            appended = attend_appended(q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:], mask, 0.3, cap)
            assert all(torch.equal(a, b) for a, b in zip(appended, (found, k, v), strict=True))


def test_empty_operands() -> None:
    q, none = made(2, 4, 1, 16), made(2, 2, 0, 16)
    assert torch.equal(attend_cached(q, none, none, None, 0.3, None), torch.zeros(2, 4, 1, 16))
    assert attend_cached(q[:0], none[:0], none[:0], None, 0.3, None).shape == (0, 4, 1, 16)
    new = made(2, 2, 1, 16)
    y, k, v = attend_appended(q, none, none, new, new, None, 0.3, None)
    assert torch.equal(k, new) and torch.equal(v, new)
    assert_same(y, new.repeat_interleave(2, 1))


def test_nan_and_inf_stay_where_they_are_seen() -> None:
    """Of keys that are hidden, nothing is read: not even where a neighbour is seen."""
    q, k, v = made(1, 2, 3, 16), made(1, 1, 80, 16), made(1, 1, 80, 16)
    mask = torch.zeros(1, 1, 3, 80)
    mask[:, :, 0, 70] = mask[..., 10:40] = -torch.inf
    expected = dense(q, k, v, mask, 0.3, None)
    k[:, :, 70] = torch.nan
    found = attend_cached(q, k, v, mask, 0.3, None)
    assert_same(found[:, :, 0], expected[:, :, 0].float())
    assert found[:, :, 1:].isnan().all()
    low = torch.full((1, 1, 3, 80), torch.finfo(torch.float32).min)
    assert_same(attend_cached(q, v, v, low, 0.3, None), v.mean(2, keepdim=True).expand(1, 2, 3, 16))


def attention(run: Run) -> list[Decision]:
    return [decision for decision in run.regions if decision.schedule == "cache"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("outputs", [True, False])
def test_appends_to_a_cache(outputs: bool, dynamic: bool) -> None:
    def step(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = torch.cat([past_k, k], -2), torch.cat([past_v, v], 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return (y, k, v * 2) if outputs else y

    def given(length: int) -> list[Tensor]:
        past = [made(2, 2, length, 16), made(2, 2, length, 16) + 1]
        if dynamic:
            for x in past:
                torch._dynamo.mark_dynamic(x, 2)
        return [made(2, 4, 1, 16), *past, made(2, 2, 1, 16), made(2, 2, 1, 16) - 1]

    run = compile_and_run(step, *given(70), regions=1)
    assert "new ones are appended" in attention(run)[0].reason
    for length in (70, 131) if dynamic else (70,):
        inputs = given(length)
        found, expected = run.function(*inputs), step(*inputs)
        for a, b in zip(found, expected, strict=True) if outputs else [(found, expected)]:
            assert_same(a, b)


def test_a_static_cache_under_a_mask() -> None:
    """Written at a position, repeated for heads; keys that are not there yet are hidden."""

    def step(q: Tensor, cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(2, position, new)
        seen = torch.arange(96) <= position[:, None]
        keys = cache[:, :, None].expand(1, 2, 3, 96, 16).reshape(1, 6, 96, 16)
        return F.scaled_dot_product_attention(q, keys, keys, attn_mask=seen[None, None], scale=0.5)

    caches = [made(1, 2, 96, 16) for _ in range(2)]
    q, new = made(1, 6, 1, 16), made(1, 2, 1, 16)
    run = compile_and_run(step, q, caches[0], new, torch.tensor([40]), regions=1)
    assert "3 heads at a time" in attention(run)[0].reason
    step(q, caches[1], new, torch.tensor([40]))
    for position in (41, 95):
        at = torch.tensor([position])
        assert_same(run.function(q, caches[0], new, at), step(q, caches[1], new, at))
    assert torch.equal(*caches)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_that_is_written_out(dtype: torch.dtype, cap: float | None) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.mT * 0.4
        scores = scores if cap is None else torch.tanh(scores / cap) * cap
        return (scores + mask).softmax(-1, dtype=torch.float32).to(dtype) @ v

    q, k, v = made(2, 4, 2, 16, dtype=dtype), made(2, 2, 100, 16, dtype=dtype), made(2, 2, 100, 16, dtype=dtype)
    mask = torch.zeros(2, 1, 2, 100, dtype=dtype)
    mask[..., 60:] = torch.finfo(dtype).min
    run = compile_and_run(step, q, k, v, mask, regions=1)
    assert len(attention(run)) == 1
    assert_same(run.output, dense(q, k, v, mask, 0.4, cap).to(dtype))


@pytest.mark.parametrize("dense_part", ["eager", "inductor"])
def test_with_inductor_and_changed_lengths(dense_part: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q + 1, k * 2, v).transpose(1, 2).flatten(2) * 3

    k, v = made(1, 4, 90, 32), made(1, 4, 90, 32)
    for x in (k, v):
        torch._dynamo.mark_dynamic(x, 2)
    run = compile_and_run(step, made(1, 4, 1, 32), k, v, dense=dense_part, regions=1)
    for length in (90, 91, 300):
        inputs = [made(1, 4, 1, 32), made(1, 4, length, 32), made(1, 4, length, 32)]
        assert_same(run.function(*inputs), step(*inputs))


def test_what_stays_with_torch() -> None:
    def attend(q: Tensor, k: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, **options)

    q, k = made(1, 4, 1, 16), made(1, 4, 100, 16)
    compile_and_run(attend, made(1, 4, 9, 16), k, regions=0)
    compile_and_run(attend, q.double(), k.double(), regions=0)
    compile_and_run(lambda q, k: attend(q, k, is_causal=True), made(1, 4, 3, 16), k, regions=0)
    compile_and_run(lambda q, k: attend(q, k), q, k[:, :, :30], regions=0, min_gain=1.0)
    compile_and_run(attend, q.clone().requires_grad_(), k, grad=True, regions=0)
