"""FlexAttention in graphs: masks and score functions against dense float64, when tiles are found, what stays with torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention, or_masks

from gossamer.backend.run import flex_ops
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
    "causal blocks, documents by the score": (
        lambda b, h, q, k: q >= k,
        lambda s, b, h, q, k: torch.where(DOCUMENT[q] == DOCUMENT[k], s, -INF),
    ),
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
        (lambda s, b, h, q, k: (s * 2).to(torch.int32).to(s.dtype), "_to_copy"),
    ):
        run = compile_and_run(
            lambda q, k, v, f=score: flex_attention(q, k, v, score_mod=f, enable_gqa=True), q, k, v, regions=0
        )
        assert reason in run.decisions[0].reason
        assert_same(run.output, dense(q, k, v, None, score))
        torch.compiler.reset()


@pytest.mark.parametrize("name", ["documents, ALiBi", "another mask a head and batch", "a soft cap of a sum"])
def test_gradients(name: str) -> None:
    mask, score = CASES[name]
    block_mask, given = blocks(mask), [x.requires_grad_() for x in tensors()]
    run = compile_and_run(
        lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True),
        *given,
        regions=1,
        grad=True,
    )
    upstream = torch.randn(run.output.shape, generator=torch.Generator().manual_seed(0))
    theirs = torch.autograd.grad(dense(*given, mask, score), given, upstream)
    for mine, expected in zip(torch.autograd.grad(run.output, given, upstream), theirs, strict=True):
        assert_same(mine, expected)


def late(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q > 40) & (k <= q)


@pytest.mark.parametrize("remainder", ["eager", "inductor"])
def test_logarithms_and_their_gradients(remainder: str) -> None:
    block_mask, given = blocks(late), [x.requires_grad_() for x in tensors()]

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, more = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out * 2, more.lse

    run = compile_and_run(both, *given, regions=1, grad=True, dense=remainder)
    q, k, v = (x.detach().double().requires_grad_() for x in given)
    scores = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(
        ~late(0, 0, torch.arange(300)[:, None], torch.arange(300)), -INF
    )
    expected = scores.softmax(-1).nan_to_num(0) @ v.repeat_interleave(2, 1) * 2, scores.logsumexp(-1)
    assert_same(run.output[0], expected[0].float())
    assert_same(run.output[1], expected[1].float())
    sums = [out.sum() + lse[:, :, 41:].square().sum() for out, lse in (run.output, expected)]
    for mine, exact in zip(torch.autograd.grad(sums[0], given), torch.autograd.grad(sums[1], (q, k, v)), strict=True):
        assert_same(mine, exact.float())


def test_what_inductor_has_no_way_for_is_written_out() -> None:
    bias = torch.nn.Parameter(SINK.clone())
    cases: list[tuple[torch.dtype, str, Function | None]] = [
        (torch.float64, "inductor", None),
        (torch.float32, "eager", lambda s, b, h, q, k: s + bias[h, k]),
    ]
    for dtype, remainder, score in cases:
        given = [x.to(dtype).requires_grad_() for x in tensors()]
        block_mask = blocks(window)
        run = compile_and_run(
            lambda q, k, v, b=block_mask, f=score: flex_attention(q, k, v, score_mod=f, block_mask=b, enable_gqa=True),
            *given,
            regions=0,
            grad=True,
            dense=remainder,
        )
        assert "written out" in run.decisions[0].reason
        expected, of = dense(*given, window, score), [*given, *([bias] if score else [])]
        assert_same(run.output, expected)
        sums = run.output.square().sum(), expected.square().sum()
        for mine, theirs in zip(*(torch.autograd.grad(x, of) for x in sums), strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize("remainder", ["eager", "inductor"])
def test_blocks_are_an_input_of_a_graph_with_open_sizes(remainder: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, score_mod=CASES["documents, ALiBi"][1], block_mask=block_mask, enable_gqa=True)

    compiled = None
    for length in (300, 170):
        q, k, v = given = [x.requires_grad_() for x in tensors(length, length)]
        for x in given:
            torch._dynamo.mark_static(x, [1, 3])
        block_mask = blocks(window, length, length)
        if compiled is None:
            first = compile_and_run(run, *given, block_mask, dynamic=True, regions=1, grad=True, dense=remainder)
            compiled, output = first.function, first.output
        else:
            with torch.compiler.set_stance("fail_on_recompile"):
                output = compiled(*given, block_mask)
        expected = dense(q, k, v, window, CASES["documents, ALiBi"][1])
        assert_same(output, expected)
        sums = output.square().sum(), expected.square().sum()
        for mine, theirs in zip(*(torch.autograd.grad(x, given) for x in sums), strict=True):
            assert_same(mine, theirs)


def test_written_out_where_only_some_of_what_is_read_has_a_gradient() -> None:
    bias, given = torch.nn.Parameter(SINK.clone()), [x.requires_grad_() for x in tensors()]

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + SLOPES[h] * (k - q) + bias[h, k]

    run = compile_and_run(
        lambda q, k, v: flex_attention(q, k, v, score_mod=score, enable_gqa=True), *given, regions=0, grad=True, dynamic=True
    )
    expected, of = dense(*given, None, score), [*given, bias]
    assert_same(run.output, expected)
    sums = run.output.square().sum(), expected.square().sum()
    for mine, theirs in zip(*(torch.autograd.grad(x, of) for x in sums), strict=True):
        assert_same(mine, theirs)


def test_others_refuse_gradients_as_ever() -> None:
    given = [x.requires_grad_() for x in tensors(64, 64)]
    run = compile_and_run(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True), *given, grad=True)
    assert run.output.requires_grad
    for function in (flex_attention, torch.compile(flex_attention, backend="aot_eager")):
        with pytest.raises(NotImplementedError, match="backward on CPU"):
            function(*given, enable_gqa=True)


def grid(b: Any, h: Any, q: Any, k: Any) -> Any:
    row, column = (q // 20).clamp(2, 12), (q % 20).clamp(2, 17)
    return ((row - k // 20).abs() <= 2) & ((column - k % 20).abs() <= 2)


def bucketed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    distance = (q - k).clamp(min=0)
    far = (8 + torch.log(distance.float().clamp(min=1) / 8) * 3).to(torch.int64).clamp(max=15)
    return score + SINK[h, torch.where(distance < 8, distance, far)]


def test_functions_of_places() -> None:
    given = tensors()
    layout = torch.rand(10, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    two = torch.stack([DOCUMENT, torch.arange(300) // 70])
    masks: list[Function] = [
        grid,
        and_masks(documents, lambda b, h, q, k: q >= k),
        or_masks(lambda b, h, q, k: layout[q // 32, k // 32], lambda b, h, q, k: q == k),
        lambda b, h, q, k: two[b, q] == two[b, k],
        lambda b, h, q, k: torch.where(q < 100, k <= q, (k >= q - 50) & ((q - k) % 3 == 0)),
    ]
    for mask in masks:
        torch.compiler.reset()
        block_mask = create_block_mask(mask, 2, None, 300, 300, device="cpu")
        run = compile_and_run(
            lambda q, k, v, b=block_mask: flex_attention(q, k, v, score_mod=bucketed, block_mask=b, enable_gqa=True),
            *given,
            regions=1,
        )
        assert_same(run.output, dense(*given, mask, bucketed))


def within(ids: Tensor) -> Function:
    """Earlier tokens of the same document."""
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


def test_a_model_whose_lengths_and_documents_change_is_compiled_a_few_times() -> None:
    project = torch.nn.Linear(16, 48)

    def model(x: Tensor, block_mask: BlockMask) -> Tensor:
        q, k, v = project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=block_mask).transpose(1, 2).flatten(2)  # type: ignore[union-attr]

    draw, compiled, before = torch.Generator().manual_seed(0), None, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(8):
        length = 40 + 13 * (number * 7 % 20)
        x, ids = torch.randn(2, length, 16, generator=draw), torch.rand(2, length, generator=draw).lt(0.1).cumsum(1)

        block_mask = create_block_mask(within(ids), 2, None, length, length, device="cpu")
        if compiled is None:
            compiled = compile_and_run(model, x, block_mask, grad=True).function
        out = compiled(x, block_mask)
        q, k, v = project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        seen = (ids[:, None, :, None] == ids[:, None, None]) & torch.ones(length, length, dtype=torch.bool).tril()
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        assert_same(out, expected)
        assert_same(*(torch.autograd.grad(y.square().sum(), project.weight)[0] / 100 for y in (out, expected)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 3


def test_lengths_may_change() -> None:
    def windowed(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    run = compile_and_run(windowed, *tensors(), blocks(window), regions=1)
    for length in (200, 333, 64):
        given = tensors(length, length)
        assert_same(run.function(*given, blocks(window, length, length)), dense(*given, window, None))
