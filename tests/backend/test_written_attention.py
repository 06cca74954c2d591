"""Attention that models write out: which spellings are found, what comes out against dense float64, what stays as it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run

LOWEST, INF = torch.finfo(torch.float32).min, float("inf")


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tensors(length: int = 70, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Of different values."""
    q, k, v = made(3, 2, 4, length, 16).to(dtype)
    return q, k, v


def window(x: Tensor) -> Tensor:
    i = torch.arange(x.shape[-2])
    return (i[:, None] >= i) & (i[:, None] - i < 20)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 5 * torch.tanh(q @ k.transpose(2, 3) * 0.25 / 5)
    hidden = torch.where(window(q), torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)[None, None]
    return F.softmax(scores + hidden, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q / 4 @ k.mT + torch.where(window(q), 0.0, -INF).to(q.dtype), -1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~window(q), -INF).div(4).softmax(3) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(window(q)[None, None], torch.matmul(q, k.mT), -1e9).softmax(-1).matmul(v)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    mask = torch.where(window(q), 0.0, -INF).to(q.dtype).expand(len(q), -1, -1)
    return torch.bmm(torch.baddbmm(mask, q, k.mT, alpha=0.25).softmax(-1), v)


SPELLINGS: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (capped, added, filled, chosen, folded)}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_become_attention_with_gradients(name: str) -> None:
    function, given = SPELLINGS[name], [x.requires_grad_() for x in tensors()]
    wide = [x.detach().double().requires_grad_() for x in given]
    run = compile_and_run(function, *given, regions=1, grad=True)
    assert run.regions[0].schedule == "blocks"
    expected = function(*wide)
    assert_same(run.output, expected.float())
    upstream = made(*expected.shape)
    ours, theirs = torch.autograd.grad(run.output, given, upstream), torch.autograd.grad(expected, wide, upstream.double())
    for mine, exact in zip(ours, theirs, strict=True):
        assert_same(mine, exact.float())


def test_lengths_may_change_and_nan_stays_where_it_is() -> None:
    given = tensors()
    for x in given:
        torch._dynamo.mark_dynamic(x, 2)
    run = compile_and_run(capped, *given, regions=1)
    for length in (70, 129, 33):
        given = tensors(length)
        assert_same(run.function(*given), capped(*(x.double() for x in given)).float())
    given[0][0, 1, 7, 3], given[1][1, 1, 20, 2], given[2][1, 2, 20, 5] = float("nan"), float("nan"), INF
    out = run.function(*given)
    assert out[0, 1, 7].isnan().all()
    assert not out[0, 1, 8:].isnan().any()
    assert out[1, 1, 20:].isnan().all()
    assert not out[1, 1, :20].isnan().any()
    assert (out[1, 2, 20:, 5] == INF).all()
    assert out[1, 2, :20].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    given = tensors(dtype=dtype)
    run = compile_and_run(capped, *given, regions=1)
    assert_same(run.output, capped(*(x.double() for x in given)).to(dtype))


