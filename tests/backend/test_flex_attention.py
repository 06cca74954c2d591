"""FlexAttention in graphs: masks and score functions against dense float64, when tiles are found, what stays with torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gossamer.backend.calls import flex_ops
from tests.backend.harness import assert_same, compile_and_run

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06])
DOCUMENT = torch.arange(300) // 40
SINK = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
INF = float("inf")

Function = Callable[..., Any]


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs() <= 16


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENT[q] == DOCUMENT[k]


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs() <= 16 * (h + b)


CASES: dict[str, tuple[Function | None, Function | None]] = {
    "a window": (window, None),
    "documents, ALiBi": (documents, lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "another mask a head and batch": (by_head, None),
    "a soft cap of a sum": (window, lambda s, b, h, q, k: torch.tanh((s - 0.1 * (q - k).abs()) / 5) * 5),
    "a soft cap, then a sink": (documents, lambda s, b, h, q, k: SINK[h, k] + 5 * torch.tanh(s / 5)),
    "causal by the score": (None, lambda s, b, h, q, k: torch.where(q >= k, s, -INF)),
    "minus infinity added": (window, lambda s, b, h, q, k: s + torch.where(k > 200, -INF, 0.5)),
}


def tensors(queries: int = 300, keys: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(queries)
    q, *kv = (torch.randn(2, h, n, 16, generator=draw).to(dtype) for h, n in ((4, queries), (2, keys), (2, keys)))
    return q, kv[0], kv[1]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Function | None, score: Function | None) -> Tensor:
    b, h = torch.arange(q.shape[0])[:, None, None, None], torch.arange(q.shape[1])[:, None, None]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    scores = scores if score is None else score(scores, b, h, i, j)
    scores = scores if mask is None else scores.masked_fill(~mask(b, h, i, j), -INF)
    return (scores.softmax(-1).nan_to_num(0) @ v).to(q.dtype)


def blocks(mask: Function | None, queries: int = 300, keys: int = 300) -> BlockMask | None:
    of_head = mask is by_head
    sizes = (2, 4) if of_head else (None, None)
    return None if mask is None else create_block_mask(mask, *sizes, queries, keys, device="cpu")


@pytest.mark.parametrize("name", CASES)
def test_computes_what_its_functions_say(name: str) -> None:
    mask, score = CASES[name]
    block_mask, given = blocks(mask), tensors()
    run = compile_and_run(
        lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True), *given, regions=1
    )
    assert_same(run.output, dense(*given, mask, score))


def test_tiles_are_found_when_blocks_or_buffers_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    found = flex_ops.listed
    monkeypatch.setattr(flex_ops, "listed", lambda *args: (made.append(1), found(*args))[1])
    document = torch.arange(300) // 40

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return document[q] == document[k]

    def twice(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        for _ in range(2):
            q = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
        return q

    def expected(q: Tensor) -> Tensor:
        for _ in range(2):
            q = dense(q, k, v, mask, None)
        return q

    q, k, v = tensors()
    block_mask = blocks(mask)
    run = compile_and_run(twice, q, k, v, block_mask, regions=2)
    assert_same(run.output, expected(q))
    assert_same(run.function(-q, k, v, block_mask), expected(-q))
    assert len(made) == 1
    document[:] = 0  # in blocks that are listed
    everywhere = blocks(lambda b, h, q, k: q >= 0)
    assert_same(run.function(q, k, v, everywhere), expected(q))
    document[100:] = 1
    count, columns = torch.full((1, 1, 3), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    partly = BlockMask.from_kv_blocks(count, columns.contiguous(), mask_mod=mask, seq_lengths=(300, 300))
    run = compile_and_run(twice, q, k, v, partly, regions=2)
    assert_same(run.output, expected(q))


def test_masks_made_in_the_graph() -> None:
    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(window, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)

    given = tensors(150, 200, torch.bfloat16)
    run = compile_and_run(own, *given, regions=1)
    assert_same(run.output, dense(*given, window, None).transpose(1, 2).flatten(2))


def test_what_has_no_steps_stays_with_torch() -> None:
    q, k, v = tensors()
    gate = torch.rand(4)
    for score, reason in (
        (lambda s, b, h, q, k: s * gate[h], "aten.mul"),
        (lambda s, b, h, q, k: s * s, "several times"),
        (lambda s, b, h, q, k: torch.tanh(s + k) + q, "adds twice"),
        (lambda s, b, h, q, k: torch.where(q > k, s, 0.0), "chooses"),
    ):
        run = compile_and_run(
            lambda q, k, v, f=score: flex_attention(q, k, v, score_mod=f, enable_gqa=True), q, k, v, regions=0
        )
        assert reason in run.decisions[0].reason
        assert_same(run.output, dense(q, k, v, None, score))
        torch.compiler.reset()
    run = compile_and_run(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, return_lse=True), q, k, v, regions=0)
    assert "statistics" in run.decisions[0].reason


def test_lengths_may_change() -> None:
    def windowed(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    run = compile_and_run(windowed, *tensors(), blocks(window), regions=1)
    for length in (200, 333, 64):
        given = tensors(length, length)
        assert_same(run.function(*given, blocks(window, length, length)), dense(*given, window, None))
