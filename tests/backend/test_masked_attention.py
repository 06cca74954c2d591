"""Attention under masks in graphs: which masks are found, what comes out against dense float64, gradients, what stays."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.backend.run import computed
from gossamer.backend.run.mask_ops import AttentionMask
from gossamer.passes import pipelines
from gossamer.runtime import jit
from gossamer.runtime.target import Target, host
from gossamer.sparsity.attention import mask as mask_module
from gossamer.sparsity.attention import masked_attention
from gossamer.sparsity.attention.blocks_ir import attend_blocks
from gossamer.sparsity.attention.masked_attention import Scoring, _mask, attend, attend_where, gradients, gradients_where
from gossamer.sparsity.attention.tile_table import tile_table
from tests.backend.harness import assert_same, compile_and_run


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """In float64: the weighted values, and the logarithms of the sums; 0 where no key is seen."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~mask, float("-inf"))
    logarithms = torch.logsumexp(scores, -1)
    return scores.softmax(-1).nan_to_num(0) @ v, logarithms.where(~logarithms.isneginf(), 0)


needs_dots = pytest.mark.skipif(
    host().vector_bits < 512 or "bf16dots" not in host().instructions, reason="this machine has no AVX512-BF16"
)

MASKS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "nothing": lambda b, h, q, k: torch.zeros(1, 1, q, k, dtype=torch.bool),
    "everything": lambda b, h, q, k: torch.ones(1, 1, q, k, dtype=torch.bool),
    "window": lambda b, h, q, k: ((torch.arange(q)[:, None] - torch.arange(k)).abs() < 9)[None, None],
    "keys": lambda b, h, q, k: made(b, 1, 1, k) > 0,
    "chance": lambda b, h, q, k: made(b, h, q, k) > 1,
    "alike": lambda b, h, q, k: (made(1, 1, q, k) > 1).expand(b, h, q, k),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("sizes", "heads", "size"),
    [((100, 77), (4, 2), 20), ((33, 16), (2, 2), 16), ((1, 300), (2, 1), 17), ((128, 200), (2, 2), 64), ((5, 1), (1, 1), 256)],
)
def test_computes_what_dense_attention_does(name: str, sizes: tuple[int, int], heads: tuple[int, int], size: int) -> None:
    (queries, keys), (many, few) = sizes, heads
    q = made(2, queries, many, size).transpose(1, 2)
    k, v = made(2, few, keys, size), made(2, few, keys, size + 1)[..., 1:]
    mask = MASKS[name](2, many, queries, keys)
    out, logarithms = attend(q, k, v, tile_table(mask), Scoring(0.3))
    expected = dense(q, k, v, mask, 0.3)
    assert out.stride() == q.stride()
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logarithms.double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "keys", "chance", "nothing"])
@pytest.mark.parametrize(
    ("sizes", "heads", "size"), [((100, 77), (4, 2), 20), ((33, 16), (2, 2), 16), ((128, 200), (2, 1), 64)]
)
def test_gradients_are_those_of_dense_attention(name: str, sizes: tuple[int, int], heads: tuple[int, int], size: int) -> None:
    (queries, keys), (many, few) = sizes, heads
    given = (made(2, many, queries, size), made(2, keys, few, size).transpose(1, 2), made(2, few, keys, size + 1)[..., 1:])
    upstream, mask = made(2, queries, many, size).transpose(1, 2), MASKS[name](2, many, queries, keys)
    whole = mask.expand(*mask.shape[:2], queries, keys)
    tables = tile_table(whole), tile_table(whole, turned=True)
    found = gradients(upstream, given, *attend(*given, tables[0], Scoring(0.3)), tables, Scoring(0.3))
    wide = [x.double().requires_grad_() for x in given]
    expected = torch.autograd.grad(dense(wide[0], wide[1], wide[2], mask, 0.3)[0], wide, upstream.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.nan_to_num(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["window", "everything"])
def test_features_of_a_head_may_lie_apart(name: str, dtype: torch.dtype) -> None:
    """As behind a convolution: [batch, heads, features, pixels]. Of everything torch's kernel computes the attention."""
    given = [made(2, 3, 16, 40 + n, dtype=dtype).narrow(3, 0, 40).mT.requires_grad_() for n in range(3)]
    mask, tolerance = MASKS[name](2, 3, 40, 40), 1e-4 if dtype == torch.float32 else 3e-2
    upstream = made(2, 3, 16, 40, dtype=dtype).mT
    wide = [x.detach().double().requires_grad_() for x in given]
    expected = dense(wide[0], wide[1], wide[2], mask, 0.25)[0]
    whole = mask.expand(2, 3, 40, 40)
    statistics = attend_where(*given, _mask(whole, given[1]), Scoring(0.25))
    found = gradients_where(upstream, tuple(given), *statistics, _mask(whole, given[1]), Scoring(0.25))
    torch.testing.assert_close(statistics[0].double(), expected, rtol=tolerance, atol=tolerance)
    assert statistics[0].is_contiguous()
    for ours, theirs in zip(found, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_in_f32(dtype: torch.dtype) -> None:
    q, k, v = (made(1, 2, 40, 32, dtype=dtype) for _ in range(3))
    mask = MASKS["window"](1, 2, 40, 40)
    assert_same(attend(q, k, v, tile_table(mask), Scoring(32**-0.5))[0], dense(q, k, v, mask)[0].to(dtype))


@pytest.mark.parametrize("dots", [False, pytest.param(True, marks=needs_dots)])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(100, (4, 2), 20), (33, (1, 1), 2), (64, (2, 2), 64), (1, (1, 1), 34)])
def test_bf16_is_multiplied_in_pairs_where_there_are_instructions_for_it(
    dots: bool, tokens: int, heads: tuple[int, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dots:
        monkeypatch.setattr(masked_attention, "_dots", lambda _: False)
    many, few = heads
    q, upstream = (made(2, tokens, many, n, dtype=torch.bfloat16).transpose(1, 2)[..., :size] for n in (size, size + 1))
    k, v = (made(2, few, tokens, n, dtype=torch.bfloat16)[..., :size] for n in (size, size + 1))
    mask = MASKS["window"](2, many, tokens, tokens)
    tables, how = (tile_table(mask), tile_table(mask, turned=True)), Scoring(0.3)
    out, logarithms = attend(q, k, v, tables[0], how)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(wide[0], wide[1], wide[2], mask, 0.3)
    assert_same(out, expected[0].to(torch.bfloat16))
    torch.testing.assert_close(logarithms.double(), expected[1], rtol=1e-5, atol=1e-5)  # products of bf16 are exact
    theirs = torch.autograd.grad(expected[0], wide, upstream.double())
    for mine, exact in zip(gradients(upstream, (q, k, v), out, logarithms, tables, how), theirs, strict=True):
        assert_same(mine, exact.to(torch.bfloat16))


@pytest.mark.parametrize(("what", "loops"), [("forward", 2), ("queries", 4), ("keys", 4)])
def test_a_line_of_queries_is_loaded_once_for_the_pairs_of_eight_keys(what: str, loops: int) -> None:
    named = Target.named("amx")
    contract = attend_blocks(what, 64, 0.125, dots=True)
    planned = pipelines.plan(contract, "attend-blocks", named.vector_bits, features=named.instructions)
    module = jit.optimize(pipelines.lower(planned, named.rounds_to_bf16).llvm_ir, named)
    lines = jit.assembly(module, named).split("\n")
    dots = [at for at, line in enumerate(lines) if "vdpbf16ps" in line]
    assert len(dots) == loops * 64  # four steps of two vectors for eight keys, for tiles hidden in part and not
    assert sum(bool(re.search(r"vbroadcastss\s.*\(", line)) for line in lines[dots[0] - 4 : dots[63]]) == 32
    assert sum(bool(re.search(r"vmov\w+\s.*\(.*zmm", line)) for line in lines[dots[0] - 4 : dots[63]]) == 8


def test_keeps_nan_and_infinity() -> None:
    q, k, v = (made(1, 1, 64, 16) for _ in range(3))
    q[0, 0, 3, 2], k[0, 0, 40, 1] = float("nan"), float("inf")
    mask = MASKS["window"](1, 1, 64, 64)
    out, _ = attend(q, k, v, tile_table(mask), Scoring(0.25))
    assert torch.equal(
        out.isnan(), (q @ k.mT).masked_fill(~mask, 0).isfinite().logical_not().any(-1, keepdim=True) & out.isnan()
    )
    assert out[0, 0, 3].isnan().all()
    assert not out[0, 0, 60].isnan().any()


def test_a_table_lists_what_is_seen() -> None:
    table = tile_table(MASKS["window"](1, 1, 512, 512))
    assert len(table.tiles) == 16 * 4 - 2
    assert table.picture(512, 4).splitlines()[0].strip() != ""
    assert tile_table(MASKS["alike"](3, 4, 64, 64)).positions.shape == (1, 1, 3)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i[:, None] - i).abs() <= 9)


