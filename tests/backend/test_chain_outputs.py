"""Chains whose values are used elsewhere: what a prefill returns for its cache, residuals, hidden states of every layer."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.backend.harness import assert_same, compile_and_run, pruned
from tests.backend.test_chains import HEADS, D, PreNorm, model


class Prefill(PreNorm):
    """A decoder layer that returns its output, and its keys and values as a cache keeps them, which is new and empty."""

    def __init__(self) -> None:
        super().__init__(causal=True, gated=True, joint=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        def turned(t: Tensor) -> Tensor:
            low, high = t.chunk(2, -1)
            return t * cos + torch.cat([-high, low], -1) * sin

        h, (b, s, _) = self.norms[0](x), x.shape
        q, k, v = (p(h).view(b, s, HEADS, D // HEADS).transpose(1, 2) for p in self.attention.project)
        nothing = torch.tensor([], dtype=x.dtype)
        k, v = torch.cat([nothing, turned(k)], -2), torch.cat([nothing, v], -2)
        y = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = x + self.attention.out(y.transpose(1, 2).reshape(b, s, D))
        return x + self.ffn(x), k, v


class Decoder(nn.Module):
    """Some layers; all keys and values."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Prefill() for _ in range(layers)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, list[Tensor]]:
        cache = []
        for layer in self.layers:
            x, *kept = layer(x, cos, sin)
            cache += kept
        return x * 2, cache


@pytest.mark.parametrize("dynamic", [False, True])
def test_keys_and_values_leave_the_chain_of_all_layers(dynamic: bool) -> None:
    layers = 1 if dynamic else 2
    module = model(Decoder(layers))
    first, *others = [_inputs(batch, length) for batch, length in ((2, 40), (1, 17), (3, 2))]
    run = compile_and_run(module, *first, dynamic=dynamic, regions=7 * layers)
    assert {d.reason for d in run.regions} == {f"in a chain of {7 * layers}"}
    for given in (first, *(others if dynamic else ())):
        found, expected = (tree_leaves(f(*given)) for f in (run.function, module))
        assert len(found) == 1 + 2 * layers
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    nothing = [torch.full_like(first[0], float("nan")), *first[1:]]
    assert all(leaf.isnan().all() for leaf in tree_leaves(run.function(*nothing)))


