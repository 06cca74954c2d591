"""Training with dropout of attention's weights and with gradients of what is added to scores, against dense float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.sparsity.attention.masked_attention import attend_masked, attend_masked_backward, attend_masked_scores
from gossamer.sparsity.edges.dropout_mask import kept
from tests.backend.harness import Run, assert_same, compile_and_run

LOWEST, INF = torch.finfo(torch.float32).min, float("inf")
SHARE = 0.3


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def window(queries: int, keys: int, width: int = 20) -> Tensor:
    i = torch.arange(queries)[:, None] + keys - queries
    return (i >= torch.arange(keys)) & (i - torch.arange(keys) < width)


def masks(name: str, batch: int, heads: int, queries: int, keys: int) -> Tensor | None:
    """None, bools, or numbers to add."""
    sees = window(queries, keys)
    if name == "window":
        return sees[None, None]
    if name == "bias":
        return made(1, heads, queries, keys).masked_fill(~sees, -INF)
    if name == "lowest":  # some queries see none of their keys
        low = torch.where(sees, 0.0, LOWEST).expand(batch, 1, queries, keys).clone()
        low[..., : keys // 2] = LOWEST
        return low
    return None


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factors: Tensor | float = 1.0) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * 0.25
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).nan_to_num(0) * factors) @ v.repeat_interleave(group, 1)


@pytest.mark.parametrize("name", ["nothing", "window", "bias", "lowest"])
@pytest.mark.parametrize("dropout", [0.0, SHARE])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "size"), [(70, 70, 4, 2, 16), (33, 65, 2, 2, 20), (1, 5, 1, 1, 8)]
)
def test_operations_give_what_dense_attention_does(
    name: str, dropout: float, queries: int, keys: int, heads: int, kv_heads: int, size: int
) -> None:
    q, k, v = made(2, heads, queries, size), made(2, kv_heads, keys, size), made(3, kv_heads, keys, size)[:2]
    mask = masks(name, 2, heads, queries, keys)
    seed = torch.tensor([7], dtype=torch.int64) if dropout else None
    how = 0.25, None, seed, dropout, True
    out, statistics = attend_masked(q, k, v, mask, *how)
    factors: Tensor | float = 1.0
    if seed is not None:
        factors = kept(seed, 2 * heads * queries * keys, 1, dropout, torch.float64).view(2, heads, queries, keys)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    added = None if mask is None or mask.dtype == torch.bool else mask.double().expand(2, heads, queries, keys).requires_grad_()
    expected = written(*wide, added if added is not None else mask, factors)
    assert_same(out, expected.float())
    upstream = made(*expected.shape)
    theirs = torch.autograd.grad(expected, [*wide, *([added] if added is not None else [])], upstream.double())
    ours = attend_masked_backward(upstream, q, k, v, out, statistics, mask, *how)
    for mine, exact in zip(ours, theirs, strict=False):
        assert_same(mine, exact.float())
    if added is not None:
        for summed in ([], [0], [1], [0, 1]):
            all_of_them = attend_masked_scores(upstream, q, k, v, out, statistics, mask, *how, summed)
            sums = theirs[3].sum(summed, keepdim=True) if summed else theirs[3]
            for mine, exact in zip(all_of_them, [*theirs[:3], sums], strict=True):
                assert_same(mine, exact.float())


def by_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.mT * 0.25
    return F.dropout((scores if mask is None else scores.masked_fill(~mask, -INF)).softmax(-1), SHARE) @ v


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=SHARE, scale=0.25)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", [by_softmax, by_torch])
def test_dropout_is_drawn_anew_and_again_in_the_gradients(function: Callable[..., Tensor], masked: bool, dense: str) -> None:
    length = 64
    mask = window(length, length)[None, None] if masked else None
    q, k = (made(2, 3, length, n)[..., :length].requires_grad_() for n in (length, length + 1))
    v = torch.eye(length).expand(2, 3, length, length).clone().requires_grad_()  # so that the result is the weights
    torch.manual_seed(0)
    run = compile_and_run(function, q, k, v, mask, regions=1, grad=True, dense=dense)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    whole = written(*wide, mask)
    seen = torch.ones_like(whole, dtype=torch.bool) if mask is None else mask.expand_as(whole)
    factors = (run.output != 0).double() / (1 - SHARE)
    assert abs(float((run.output[seen] == 0).double().mean()) - SHARE) < 0.03
    expected = written(*wide, mask, factors)
    assert_same(run.output, expected.float())
    upstream = made(*expected.shape)
    theirs = torch.autograd.grad(expected, wide, upstream.double())
    for mine, exact in zip(torch.autograd.grad(run.output, (q, k, v), upstream), theirs, strict=True):
        assert_same(mine, exact.float())
    other = run.function(q, k, v, mask)
    assert not torch.equal(other, run.output)
    torch.manual_seed(0)
    first = run.function(q, k, v, mask)
    torch.manual_seed(0)
    assert torch.equal(first, run.function(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_where_lengths_and_batches_change(dtype: torch.dtype) -> None:
    size = 64

    def given(batch: int, length: int) -> list[Tensor]:
        q, k = (made(batch, 3, length, size + n, dtype=dtype)[..., :size] for n in (0, 1))
        v = torch.eye(size, dtype=dtype)[:length].expand(batch, 3, length, size)  # so that the result is the weights
        return [x.clone().requires_grad_() for x in (q, k, v)]

    first = given(2, size)
    for x in first:
        torch._dynamo.mark_dynamic(x, (0, 2))
    run = compile_and_run(by_softmax, *first, None, regions=1, grad=True)
    for batch, length in ((2, 64), (3, 33), (5, 2), (0, 7)):
        q, k, v = given(batch, length)
        out = run.function(q, k, v, None)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = written(*wide, None, (out[..., :length] != 0).double() / (1 - SHARE))
        assert_same(out, expected.to(dtype))
        upstream = made(*expected.shape, dtype=dtype)
        theirs = torch.autograd.grad(expected, wide, upstream.double())
        for mine, exact in zip(torch.autograd.grad(out, (q, k, v), upstream), theirs, strict=True):
            assert_same(mine, exact.to(dtype))


class RelativeBias(nn.Module):
    """As T5 has it: a number a head for each distance."""

    def __init__(self, heads: int, fused: bool) -> None:
        super().__init__()
        self.of_distance, self.fused = nn.Embedding(16, heads), fused

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        distance = (torch.arange(keys)[None] - torch.arange(queries)[:, None]).clamp(-8, 7) + 8
        bias = self.of_distance(distance).permute(2, 0, 1).unsqueeze(0) + padding
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("padded", ["lowest", "inf", "per sequence"])
def test_relative_biases_get_their_gradients(fused: bool, padded: str, dense: str) -> None:
    model = RelativeBias(4, fused)
    with torch.no_grad():
        model.of_distance.weight.copy_(made(16, 4))
    padding = torch.zeros(3 if padded == "per sequence" else 1, 1, 1, 70)
    padding[..., :30] = LOWEST if padded == "lowest" else -INF
    given = [x.requires_grad_() for x in (made(3, 4, 70, 16), made(3, 4, 70, 17)[..., :16] * 0.3, made(3, 4, 70, 18)[..., :16])]
    torch.manual_seed(0)
    run: Run = compile_and_run(model, *given, padding, regions=1, grad=True, dense=dense)
    upstream = made(3, 4, 70, 16)
    ours = torch.autograd.grad(run.output, [*given, model.of_distance.weight], upstream)
    wide = [x.detach().double().requires_grad_() for x in given]
    expected = model.double()(*wide, padding.double())
    theirs = torch.autograd.grad(expected, [*wide, model.of_distance.weight], upstream.double())
    assert_same(run.output, expected.float())
    for mine, exact in zip(ours, theirs, strict=True):
        assert_same(mine, exact.float())


def test_sizes_may_stay_open() -> None:
    model = RelativeBias(4, fused=False)
    given = [
        x.requires_grad_()
        for x in (made(2, 4, 70, 16), made(2, 4, 70, 17)[..., :16].clone(), made(2, 4, 70, 18)[..., :16].clone())
    ]
    for x in given:
        torch._dynamo.mark_dynamic(x, 2)
    padding = torch.zeros(1, 1, 1, 1)
    run = compile_and_run(model, *given, padding, regions=1, grad=True)
    for length in (70, 91, 33):
        q, k, v = (made(2, 4, length, n)[..., :16].clone().requires_grad_() for n in (16, 17, 18))
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        weight = model.of_distance.weight.detach().double().requires_grad_()
        out = run.function(q, k, v, padding)
        expected = torch.func.functional_call(model, {"of_distance.weight": weight}, (*wide, padding.double()))
        upstream = made(*expected.shape)
        ours = torch.autograd.grad(out, [q, k, v, model.of_distance.weight], upstream)
        for mine, exact in zip(ours, torch.autograd.grad(expected, [*wide, weight], upstream.double()), strict=True):
            assert_same(mine, exact.float())
