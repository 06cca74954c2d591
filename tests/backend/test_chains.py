"""Chains: several layers in one region, and what stands between them, in any model that is written that way."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.region_op import region
from gossamer.runtime.target import host
from tests.backend.harness import assert_same, compile_and_run, prune_

D, HIDDEN, HEADS = 32, 48, 4

needs_dot = pytest.mark.skipif(
    host().vector_bits < 512 or "bf16dots" not in host().instructions, reason="this machine has no AVX512-BF16"
)


class Attention(nn.Module):
    """Self-attention with separate projections, or one for all three."""

    def __init__(self, joint: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.project = nn.ModuleList([nn.Linear(D, 3 * D)] if joint else [nn.Linear(D, D) for _ in range(3)])
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        parts = [projection(x) for projection in self.project]
        q, k, v = parts[0].split(D, dim=-1) if len(parts) == 1 else parts
        q, k, v = (t.view(b, s, HEADS, D // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, s, D))


class Ffn(nn.Module):
    """Up, activation, down; gated as in the Llama family, or plain."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.gate = nn.Linear(D, HIDDEN, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x) if self.gate is not None else F.gelu(self.up(x))
        return self.down(hidden)


class PostNorm(nn.Module):
    """A layer as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(), Ffn()
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + self.attention(x, mask))
        return self.norms[1](x + self.ffn(x))


class PreNorm(nn.Module):
    """A layer as in GPT or ViT."""

    def __init__(self, causal: bool = False, gated: bool = False, joint: bool = True) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(joint, causal), Ffn(gated)
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.ffn(self.norms[1](x))


def model(module: nn.Module, block: tuple[int, int] = (1, 1)) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return prune_(module, block=block).eval()


def regions(compiled_graph: torch.fx.GraphModule) -> int:
    return sum(node.target is region for node in compiled_graph.graph.nodes)


@pytest.mark.parametrize(
    ("build", "contractions", "length"),
    [
        (PostNorm, 6, 100),
        (PreNorm, 4, 1),
        (lambda: PreNorm(causal=True), 4, 100),
        (lambda: PreNorm(gated=True, joint=False), 7, 1),
        (lambda: nn.Sequential(PostNorm(), PostNorm()), 12, 100),
    ],
    ids=["post-norm", "pre-norm", "causal", "gated", "two layers"],
)
def test_a_transformer_layer_is_one_chain(build, contractions: int, length: int) -> None:  # type: ignore[no-untyped-def]
    module, x = model(build()), torch.randn(3 if length == 1 else 1, length, D)
    run = compile_and_run(module, x)
    assert [d.reason for d in run.regions] == [f"in a chain of {contractions}"] * contractions
    assert_same(run.output, module(x))


@pytest.mark.parametrize(
    ("schedule", "block", "dtype"),
    [
        ("broadcast", (1, 1), torch.float32),
        ("block", (4, 4), torch.float32),
        ("block", (6, 1), torch.float64),
        ("rowpairs", (1, 1), torch.float32),
        ("broadcast", (1, 1), torch.float32),
        ("broadcast", (1, 1), torch.bfloat16),
        pytest.param("pairs", (1, 1), torch.bfloat16, marks=needs_dot),
        pytest.param("bf16dot", (16, 2), torch.bfloat16, marks=needs_dot),
    ],
)
def test_the_products_of_a_chain_have_the_schedule_that_suits_them(
    schedule: str, block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.backend.chains.chain_cost.runs_in_chains", lambda name, matrix: name == schedule)
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: True)
    module, x = model(Ffn(), block).to(dtype), torch.randn(75, D, dtype=dtype)
    run = compile_and_run(module, x, disable=["smaller-layers"])
    assert [(d.schedule, d.reason) for d in run.regions] == [(schedule, "in a chain of 2")] * 2
    expected = module.double()(x.double())
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(run.output.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pays", [True, False])
def test_products_that_are_too_dense_by_themselves_are_tried_in_a_chain(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.weights.plan.judge", lambda *_: ("too dense for a gain of 1.1x", 1.0))
    monkeypatch.setattr("gossamer.backend.weights.plan.gain_without_call", lambda *_: 1.0)
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: pays)
    module, x = model(Ffn()), torch.randn(100, D)
    run = compile_and_run(module, x, min_gain=1.1, regions=2 if pays else 0)
    taken = "in a chain of 2; gain of the whole kernel, predicted"
    assert [d.reason for d in run.decisions] == [taken if pays else "too dense for a gain of 1.1x"] * 2
    assert_same(run.output, module(x))


def test_each_weight_of_a_chain_has_its_own_schedule() -> None:
    module, x = model(Ffn()), torch.randn(100, D)
    with torch.no_grad():
        module.up.weight.copy_(torch.randn(HIDDEN // 4, D // 4).relu().repeat_interleave(4, 0).repeat_interleave(4, 1))
    run = compile_and_run(module, x)
    assert {d.reason for d in run.regions} == {"in a chain of 2"}
    first, second = (d.schedule for d in run.regions)
    assert first == "block" != second
    assert_same(run.output, module(x))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_dot)])
def test_widths_that_take_equal_room_in_the_tile(dtype: torch.dtype) -> None:
    """40 and 48 columns: stages on them are alike in all but that."""
    first, second, third = (model(nn.Linear(a, b)).to(dtype) for a, b in ((40, 48), (48, 40), (40, 48)))

    def function(x: Tensor) -> Tensor:
        hidden = first(F.gelu(x))
        return third(F.gelu(second(F.gelu(hidden)))) * hidden + F.gelu(hidden)

    x = torch.randn(50, 40, dtype=dtype)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["in a chain of 3"] * 3
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(run.output, function(x), rtol=tolerance, atol=tolerance)


@needs_dot
def test_layers_of_equal_shape_that_are_stored_differently() -> None:
    """How a weight is cut into panels depends on its density."""
    torch.manual_seed(0)
    layers = [prune_(nn.Linear(768, 768, bias=False), density).to(torch.bfloat16) for density in (0.2, 0.05)]

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + F.gelu(layer(x))
        return x

    x = torch.randn(64, 768, dtype=torch.bfloat16)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["in a chain of 2"] * 2
    assert len({d.format for d in run.regions}) == 2
    torch.testing.assert_close(run.output, function(x), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dynamic", [None, True])
def test_sums_of_what_is_looked_up_enter_a_chain_as_one_matrix(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    words, places, layer = nn.Embedding(50, D), nn.Embedding(30, D), model(PostNorm())

    def function(tokens: Tensor, given: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        return layer(words(tokens) * 2 + places(positions) + given)

    read = list[list[Tensor]]()
    call = CompiledRegion.__call__
    monkeypatch.setattr(CompiledRegion, "__call__", lambda chain, tensors: read.append(tensors) or call(chain, tensors))
    tokens, given = torch.randint(50, (3, 20)), torch.randn(3, 20, D)
    run = compile_and_run(function, tokens, given, dynamic=dynamic, regions=6)
    assert {d.reason for d in run.regions} == {"in a chain of 6"}
    assert_same(run.output, function(tokens, given))
    assert [x.shape for x in read[-1] if x.dim() == 3 or x.shape[0] == 60] == [given.shape]


def test_attention_over_keys_and_values_from_outside_sees_all_tiles_of_a_sequence() -> None:
    class Given(PostNorm):
        def forward(self, x: Tensor, *parts: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (t.view(*t.shape[:2], HEADS, D // HEADS).transpose(1, 2) for t in parts)
            y = F.scaled_dot_product_attention(q, k, v)
            x = self.norms[0](x + self.attention.out(y.transpose(1, 2).reshape(x.shape)))
            return self.norms[1](x + self.ffn(x))

    module, given = model(Given()), [torch.randn(2, 150, D) for _ in range(4)]
    run = compile_and_run(module, *given)
    assert [d.reason for d in run.regions] == ["in a chain of 3"] * 3
    assert_same(run.output, module(*given))


@pytest.mark.parametrize("threads", [2, 5])
def test_more_threads_than_tiles_share_them_out(threads: int) -> None:
    module, x = model(nn.Sequential(PostNorm(), PreNorm())), torch.randn(2, 70, D)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        run = compile_and_run(module, x)
        assert {d.reason for d in run.regions} == {"in a chain of 10"}
        assert_same(run.output, module(x))
    finally:
        torch.set_num_threads(before)


def test_one_kernel_serves_every_batch_and_length() -> None:
    module = model(PostNorm())
    x = torch.randn(2, 30, D)
    run = compile_and_run(module, x, dynamic=True)
    assert {d.reason for d in run.regions} == {"in a chain of 6"}
    for batch, length in ((2, 30), (3, 64), (1, 65), (5, 9)):
        x = torch.randn(batch, length, D)
        assert_same(run.function(x), module(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    """Narrow floats are normalized in f32, as torch does."""
    module, x = model(PostNorm()).to(dtype), torch.randn(2, 40, D, dtype=dtype)
    run = compile_and_run(module, x)
    assert {d.reason for d in run.regions} == {"in a chain of 6"}
    torch.testing.assert_close(run.output.double(), module.double()(x.double()), rtol=5e-2, atol=5e-2)


def test_the_norm_of_a_row_of_equal_numbers_is_its_bias() -> None:
    """The mean of such a row, as of padding, must be exact: the norm divides by almost nothing."""
    module = model(nn.Sequential(nn.Linear(D, 16, bias=False), nn.GELU(), nn.Linear(16, 768), nn.LayerNorm(768)))
    nn.init.constant_(module[2].bias, 100.1)
    x = torch.randn(40, D)
    x[25:] = 0
    run = compile_and_run(module, x)
    assert {d.reason for d in run.regions} == {"in a chain of 2"}
    assert_same(run.output[25:], module[3].bias.expand(15, -1))
    torch.testing.assert_close(run.output, module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [1, 4])
def test_small_layers_are_a_chain_for_few_tokens_too(length: int) -> None:
    """Beside products that small, calls are what costs."""
    module, x = model(PostNorm()), torch.randn(1, length, D)
    run = compile_and_run(module, x)
    assert {d.reason for d in run.regions} == {"in a chain of 6"}
    assert_same(run.output, module(x))


@pytest.mark.parametrize("shape", [(1, 512), (4, 512)])
def test_layers_follow_each_other_for_few_tokens(shape: tuple[int, int]) -> None:
    """Each by the schedule that it would have alone."""
    module, x = model(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))), torch.randn(shape)
    run = compile_and_run(module, x, regions=2)
    assert all("chain of 2" in d.reason for d in run.regions)
    assert_same(run.output, module(x))


def test_many_short_sequences_run_one_by_one() -> None:
    """No tile has tokens of two sequences."""
    module, x = model(PostNorm()), torch.randn(200, 1, D)
    run = compile_and_run(module, x, regions=7)  # attention over a single key is one, too
    assert not any("chain of 6" in d.reason for d in run.regions)
    assert_same(run.output, module(x))


def test_a_schedule_that_is_asked_for_runs_layer_by_layer() -> None:
    module, x = model(Ffn()), torch.randn(40, D)
    run = compile_and_run(module, x, schedule="broadcast")
    assert not any("chain" in d.reason for d in run.regions)
    assert_same(run.output, module(x))


def test_a_value_that_is_used_elsewhere_leaves_a_chain() -> None:
    first, second = model(Ffn()), model(Ffn())

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = first(x)
        return second(y), y.cos()

    x = torch.randn(40, D)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["in a chain of 4"] * 4
    for actual, expected in zip(run.output, function(x), strict=True):
        assert_same(actual, expected)


def test_a_dense_layer_parts_a_chain() -> None:
    parts = [model(Ffn()), nn.Conv1d(40, 40, 1, groups=2), model(Ffn())]

    def function(x: Tensor) -> Tensor:
        return parts[2](parts[1](parts[0](x)))

    x = torch.randn(3, 40, D)
    with torch.no_grad():
        run = compile_and_run(function, x)
        assert [d.reason for d in run.regions if d.op == "linear"] == ["in a chain of 2"] * 4
        assert_same(run.output, function(x))


def test_a_weight_that_becomes_dense_runs_the_chain_densely() -> None:
    module, x = model(PostNorm()), torch.randn(2, 40, D)
    run = compile_and_run(module, x, min_gain=1e-6)
    assert {d.reason for d in run.regions} == {"in a chain of 6"}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
        assert_same(run.function(x), module(x))


def test_changed_values_are_taken_over() -> None:
    module, x = model(Ffn()), torch.randn(40, D)
    run = compile_and_run(module, x, regions=2)
    with torch.no_grad():
        module.up.weight.mul_(2)
        module.down.weight.neg_()
        assert_same(run.function(x), module(x))


def test_no_tokens_give_no_rows() -> None:
    module = model(Ffn())
    run = compile_and_run(module, torch.randn(40, D), dynamic=True, regions=2)
    assert run.function(torch.empty(0, D)).shape == (0, D)


def test_training_keeps_what_backward_needs() -> None:
    module, x = model(Ffn()).train(), torch.randn(40, D, requires_grad=True)
    run = compile_and_run(module, x, grad=True, regions=4)
    run.output.sum().backward()
    gradient, x.grad = x.grad, None
    module(x).sum().backward()
    assert_same(gradient, x.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bad", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.float64)])
def test_what_a_later_token_has_reaches_no_earlier_one(bad: float, dtype: torch.dtype) -> None:
    module = model(PreNorm(causal=True)).to(dtype)
    x = torch.randn(2, 70, D, dtype=dtype)
    run = compile_and_run(module, x, regions=4)
    assert {d.reason for d in run.regions} == {"in a chain of 4"}
    for at in (0, 3, 31, 40, 69):
        given = x.clone()
        given[0, at, 5] = bad
        with torch.no_grad():
            out, clean = run.function(given), module(x)
        assert_same(out[0, :at], clean[0, :at])
        assert_same(out[1], clean[1])
        assert out[0, at:].isnan().any(-1).all()