class Joint(nn.Module):
    """A layer as in GPT-2, whose keys and values, parts of one product, are returned."""

    def __init__(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 48), nn.Linear(48, D)
        self.norm, self.cut = nn.LayerNorm(D), cut

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, s, _ = x.shape
        parts = self.cut(self.project(self.norm(x)))
        q, k, v = (t.reshape(b, s, HEADS, D // HEADS).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, D))
        return x + self.down(F.gelu(self.up(x))), k, v


class Layers(nn.Module):
    """Two of them, and all that they return."""

    def __init__(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.first, self.second = Joint(cut), Joint(cut)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, *kept = self.first(x)
        return *self.second(x), *kept


CUTS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "split": lambda t: t.split(D, dim=-1),
    "chunk": lambda t: t.chunk(3, -1),
    "split_with_sizes": lambda t: t.split([D, D, D], -1),
    "unbind": lambda t: t.unflatten(-1, (3, D)).unbind(-2),
    "slices": lambda t: [t[..., n * D : (n + 1) * D] for n in range(3)],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_parts_of_a_product_that_leave_a_chain_are_computed_once(cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Else all that comes before them runs a second time, in torch."""
    module, x = model(Layers(cut)), torch.randn(2, 24, D)
    run = compile_and_run(module, x, regions=8)
    assert {d.reason for d in run.regions} == {"in a chain of 8"}
    with torch.no_grad(), torch.profiler.profile() as profile:
        found = run.function(x)
    products = {"aten::addmm", "aten::mm", "aten::linear", "aten::scaled_dot_product_attention"}
    assert products.isdisjoint(event.key for event in profile.key_averages())
    for one, other in zip(found, module(x), strict=True):
        assert_same(one, other)


def _inputs(batch: int, length: int) -> list[Tensor]:
    """Tokens, cosines and sines."""
    return [torch.randn(batch, length, D), *torch.randn(2, 1, length, D // HEADS)]


class Stack(nn.Module):
    """Layers with all their outputs; one is used outside of a chain before the last layer, in the order of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([pruned(48, 48) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = torch.relu(x @ self.weights[0])
        b = a @ self.weights[1] + x
        outside = b.sort(-1).values
        c = F.gelu(b @ self.weights[2])
        return a, outside, c.mean(0), c @ self.weights[3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hidden_states_leave_a_chain(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Stack().to(dtype).requires_grad_(False)
    run = compile_and_run(module, torch.randn(40, 48, dtype=dtype), regions=4)
    assert {d.reason for d in run.regions} == {"in a chain of 4"}
    for tokens in (1, 33, 0):
        x = torch.randn(tokens, 48, dtype=dtype)
        for one, other in zip(run.function(x), module(x), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            if dtype is not torch.bfloat16:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    with torch.no_grad():
        for weight in module.weights:
            weight.copy_(torch.randn_like(weight) / 7)  # dense now: torch computes it
    x = torch.randn(20, 48, dtype=dtype)
    tolerance = 0.2 if dtype is torch.bfloat16 else 1e-4
    for one, other in zip(run.function(x), module(x), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_what_comes_back_does_not_leave() -> None:
    """A value whose use outside is read again further on ends the chain there."""
    torch.manual_seed(0)
    weights = nn.ParameterList([pruned(48, 48) for _ in range(4)]).requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        a = torch.relu(x @ weights[0]) @ weights[1]
        back = a.sort(-1).values
        return torch.relu(a @ weights[2]) @ weights[3] + back

    x = torch.randn(40, 48)
    run = compile_and_run(function, x, regions=4)
    assert {d.reason for d in run.regions} == {"in a chain of 2"}
    assert_same(run.output, function(x))


def test_in_training_a_chain_has_one_output() -> None:
    torch.manual_seed(0)
    module, x = Stack(), torch.randn(40, 48, requires_grad=True)
    run = compile_and_run(module, x, grad=True)
    assert not any("chain of 4" in d.reason for d in run.regions)
    sum(y.sum() for y in run.output).backward()
    found, x.grad = x.grad, None
    sum(y.sum() for y in module(x)).backward()
    assert found is not None and x.grad is not None
    assert_same(found, x.grad)


class Later(nn.Module):
    """Layers with their tokens position by position, [S, B], which all give their outputs."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 2, 48, batch_first=False, norm_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return outputs


def test_tokens_position_by_position_leave_a_chain() -> None:
    module, x = model(Later()), torch.randn(20, 3, 32)
    run = compile_and_run(module, x, regions=8)
    assert {d.reason for d in run.regions} == {"in a chain of 8"}
    for one, other in zip(run.output, module(x), strict=True):
        assert_same(one, other)


def test_two_chains_never_wait_for_each_other() -> None:
    """Each reads what the other gives, though no node of either comes back to it."""
    torch.manual_seed(0)
    w = nn.ParameterList([pruned(48, 48) for _ in range(8)]).requires_grad_(False)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.relu(x @ w[0]) @ w[1], torch.relu(y @ w[2]) @ w[3]
        across, back = a.sort(-1).values, b.sort(-1).values
        return torch.relu(a @ w[4]) @ w[5] + back, torch.relu(b @ w[6]) @ w[7] + across

    x, y = torch.randn(2, 40, 48)
    run = compile_and_run(function, x, y, regions=8)
    assert sum("in a chain" in d.reason for d in run.regions) >= 6
    for one, other in zip(run.output, function(x, y), strict=True):
        assert_same(one, other)


class OneSequence(PreNorm):
    """Queries by an einsum, for which torch puts all sequences into one: the chain's first value is not shaped as its last."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        h, (b, s, _), (query, *others) = self.norms[0](x), x.shape, self.attention.project
        q = torch.einsum("...i,oi->...o", h, query.weight).view(b, s, HEADS, D // HEADS).transpose(1, 2)
        k, v = (p(h).view(b, s, HEADS, D // HEADS).transpose(1, 2) for p in others)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, D)
        return x + self.attention.out(y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_sequences_stay_apart_where_a_product_puts_them_together(dynamic: bool) -> None:
    module = model(OneSequence(causal=False, gated=False, joint=False))
    first, *others = [_inputs(batch, length) for batch, length in ((3, 7), (2, 17), (4, 2))]
    run = compile_and_run(module, *first, dynamic=dynamic)
    assert any("chain" in d.reason for d in run.regions)
    for given in (first, *(others if dynamic else ())):
        assert_same(run.function(*given), module(*given))


class TwoEnds(nn.Module):
    """A product of a chain's result beside another of it, whose sizes come from that result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.einsum, self.last = pruned(D, D), pruned(D, 48), pruned(D, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x @ self.first)
        x = x @ self.first + x
        return torch.stack([torch.einsum("...i,io->...o", x, self.einsum), x @ self.last]).sum(0).transpose(-1, -2)


def test_sizes_of_a_chains_result_are_known_before_they_are_used() -> None:
    module = TwoEnds()
    run = compile_and_run(module, x := torch.randn(3, 3, D), dynamic=True)
    assert_same(run.output, module(x))
    assert_same(run.function(y := torch.randn(2, 5, D)), module(y))


@pytest.mark.parametrize("others", [0, 1])
def test_random_numbers_are_drawn_in_the_order_of_the_model(others: int) -> None:
    """Users of a chain's first result run behind the chain, unless this changes the order."""
    up, down = pruned(D, 48), pruned(48, D)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ up
        drawn = F.dropout(y, 0.5)
        noise = [torch.rand(40) for _ in range(others)]
        return torch.relu(y) @ down, drawn, *noise

    run = compile_and_run(function, x := torch.randn(40, D), regions=2)
    assert all(("in a chain" in d.reason) == (not others) for d in run.regions)
    results = []
    for each in (run.function, function):
        torch.manual_seed(0)
        results.append(each(x))
    for one, other in zip(*results, strict=True):
        assert_same(one, other)