def given_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)


def test_masks_of_positions_become_tables_when_the_graph_is_compiled() -> None:
    q, k, v = (made(2, 2, 256, 16) for _ in range(3))
    run = compile_and_run(windowed, q, k, v, regions=1, min_gain=1.0)
    assert_same(run.output, windowed(q, k, v))
    assert run.regions[0].schedule == "blocks"
    assert run.regions[0].density < 0.35
    assert run.regions[0].reason.endswith("of the tiles are computed, 0.262 MB of mask need not be made")


def test_how_a_mask_is_computed_is_the_same_in_another_process() -> None:
    q, k, v = (made(2, 2, 256, 16) for _ in range(3))
    run = compile_and_run(windowed, q, k, v, regions=1)
    masks = [each for each in computed._table.values() if isinstance(each, AttentionMask) and not _leaves(each)]
    assert masks and run.regions
    for mask in masks:
        read = pickle.loads(pickle.dumps(mask))
        assert read.evaluate.code == mask.evaluate.code
        assert torch.equal(read.values([], [])[0], mask.values([], [])[0])


def _leaves(mask: AttentionMask) -> list[Any]:
    return mask.evaluate.graph.find_nodes(op="placeholder")


def test_masks_that_are_given_are_looked_at_when_they_are_there() -> None:
    q, k, v = (made(2, 2, 256, 16) for _ in range(3))
    mask = MASKS["keys"](2, 2, 256, 256).expand(2, 1, 256, 256).clone()
    mask[:, :, 7] = False
    run = compile_and_run(given_mask, q, k, v, mask, regions=1)
    assert_same(run.output, given_mask(q, k, v, mask))
    mask[:] = MASKS["window"](2, 2, 256, 256)  # noticed, for torch counts writes
    assert_same(run.function(q, k, v, mask), given_mask(q, k, v, mask))
    mask[:] = True
    assert_same(run.function(q, k, v, mask), given_mask(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_numbers_are_added_to_narrow_scores_without_rounding(dtype: torch.dtype) -> None:
    q, k, v = (made(1, 2, 64, 16, dtype=dtype) for _ in range(3))
    mask = ((torch.arange(64) - 620) * 0.5).expand(1, 1, 64, 64).clone()
    mask[:, :, :9] = -1e9
    run = compile_and_run(given_mask, q, k, v, mask, regions=1)
    torch.testing.assert_close(run.output, given_mask(q, k, v, mask), rtol=2e-2, atol=2e-2)


def test_a_query_whose_keys_are_all_lowered_by_a_huge_number_sees_them_equally() -> None:
    """In f32, such a number absorbs the scores."""
    q, k, v = (made(2, 2, 64, 16) for _ in range(3))
    padding = torch.arange(64) < torch.tensor([0, 20])[:, None, None, None]
    mask = torch.zeros(2, 1, 64, 64).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1) | padding, -1e9)
    run = compile_and_run(given_mask, q, k, v, mask, regions=1)
    assert_same(run.output, given_mask(q, k, v, mask))