@pytest.mark.parametrize("trained", [False, True])
def test_a_mask_may_be_compared_with_a_buffer_of_ones_and_zeros(trained: bool) -> None:
    """As in minGPT. A query that sees nothing gives NaN, for which the mask is compared once more."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.ones(80, 80).tril()[None, None])

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            length = q.shape[2]
            scores = (q @ k.transpose(-2, -1)) * 0.25
            return scores.masked_fill(self.bias[:, :, :length, :length] == 0, -INF).softmax(-1) @ v

    model, given = Causal(), [x.requires_grad_(trained) for x in tensors()]
    run = compile_and_run(model, *given, regions=1, grad=trained)
    assert run.regions[0].schedule == "blocks" and "computed from is new" in run.regions[0].reason
    expected = model(*given)
    assert_same(run.output, expected)
    if trained:
        ours, theirs = (torch.autograd.grad(y.square().sum(), given) for y in (run.output, expected))
        for found, exact in zip(ours, theirs, strict=True):
            assert_same(found, exact)
    model.bias[..., 0] = 0  # the first query sees nothing
    torch.testing.assert_close(run.function(*given), model(*given), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_queries_without_keys_are_nan_and_double_stays_with_torchs_own() -> None:
    def hides(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(~seen, -INF)).softmax(-1) @ v

    q, k, v = tensors()
    seen = window(q).clone()
    seen[9] = False
    run = compile_and_run(hides, q, k, v, seen, regions=1)
    assert run.output[:, :, 9].isnan().all()
    expected = hides(q.double(), k.double(), v.double(), seen)
    assert_same(run.output.nan_to_num(0), expected.nan_to_num(0).float())
    compiled = compile_and_run(hides, q.double(), k.double(), v.double(), seen, regions=0)
    torch.testing.assert_close(compiled.output, expected, equal_nan=True)


def test_without_a_mask_a_cap_is_a_kernel() -> None:
    def cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh(q @ k.mT / 8) * 8).softmax(-1) @ v

    given = tensors(40)
    run = compile_and_run(cap, *given, dense="inductor", regions=1)
    assert_same(run.output, cap(*(x.double() for x in given)).float())


def test_what_stays_says_why() -> None:
    gate, bias = torch.rand(4, 1, 1), made(1, 4, 70, 70)
    cases: list[tuple[Callable[..., Any], str]] = [
        (
            lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 1.0, True) @ v,
            "dropout of a share that is not fixed, or of everything",
        ),
        (lambda q, k, v: (gate * (q @ k.mT)).softmax(-1) @ v, "multiplied with a tensor"),
        (lambda q, k, v: torch.relu(torch.tanh(q @ k.mT) + bias).softmax(-1) @ v, ""),
        (lambda q, k, v: torch.tanh(q[:, :, :32] @ k.mT).softmax(-1) @ v, "fewer than 4096 pairs"),
        (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "fewer than 65536 pairs"),
    ]
    for function, reason in cases:
        torch.compiler.reset()
        given = tensors()
        run = compile_and_run(function, *given, regions=0, min_gain=1.0)
        reasons = [d.reason for d in run.decisions]
        assert any(reason in r for r in reasons) if reason else not reasons
        assert_same(run.output, function(*given))


def test_scores_and_weights_that_are_converted_to_integers_or_to_8_bits_stay() -> None:
    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).to(torch.int32).to(q.dtype) / 4).softmax(-1) @ v

    def simulated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 4).softmax(-1).to(torch.float8_e4m3fn).to(q.dtype) @ v

    given = tensors(40)
    for function in (whole, simulated):
        torch.compiler.reset()
        run = compile_and_run(function, *given, regions=0)
        assert_same(run.output, function(*given))


def test_masks_that_are_computed_from_the_scores_stay() -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda s: s.masked_fill(s < s.topk(6, -1).values[..., -1:], -INF),
        lambda s: torch.where(s > s.mean(-1, keepdim=True), s, -INF),
        lambda s: s + torch.relu(s - 1),
    ]
    given = [x.requires_grad_() for x in tensors(40)]
    for change in changes:
        torch.compiler.reset()

        def attend(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            return change(q @ k.mT / 4).softmax(-1) @ v

        run = compile_and_run(attend, *given, regions=0, grad=True)
        assert "computed from its scores" in run.decisions[0].reason
        expected = attend(*given)
        assert_same(run.output, expected)
        ours, theirs = (torch.autograd.grad(y.square().sum(), given) for y in (run.output, expected))
        for found, exact in zip(ours, theirs, strict=True):
            assert_same(found, exact)


@pytest.mark.parametrize("masked", [False, True])
def test_features_of_a_head_may_lie_apart(masked: bool) -> None:
    """As behind a convolution: [batch, heads, features, pixels], which torch's own kernel does not read."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.mT @ k
        return ((scores.masked_fill(~window(q.mT), -INF) if masked else scores).softmax(-1) @ v.mT).mT

    given = [x.mT.contiguous().requires_grad_() for x in tensors()]
    run = compile_and_run(attend, *given, regions=int(masked), grad=True)
    expected = attend(*given)
    assert_same(run.output, expected)
    upstream = made(*expected.shape)
    ours, theirs = (torch.autograd.grad(y, given, upstream) for y in (run.output, expected))
    for found, exact in zip(ours, theirs, strict=True):
        assert_same(found, exact)


