"""Attention in chains, however a model spells it: heads that are rotated or shared, tokens position by position."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gossamer.backend.chains.heads import ROLES, matrix_behind
from tests.backend.harness import assert_same, compile_and_run, prune_

HEADS = 4


def tables(length: int, columns: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, length, columns]; those of the second half of the columns are other ones than the first's."""
    positions = torch.arange(length * batch).reshape(batch, length, 1)
    angles = positions * 1.3 ** -torch.arange(columns)
    return angles.cos(), angles.sin()


def swapped(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in GPT-NeoX and the Llama family."""
    return x * cos + swapped(x) * sin


def apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same with tables of half the columns."""
    low, high = x.chunk(2, -1)
    c, s = (table[..., : low.shape[-1]] for table in (cos, sin))
    return torch.cat((low * c - high * s, high * c + low * s), -1)


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of each head only, as in Phi."""
    width = x.shape[-1] // 2
    turned, kept = x[..., :width], x[..., width:]
    return torch.cat((by_halves(turned, cos[..., :width], sin[..., :width]), kept), -1)


class Norm(nn.Module):
    """By root mean squares, in f32 at least, as transformers has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Normalized(nn.Module):
    """Attention with norms of the heads of queries and keys, which are rotated if there are tables."""

    def __init__(self, early: bool = True, norm: Callable[[int], nn.Module] = Norm) -> None:
        super().__init__()
        self.early, self.norms = early, nn.ModuleList([norm(8), norm(8)])
        self.project = nn.ModuleList([nn.Linear(32, width, bias=False) for width in (32, 16, 16)])
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in self.project)
        if self.early:
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if not self.early:
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        if tables:
            q, k = (by_halves(t, *tables) for t in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2))