def test_masks_of_activations_are_looked_at_at_every_call() -> None:
    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(q.sum(-1)[..., None] > 3) & (k.sum(-1)[..., None, :] > 3))

    q, k, v = (made(2, 2, 256, 16) for _ in range(3))
    run = compile_and_run(chosen, q, k, v, regions=1)
    assert "at every call" in run.regions[0].reason and len(run.regions[0].kernels) == 1
    for query in (q, -q):
        assert_same(run.function(query, k, v), chosen(query, k, v))


def packed(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=document[:, None, :, None] == document[:, None, None])
    return q


def test_masks_of_documents_are_looked_at_when_those_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of = []
    monkeypatch.setattr(
        mask_module, "tile_table", lambda mask, *turned: (made_of.append(mask.shape), tile_table(mask, *turned))[1]
    )
    tensors, document = [made(2, 2, 256, 16).requires_grad_() for _ in range(3)], (torch.arange(256) // 40).repeat(2, 1)
    run = compile_and_run(packed, *tensors, document, regions=2, grad=True)
    assert "computed from is new" in run.regions[0].reason
    upstream = made(2, 2, 256, 16)
    wanted = packed(*tensors, document)
    expected = torch.autograd.grad(wanted, tensors, upstream)
    for found in (run.output, run.function(*tensors, document)):
        assert_same(found, wanted)
        for ours, theirs in zip(torch.autograd.grad(found, tensors, upstream), expected, strict=True):
            assert_same(ours, theirs)
    assert len(made_of) == 2  # the mask and its transpose, once for both layers and calls
    document[0, 100:] = 9
    assert_same(run.function(*tensors, document), packed(*tensors, document))
    document[:] = 0  # hides nothing
    assert_same(run.function(*tensors, document), packed(*tensors, document))


def test_a_mask_that_hides_little_is_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torch's own kernel takes it, as numbers to add."""

    def layers(x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[2]) < lengths[:, None])[:, None, None].expand(-1, 1, x.shape[2], -1)
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    x, lengths, times = made(2, 2, 64, 16), torch.tensor([64, 60]), list[int]()
    run = compile_and_run(layers, x, lengths, regions=3)
    evaluated = computed.evaluated
    monkeypatch.setattr(computed, "evaluated", lambda *given: times.append(1) or evaluated(*given))  # type: ignore[func-returns-value]
    for changed in (lengths, torch.tensor([62, 64])):
        assert_same(run.function(x, changed), layers(x, changed))
    assert len(times) == 2  # the table's and the numbers', for the new lengths