def test_a_batch_that_only_the_mask_has_stays() -> None:
    """Scores of positions are the same for all texts of a batch."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~seen, -INF).softmax(-1) @ v

    q, k, v = tensors()
    seen = torch.arange(70).expand(2, 1, 1, 70) < torch.tensor([70, 50]).view(2, 1, 1, 1)
    run = compile_and_run(attend, q[0], k[0], v, seen, regions=0)
    assert "have a batch" in run.decisions[0].reason
    assert_same(run.output, attend(q[0], k[0], v, seen))


def test_weights_that_are_used_elsewhere_stay() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT + torch.where(window(q), 0.0, -INF)).softmax(-1)
        return weights @ v, weights

    given = tensors()
    run = compile_and_run(both, *given, regions=0)
    assert_same(run.output[1], both(*given)[1])
    assert "used elsewhere" in run.decisions[0].reason


def test_models_that_write_it_out() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    grouped = {**sizes, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Gemma2Config(
        **grouped, attn_logit_softcapping=5.0, sliding_window=16, layer_types=["sliding_attention"]
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    dense, ids = copy.deepcopy(model).double(), torch.randint(0, 64, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = dense(ids, use_cache=False).last_hidden_state.float()
        for disable, op in (((), "linear"), (("sparse-weights",), "attention")):  # in a chain, by itself
            torch.compiler.reset()
            run = compile_and_run(lambda x: model(x, use_cache=False).last_hidden_state, ids, disable=disable)
            assert {d.op for d in run.regions} == {op}
            assert_same(run.output, expected)


@pytest.mark.parametrize("how", ["added", "capped", "filled"])
def test_queries_whose_keys_are_all_hidden_by_a_low_number_train(how: str) -> None:
    """Their keys have equal weights; what is put in the place of scores has no gradient, what is added to them has."""
    padding = torch.zeros(2, 1, 70, 70).masked_fill(torch.arange(70) < 20, LOWEST)
    padding = torch.minimum(padding, torch.full((70, 70), LOWEST).triu(1))

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / 4
        if how == "filled":
            return scores.masked_fill(mask < 0, -1e9).softmax(-1) @ v
        return ((5 * torch.tanh(scores / 5) if how == "capped" else scores) + mask).softmax(-1) @ v

    given = [x.requires_grad_() for x in tensors()]
    run = compile_and_run(function, *given, padding, regions=1, grad=True)
    expected = function(*given, padding)
    assert_same(run.output, expected)
    upstream = torch.randn_like(run.output)
    ours, theirs = (torch.autograd.grad(y, given, upstream, retain_graph=True) for y in (run.output, expected))
    for one, same in zip(ours, theirs, strict=True):
        assert_same(one, same)


def test_a_number_below_those_of_float16_hides_as_minus_infinity_does() -> None:
    sees = torch.ones(70, 70, dtype=torch.bool).tril(-1)  # the first query sees no key

    def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        return torch.where(sees, q @ k.mT / 4, -1e9).softmax(-1) @ v

    given = tensors(dtype=torch.float16)
    run = compile_and_run(attend, *given, sees, regions=1)
    assert run.output[:, :, 0].isnan().all() and attend(*given, sees)[:, :, 0].isnan().all()
    exact = attend(*(x.double() for x in given), sees)[:, :, 1:]
    assert_same(run.output[:, :, 1:], exact.half())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("open_sizes", [False, True])
def test_no_tokens(open_sizes: bool, masked: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores.masked_fill(~window(q), -INF) if masked else scores).softmax(-1) @ v

    given = [x.requires_grad_() for x in tensors()]
    if open_sizes:
        for x in given:
            torch._dynamo.mark_dynamic(x, (0, 2))
    run = compile_and_run(attend, *given, regions=int(masked), grad=True)
    assert_same(run.output, attend(*given))
    for shape in ((3, 2, 0, 16), (0, 2, 70, 16)):
        nothing = [torch.zeros(shape, requires_grad=True) for _ in range(3)]
        found = run.function(*nothing)
        assert found.shape == shape
        found.sum().backward()
        assert all(x.grad is not None and x.grad.shape == shape for x in nothing)


def test_tokens_that_only_values_count() -> None:
    """There may be none, by whose number torch's operation would divide."""

    def attend(x: Tensor, kept: Tensor) -> Tensor:
        q = x[kept].view(-1, 2, 16).transpose(0, 1)[None]
        return (q @ q.mT).softmax(-1) @ q

    x = made(70, 32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compile_and_run(attend, x, torch.arange(70) < 60, regions=0)
        assert "no tokens" in run.decisions[0].reason
        for count in (60, 1, 0):
            assert_same(run.function(x, torch.arange(70) < count), attend(x, torch.arange(70) < count))


@pytest.mark.parametrize("length", [16, 24, 32, 70])
@pytest.mark.parametrize("low", [-1.0, -20.0, -1e4, -1e9, LOWEST, -INF])
def test_a_number_for_each_key_is_added_for_all_queries(low: float, length: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 0.25 + mask.to(q), -1) @ v

    q, k, v = (x.requires_grad_() for x in tensors(length))
    mask = torch.zeros(2, 1, 1, length)
    mask[0, ..., length * 2 // 3 :] = low
    run = compile_and_run(attend, q, k, v, mask, grad=True)
    expected = attend(*(x.double() for x in (q, k, v)), mask)
    assert_same(run.output, expected.float())
    ours, theirs = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (run.output, expected))
    for found, exact in zip(ours, theirs, strict=True):
        assert_same(found, exact)