class Attention(nn.Module):
    """Attention with rotated heads."""

    def __init__(self, size: int = 8, kv_heads: int = 2, rotate=by_halves, repeat: bool = True, early: bool = False) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        width = HEADS * size
        self.size, self.rotate, self.repeat, self.early = size, rotate, repeat, early
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * size) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.size) for p in (self.q, self.k, self.v))
        heads = 2 if self.early else 1  # the dimension of the heads where they are rotated
        c, s = cos.unsqueeze(heads), sin.unsqueeze(heads)
        if not self.early:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = self.rotate(q, c, s), self.rotate(k, c, s)
        if self.early:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = v.transpose(1, 2)
        if self.repeat:
            k, v = (
                t[:, :, None].expand(-1, -1, HEADS // t.shape[1], -1, -1).reshape(batch, HEADS, length, self.size)
                for t in (k, v)
            )
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=not self.repeat)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """RMS norms and a gated FFN around it: as in the Llama family."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = nn.ModuleList([nn.RMSNorm(32), nn.RMSNorm(32)])
        self.gate, self.up = (nn.Linear(32, 40, bias=False) for _ in range(2))
        self.down = nn.Linear(40, 32, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def model(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return prune_(module).eval()


def assert_one_chain(run, contractions: int) -> None:  # type: ignore[no-untyped-def]
    assert [d.reason for d in run.regions] == [f"in a chain of {contractions}"] * contractions


def test_a_layer_of_the_llama_family_is_one_chain() -> None:
    layer, x, (cos, sin) = model(Layer()), torch.randn(1, 100, 32), tables(100, 8)
    run = compile_and_run(layer, x, cos, sin)
    assert_one_chain(run, 7)
    assert_same(run.output, layer(x, cos, sin))


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (2, 37)),
        ({"size": 32, "kv_heads": 1, "repeat": False}, (2, 37)),
        ({"size": 64, "kv_heads": 4, "rotate": apart}, (1, 33)),
        ({"rotate": partly, "early": True}, (2, 37)),
    ],
    ids=["llama", "one head of keys", "halves apart", "part of a head"],
)
def test_rotated_heads_are_part_of_a_chain(options: dict, shape: tuple[int, int]) -> None:  # type: ignore[type-arg]
    layer = model(Attention(**options))
    x = torch.randn(*shape, HEADS * layer.size)
    cos, sin = tables(shape[1], layer.size)
    run = compile_and_run(layer, x, cos, sin)
    assert_one_chain(run, 4)
    assert_same(run.output, layer(x, cos, sin))


def test_columns_that_are_no_pairs_are_rotated_outside_of_a_chain() -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 1:], x[..., :1]), -1) * sin

    layer, x, (cos, sin) = model(Attention(size=3, rotate=rotate)), torch.randn(2, 37, HEADS * 3), tables(37, 3)
    run = compile_and_run(layer, x, cos, sin)
    assert not any("chain of 4" in d.reason for d in run.regions)
    assert_same(run.output, layer(x, cos, sin))


@pytest.mark.parametrize(
    ("dtype", "early", "norm", "rotated"),
    [(torch.float64, False, nn.RMSNorm, False), (torch.bfloat16, True, Norm, True)],
)
def test_norms_of_heads_are_part_of_a_chain(dtype: torch.dtype, early: bool, norm: type, rotated: bool) -> None:
    layer = model(Normalized(early, norm)).to(dtype).requires_grad_(False)
    x, given = torch.randn(2, 37, 32, dtype=dtype), [t.to(dtype) for t in tables(37, 8)] if rotated else []
    run = compile_and_run(layer, x, *given)
    assert_one_chain(run, 4)
    rounding = 0.1 if dtype is torch.bfloat16 else 1e-10  # the tile keeps f32
    torch.testing.assert_close(run.output, layer(x, *given), rtol=rounding, atol=rounding)
    x[0] = float("nan")
    found = run.function(x, *given)
    assert found[0].isnan().all() and torch.equal(found[1], run.output[1])


def test_norms_of_heads_of_any_length_and_of_dense_weights() -> None:
    layer = model(Normalized())
    run = compile_and_run(layer, torch.randn(2, 37, 32), *tables(37, 8), dynamic=True, min_gain=1e-6)
    assert_one_chain(run, 4)
    for batch, length in ((3, 64), (5, 9)):
        x, given = torch.randn(batch, length, 32), tables(length, 8)
        assert_same(run.function(x, *given), layer(x, *given))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
        assert_same(run.function(x, *given), layer(x, *given))


def test_each_sequence_may_have_positions_of_its_own() -> None:
    layer, x, (cos, sin) = model(Attention()), torch.randn(2, 37, 32), tables(37, 8, batch=2)
    run = compile_and_run(layer, x, cos, sin)
    assert_one_chain(run, 4)
    assert_same(run.output, layer(x, cos, sin))


def test_one_kernel_serves_every_batch_and_length() -> None:
    layer = model(Attention())
    run = compile_and_run(layer, torch.randn(2, 37, 32), *tables(37, 8), dynamic=True)
    assert_one_chain(run, 4)
    for batch, length in ((2, 37), (3, 64), (5, 9)):
        x, (cos, sin) = torch.randn(batch, length, 32), tables(length, 8)
        assert_same(run.function(x, cos, sin), layer(x, cos, sin))


def test_a_weight_that_becomes_dense_runs_the_chain_densely() -> None:
    layer, x, (cos, sin) = model(Attention(rotate=partly, early=True)), torch.randn(2, 37, 32), tables(37, 8)
    run = compile_and_run(layer, x, cos, sin, min_gain=1e-6)
    assert_one_chain(run, 4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
        assert_same(run.function(x, cos, sin), layer(x, cos, sin))


def window(length: int, width: int) -> Tensor:
    """Additive: each query sees the last so many keys up to itself."""
    ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
    return torch.zeros(length, length).masked_fill((ahead > 0) | (ahead <= -width), -math.inf)[None, None]


def test_masks() -> None:
    """One that the graph makes of padding and what is constant, and one that comes from outside."""
    layer, x, (cos, sin) = model(Attention()), torch.randn(2, 37, 32), tables(37, 8)
    padding = torch.ones(2, 37, dtype=torch.bool)
    padding[1, 30:] = False

    def padded(x: Tensor, padding: Tensor) -> Tensor:
        seen = torch.ones(37, 37, dtype=torch.bool).tril()[None, None] & padding[:, None, None]
        return layer(x, cos, sin, seen)

    for function, inputs in ((padded, (x, padding)), (layer, (x, cos, sin, window(37, 16)))):
        run = compile_and_run(function, *inputs)
        assert_one_chain(run, 4)
        assert_same(run.output, function(*inputs))


@pytest.mark.parametrize("batch_first", [False, True])
def test_tokens_position_by_position(batch_first: bool) -> None:
    """`nn.MultiheadAttention` brings tokens into that order by itself, and back."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        layer = nn.TransformerEncoderLayer(64, 2, 96, batch_first=batch_first)
        network = model(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
        padding = torch.zeros(3, 50, dtype=torch.bool)
        padding[2, 40:] = True
        masks = {"src_key_padding_mask": padding} if batch_first else {"mask": torch.randn(50, 50), "is_causal": False}

        def function(x: Tensor) -> Tensor:
            return network(x, **masks)

        x = torch.randn(*(3, 50) if batch_first else (50, 3), 64)
        run = compile_and_run(function, x)
        assert_one_chain(run, 4)
        assert_same(run.output, function(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_tokens_in_another_order_without_attention_part_a_chain() -> None:
    first, second = (model(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))) for _ in range(2))

    def function(x: Tensor) -> Tensor:
        return second(first(x).transpose(0, 1))

    x = torch.randn(40, 3, 32)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["in a chain of 2"] * 4
    assert_same(run.output, function(x))


def windows(count: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Attention within so many windows of all tokens, in whichever sequences they are, and the layer that follows."""
    layer = model(Attention())

    def attend(x: Tensor) -> Tensor:
        q, k, v = (p(x).view(count, -1, t, 8).transpose(1, 2) for p, t in ((layer.q, 4), (layer.k, 2), (layer.v, 2)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return y.transpose(1, 2).reshape(x.shape)

    return layer.out, attend


@pytest.mark.parametrize("count", [1, 6])
def test_what_changes_places_is_not_the_sequences_of_attention(count: int) -> None:
    """Windows: sequences of the model are none of attention, and rows of the result lie in an order that no chain knows."""
    out, attend = windows(count)
    x = torch.randn(2, 24, 32)
    for function, contractions in (
        (lambda x: out(attend(x).transpose(0, 1)), 3),
        (lambda x: (out(attend(x)) + x).transpose(0, 1) + 1, 4),
    ):
        run = compile_and_run(function, x)
        assert [d.reason for d in run.regions if "chain" in d.reason] == [f"in a chain of {contractions}"] * contractions
        assert len(run.regions) == 4
        assert_same(run.output, function(x))


def test_a_single_sequence_may_be_written_position_by_position() -> None:
    """A dimension of one value changes places with any other, and all rows stay where they are."""
    out, attend = windows(6)
    x = torch.randn(1, 48, 32)

    def function(x: Tensor) -> Tensor:
        return out(attend(x).transpose(0, 1))

    run = compile_and_run(function, x)
    assert_one_chain(run, 4)
    assert_same(run.output, function(x))


@pytest.mark.parametrize(("shape", "batch"), [((2, 1), 1), ((1, 24), 2)], ids=["positions", "sequences"])
def test_heads_that_their_tables_repeat(shape: tuple[int, int], batch: int) -> None:
    """The rows of the rotated queries are not those of the matrix that they were cut from."""
    layer = model(Attention())
    angles = torch.randn(batch, 1, 24, 8)

    def function(first: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(t).view(*t.shape[:2], -1, 8).transpose(1, 2) for p, t in ((layer.q, first), (layer.k, x), (layer.v, x)))
        y = F.scaled_dot_product_attention(by_halves(q, cos, sin), k, v, enable_gqa=True)
        return layer.out(y.transpose(1, 2).reshape(x.shape))

    inputs = torch.randn(*shape, 32), torch.randn(2, 24, 32), angles.cos(), angles.sin()
    run = compile_and_run(function, *inputs)
    assert len(run.regions) == 4 and not any("chain of 4" in d.reason for d in run.regions)
    assert_same(run.output, function(*inputs))


def test_one_angle_for_all_tokens() -> None:
    """Numbers in place of tables: no rotation that a chain knows."""
    layer, x, angle = model(Attention()), torch.randn(2, 24, 32), torch.tensor(0.3)

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).view(2, 24, -1, 8).transpose(1, 2) for p in (layer.q, layer.k, layer.v))
        y = F.scaled_dot_product_attention(by_halves(q, cos, sin), k, v, enable_gqa=True)
        return layer.out(y.transpose(1, 2).reshape(x.shape))

    run = compile_and_run(function, x, angle.cos(), angle.sin())
    assert len(run.regions) == 4 and not any("chain" in d.reason for d in run.regions)
    assert_same(run.output, function(x, angle.cos(), angle.sin()))


def test_tables_of_two_widths_in_one_chain() -> None:
    """Queries and keys of equal heads, whose tables have a column for each pair, or for each column."""
    layer, x, (cos, sin) = model(Attention(kv_heads=4)), torch.randn(2, 24, 32), tables(24, 8)

    def function(x: Tensor, *given: Tensor) -> Tensor:
        q, k, v = (p(x).view(2, 24, 4, 8).transpose(1, 2) for p in (layer.q, layer.k, layer.v))
        y = F.scaled_dot_product_attention(by_halves(q, *given[:2]), apart(k, *given[2:]), v)
        return layer.out(y.transpose(1, 2).reshape(x.shape))

    inputs = x, *(t[:, None] for t in (cos, sin)), *(t[:, None, :, 4:].contiguous() for t in (cos, sin))
    run = compile_and_run(function, *inputs)
    assert_one_chain(run, 4)
    assert_same(run.output, function(*inputs))


def test_keys_from_before_are_attended_to_by_a_kernel_of_their_own() -> None:
    """Decoding: one query, and keys that are kept. The layers around attention run as they would alone."""
    layer, x, (cos, sin) = model(Attention()), torch.randn(2, 1, 32), tables(1, 8)
    past = torch.randn(2, 2, 20, 8)

    def function(x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (p(x).view(2, 1, -1, 8).transpose(1, 2) for p in (layer.q, layer.k))
        keys = torch.cat((past, by_halves(k, cos[:, None], sin[:, None])), 2)
        y = F.scaled_dot_product_attention(by_halves(q, cos[:, None], sin[:, None]), keys, keys, enable_gqa=True)
        return layer.out(y.transpose(1, 2).reshape(2, 1, -1)), keys

    run = compile_and_run(function, x, past)
    assert sorted(d.op for d in run.regions) == ["attention", "linear", "linear", "linear"]
    assert not any("chain" in d.reason for d in run.regions)
    for actual, expected in zip(run.output, function(x, past), strict=True):
        assert_same(actual, expected)


def test_heads_may_be_cut_from_their_matrix_by_views_that_change_nothing() -> None:
    graph = fx.Graph()
    matrix = graph.placeholder("matrix")
    heads = graph.call_function(torch.ops.aten.view.default, (matrix, [1, 1, 3, 8]))
    matrix.meta["val"] = heads.meta["val"] = torch.empty(1, 1, 3, 8)
    found = matrix_behind(heads, ROLES[0])
    assert found is not None and found[0].matrix is matrix and found[1] == [heads]