@pytest.mark.parametrize("dense_by", ["eager", "inductor"])
def test_gradients_flow(dense_by: str) -> None:
    tensors = [made(1, 2, 256, 16).requires_grad_() for _ in range(3)]
    run = compile_and_run(windowed, *tensors, regions=1, grad=True, dense=dense_by)
    upstream = made(1, 2, 256, 16)
    found = torch.autograd.grad(run.output, tensors, upstream)
    for ours, expected in zip(found, torch.autograd.grad(windowed(*tensors), tensors, upstream), strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("dense_by", ["eager", "inductor"])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_lengths_may_change_in_training(dense_by: str, by_token: bool, returned: bool) -> None:
    """Logarithms lie otherwise in memory than those of torch's operation; no stride of theirs is fixed in the backward."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found if returned else found.sin().sum(-1)

    options = {"dense": dense_by, "min_gain": 0, "strict": True}
    function = torch.compile(attention, backend="sparse", fullgraph=True, dynamic=True, options=options)
    for tokens in (106, 17, 64):
        shape = (3, tokens, 4, 16) if by_token else (3, 4, tokens, 16)
        tensors = [(x.transpose(1, 2) if by_token else x).requires_grad_() for x in (made(*shape) + n for n in range(3))]
        for x in tensors:
            torch._dynamo.mark_static(x, [1, 3])
        mask = (made(3, 4, tokens, tokens) > 0.5).index_fill(3, torch.tensor([0]), True)
        found, wanted = function(*tensors, mask), attention(*tensors, mask)
        assert_same(found, wanted)
        assert found.stride() == wanted.stride() or dense_by == "eager"
        upstream = made(*wanted.shape)
        for a, b in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (found, wanted)), strict=True):
            assert_same(a, b)


def test_sizes_may_stay_open() -> None:
    inputs = [made(1, 2, 256, 16) for _ in range(3)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    run = compile_and_run(windowed, *inputs, regions=1)
    longer = [made(1, 2, 300, 16) for _ in range(3)]
    assert_same(run.output, windowed(*inputs))
    assert_same(run.function(*longer), windowed(*longer))


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, slopes = torch.arange(q.shape[2]), 2.0 ** -torch.arange(1, q.shape[1] + 1)
    added = slopes[:, None, None] * (i - i[:, None])
    hidden = (i > i[:, None]) | (i < i[:, None] - 50)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added.masked_fill(hidden, float("-inf"))[None])


def test_numbers_that_masks_add_are_read_by_tiles() -> None:
    tensors = [made(2, 4, 256, 16).requires_grad_() for _ in range(3)]
    run = compile_and_run(alibi, *tensors, regions=1, grad=True, min_gain=1.0)
    assert "% of the tiles" in run.regions[0].reason
    upstream, expected = made(2, 4, 256, 16), alibi(*tensors)
    assert_same(run.output, expected)
    gradients_of = torch.autograd.grad(expected, tensors, upstream)
    for ours, theirs in zip(torch.autograd.grad(run.output, tensors, upstream), gradients_of, strict=True):
        assert_same(ours, theirs)


def test_numbers_that_masks_of_inputs_add_are_read_when_those_are_new() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :, : q.shape[2]])
        return q

    q, k, v = (made(1, 2, 200, 16) for _ in range(3))
    bias = made(1, 2, 256, 200).masked_fill(made(256, 200) > 0, float("-inf"))
    bias[:, :, :64] = float("-inf")
    lowest = bias.clamp(min=torch.finfo(torch.float32).min)
    run = compile_and_run(layers, q, k, v, bias, regions=2)
    assert "computed from is new" in run.regions[0].reason
    for mask in (bias, lowest, made(1, 2, 256, 200)):  # the last one hides nothing: torch's own kernel takes it
        assert_same(run.function(q, k, v, mask), layers(q, k, v, mask))
        mask[:, :, 3:90] += 2
        assert_same(run.function(q, k, v, mask), layers(q, k, v, mask))


def test_masks_that_hide_little_or_add_what_is_computed_stay_dense() -> None:
    q, k, v = (made(1, 2, 64, 16) for _ in range(3))
    added = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q @ k.mT)
    run = compile_and_run(added, q, k, v, regions=0)
    assert "adds numbers" in run.decisions[0].reason
    run = compile_and_run(given_mask, q, k, v, torch.ones(64, 64, dtype=torch.bool), regions=0, min_gain=1.0)
    assert "too small" in run.decisions[0].reason


def test_what_the_kernel_does_not_compute_says_why() -> None:
    q, k, v = (made(1, 2, 256, 16) for _ in range(3))
    mask = torch.ones(256, 256, dtype=torch.bool).tril()
    run = compile_and_run(given_mask, q, k, v, mask, regions=0, dynamic=True)
    assert [d.reason for d in run.decisions] == [
        "the size of its heads is dynamic: compile without dynamic=True, then torch finds the sizes that change"
    ]
    torch._dynamo.reset()
    q, k, v = (made(1, 2, 64, 512) for _ in range(3))
    run = compile_and_run(given_mask, q, k, v, mask[:64, :64], regions=0)
    assert run.decisions[0].reason.startswith("its heads have 512 features")
