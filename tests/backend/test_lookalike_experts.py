"""Code that looks like a mixture of experts, but computes something else: it gives what it gives in eager code."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import Tensor, nn

from gossamer.dialects.errors import ArgumentError
from tests.backend import harness
from tests.backend.experts_in_models import grouped

EXPERTS, HIDDEN = 4, 16
OUTER, INNER = 4, 6
TOKENS = COLUMNS = OUTER * INNER
assert transformers.integrations.moe  # has the grouped product


class Layer(nn.Module):
    """The weights of experts, and a function that runs them for tokens and the logits of a router."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, COLUMNS) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, COLUMNS, HIDDEN) * 0.3)

    def expert(self, x: Tensor, e: int, between: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
        gate, up = F.linear(x, self.up[e]).chunk(2, -1)
        return F.linear(between(F.silu(gate) * up), self.down[e])

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        if len(given) > 1:
            return self.run(self, x, *given)
        scores, chosen = given[0].softmax(-1).topk(2, -1)
        return self.run(self, x, scores, chosen)


def summed(term: Callable[[int], Tensor], start: Tensor | float = 0.0) -> Tensor:
    for e in range(EXPERTS):
        start = start + term(e)
    return start  # type: ignore[return-value]


def own(scores: Tensor, chosen: Tensor, e: int) -> Tensor:
    return (scores * (chosen == e)).sum(-1, keepdim=True)


def turned(rows: Tensor) -> Tensor:
    return rows.view(OUTER, INNER, -1).transpose(0, 1).reshape(TOKENS, -1)


def fixed_point(x: Tensor) -> Tensor:
    return (x * 16).to(torch.int32) / 16


def float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def fewer(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    full = torch.zeros(TOKENS, EXPERTS).scatter(1, c[:15], s[:15])
    return summed(lambda e: m.expert(x, e) * full[:, e : e + 1])


def first_tokens(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(c[:15] == e)
        y.index_add_(0, token, m.expert(x[token], e) * s[token, slot, None])
    return y


def twice(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    y, c = torch.zeros_like(x), c[:, :1].expand(-1, 2)
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        y[token] += s[:, :1].expand(-1, 2)[token, slot, None] * m.expert(x[token], e)
    return y


LOOPS: dict[str, Callable[[Layer, Tensor, Tensor, Tensor], Tensor]] = {
    "results in another order": lambda m, x, s, c: summed(lambda e: turned(m.expert(x, e)) * own(s, c, e)),
    "scores in another order": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * turned(own(s, c, e))),
    "a score for each column": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own(s, c, e).squeeze(-1)),
    "experts of one row": lambda m, x, s, c: summed(lambda e: m.expert(x[:1], e) * own(s, c, e)),
    "a row that is cut off": lambda m, x, s, c: summed(lambda e: m.expert(x, e)[1:] * own(s[1:], c[1:], e)),
    "a sum of more values": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own(s, c, e), x.new_zeros(2, *x.shape)),
    "a sum that starts from 1": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own(s, c, e), 1.0),
    "scores that are integers": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own((4 * s).long(), c, e)),
    "scores that become integers": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own(4 * s, c, e).int()),
    "experts that are unsigned": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own(s, c.to(torch.uint8), e)),
    "experts that are floats": lambda m, x, s, c: summed(lambda e: m.expert(x, e) * own(s, c.float(), e)),
    "rounding to fixed point": lambda m, x, s, c: summed(lambda e: m.expert(x, e, fixed_point) * own(s, c, e)),
    "rounding to 8 bits": lambda m, x, s, c: summed(lambda e: m.expert(x, e, float8) * own(s, c, e)),
    "scores of fewer tokens": fewer,
    "a routing of the first tokens": first_tokens,
    "assignments to a token that chose an expert twice": twice,
}


@pytest.fixture(autouse=True)
def _open_sizes() -> Iterator[None]:
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_computes_something_else_stays_as_it_is(name: str) -> None:
    model, given = Layer(LOOPS[name]), (torch.randn(TOKENS, COLUMNS), torch.randn(TOKENS, EXPERTS))
    run = harness.compile_and_run(model, *given, regions=0, min_gain=1.1)
    assert run.output.dtype is torch.float32
    assert_near(run.output, model(*given).detach())


def gathered(m: Layer, x: Tensor, s: Tensor, c: Tensor, between: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
    gate, up = torch.einsum("th,tkih->tki", x, m.up[c]).chunk(2, -1)
    each = torch.einsum("tki,tkhi->tkh", between(F.silu(gate) * up), m.down[c])
    return torch.einsum("tkh,tk->th", each, s)


@pytest.mark.parametrize("between", [fixed_point, float8, lambda h: h.clamp(-1e9, 1e9)])
def test_gathered_products_with_a_rounding_or_bounds_between_are_no_layer(between: Callable[[Tensor], Tensor]) -> None:
    model = Layer(lambda m, x, s, c: gathered(m, x, s, c, between))
    given = torch.randn(TOKENS, COLUMNS), torch.randn(TOKENS, EXPERTS)
    run = harness.compile_and_run(model, *given)
    assert not any("one operation" in d.reason for d in run.decisions)
    torch.testing.assert_close(run.output, model(*given).detach(), rtol=1e-3, atol=2e-3)


def test_gathered_weights_may_count_from_the_end_and_must_exist() -> None:
    model, x, scores = Layer(gathered), torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS, 2)
    chosen = torch.randint(-EXPERTS, EXPERTS, (TOKENS, 2))
    run = harness.compile_and_run(model, x, scores, chosen, regions=2)
    assert all("one operation for the layer" in d.reason for d in run.regions)
    assert_near(run.output, model(x, scores, chosen).detach())
    chosen[3, 1] = EXPERTS
    with torch.no_grad(), pytest.raises(ArgumentError, match="token 3 chose expert 4"):
        run.function(x, scores, chosen)


def routed(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        y.index_add_(0, token, m.expert(x[token], e) * s[token, slot, None])
    return y


def test_rows_of_tokens_without_an_expert_are_not_read() -> None:
    model, x, scores = Layer(routed), torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS, 2)
    chosen, padding = torch.rand(TOKENS, EXPERTS).topk(2).indices, torch.arange(TOKENS) >= 16
    x[padding], chosen[16:20], chosen[20:] = torch.nan, -1, EXPERTS
    run = harness.compile_and_run(model, x, scores, chosen, grad=True, regions=2)
    assert all("one operation for the layer" in d.reason for d in run.regions)
    expected = model(x, scores, chosen)
    assert_near(run.output, expected)
    leaves = list(model.parameters())
    for found, wanted in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (run.output, expected)), strict=True):
        assert_near(found, wanted)


def test_rows_behind_the_last_end_are_not_read_in_training() -> None:
    x, weight = torch.randn(9, COLUMNS), torch.randn(EXPERTS, COLUMNS, HIDDEN, requires_grad=True)
    ends, x[7:] = torch.tensor([2, 2, 5, 7], dtype=torch.int32), torch.nan
    run = harness.compile_and_run(grouped, x, weight, ends, grad=True, regions=1)
    parts = [x[begin:end] @ weight[e] for e, (begin, end) in enumerate(((0, 2), (2, 2), (2, 5), (5, 7)))]
    found, wanted = (torch.autograd.grad(y[:7].square().sum(), weight)[0] for y in (run.output, torch.cat(parts)))
    assert_near(found, wanted)


def test_ends_of_one_routing_say_nothing_about_rows_sorted_by_another() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, COLUMNS, HIDDEN))

        def forward(self, x: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
            ends = torch.histc(chosen.reshape(-1).float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
            order = torch.sort(others.reshape(-1), stable=True)[1]
            return grouped(x[order // 2], self.weight, ends)

    model, x = Mixed(), torch.randn(TOKENS, COLUMNS)
    chosen, others = (torch.randint(EXPERTS, (TOKENS, 2)) for _ in range(2))
    run = harness.compile_and_run(model, x, chosen, others, regions=1)
    assert_near(run.output, model(x, chosen, others).detach())


def detached(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    def expert(e: int) -> Tensor:
        gate, up = F.linear(x, m.up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up.detach(), m.down[e])

    return summed(lambda e: expert(e) * own(s, c, e))


def frozen(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    def expert(e: int) -> Tensor:
        gate, up = F.linear(x, m.up[e] if e else m.up[e].detach()).chunk(2, -1)
        return F.linear(F.silu(gate) * up, m.down[e])

    return summed(lambda e: expert(e) * own(s, c, e))


def without_gradients(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    def expert(e: int) -> Tensor:
        with torch.no_grad():
            gate = F.linear(x, m.up[e, :HIDDEN])
        return F.linear(F.silu(gate) * F.linear(x, m.up[e, HIDDEN:]), m.down[e])

    return summed(lambda e: expert(e) * own(s, c, e))


@pytest.mark.parametrize("run", [detached, frozen, without_gradients])
def test_a_gradient_that_stops_within_an_expert_stops_there(run: Callable[..., Tensor]) -> None:
    model, x, logits = Layer(run), torch.randn(TOKENS, COLUMNS, requires_grad=True), torch.randn(TOKENS, EXPERTS)
    found = harness.compile_and_run(model, x, logits, grad=True, regions=0, min_gain=1.1)
    leaves = [x, *model.parameters()]
    of = [torch.autograd.grad(y.square().sum(), leaves) for y in (found.output, model(x, logits))]
    for one, other in zip(*of, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("act", "grad", "operations"),
    [
        (lambda h: h.clamp(min=0), False, EXPERTS + 1),
        (lambda h: h.clamp(min=0), True, 0),
        (lambda h: torch.where(h > 0, h, 0.0), False, 0),
    ],
    ids=["clamp", "clamp in training", "where"],
)
def test_relu_in_other_words_keeps_its_slope_at_0_and_its_value_for_nan(
    act: Callable[[Tensor], Tensor], grad: bool, operations: int
) -> None:
    def run(m: Layer, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
        return summed(lambda e: F.linear(act(F.linear(x, m.up[e, :HIDDEN])), m.down[e]) * own(s, c, e))

    model, x, logits = Layer(run), torch.randn(TOKENS, COLUMNS), torch.randn(TOKENS, EXPERTS)
    with torch.no_grad():
        model.up[:, :3] = 0
    x[3] = 0 if grad else float("nan")
    found = harness.compile_and_run(model, x, logits, grad=grad, regions=operations, min_gain=1.1)
    expected = model(x, logits)
    torch.testing.assert_close(found.output, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    if grad:
        of = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (found.output, expected)]
        for one, other in zip(*of, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
