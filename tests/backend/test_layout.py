"""Layouts of views: torch's own strides say where the values of a view lie."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gossamer.backend.chains.heads import matrix_behind
from gossamer.backend.chains.masks import Constants, FirstAlike, hides_later_keys, is_causal, same_for_queries
from gossamer.backend.graph.layout import Axis, Layout, follow, path

B, S, H, D = 3, 10, 4, 8


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> fx.Node:
    """The node of the function's result, with fake values as in graphs that come from AOTAutograd."""
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs).graph
    result: fx.Node = graph.output_node().args[0]
    return result


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)[1],
        lambda x: x.view(B, S, -1).split(H * D, -1)[2].unflatten(-1, (H, D)).transpose(1, 2),
        lambda x: x.view(B, S, 3 * H * D)[:, 2:, 5:].unsqueeze(1).expand(-1, 7, -1, -1),
        lambda x: x.t().unbind(0)[11],
        lambda x: x.unsqueeze(0).squeeze(0)[::3, ::2],
    ],
    ids=["joint", "split", "window", "transposed", "steps"],
)
def test_views_lie_where_torch_says(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(B * S, 3 * H * D)
    nodes, value = path(traced(view, x)), view(x)
    layout = follow(Layout.contiguous(tuple(x.shape)), nodes[1:])
    assert nodes[0].op == "placeholder" and layout is not None
    assert layout.offset == value.storage_offset()
    assert layout.dims == tuple((Axis(*axis),) for axis in zip(value.shape, value.stride(), strict=True))


def test_views_of_nothing_are_not_followed() -> None:
    nodes = path(traced(lambda x: x.view(0, S, H, D).transpose(1, 2), torch.empty(0, H * D)))
    assert follow(Layout.contiguous((0, H * D)), nodes[1:]) is None


def test_what_no_strides_can_say() -> None:
    """Heads that were repeated and copied: two axes in a dimension."""

    def repeated(x: Tensor) -> Tensor:
        return x.view(B, S, H, D).transpose(1, 2)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, 2 * H, S, D)

    found = matrix_behind(traced(repeated, torch.randn(B * S, H * D)), (0, 1, 2, 3))
    assert found is not None
    heads, between = found
    assert (heads.matrix.op, heads.offset, heads.count, heads.by_position) == ("placeholder", 0, H, False)
    assert len(between) == 6


def test_what_is_no_cut_into_heads() -> None:
    """Another order of the columns, some of the tokens."""
    x = torch.randn(B * S, H * D)
    for cut in (
        lambda x: x.view(B, S, D, H).permute(0, 3, 1, 2),
        lambda x: x.view(B, S, H, D)[:, 1:].transpose(1, 2),
        lambda x: x.view(B, S, H, D).transpose(1, 2).repeat(1, 2, 1, 1),
    ):
        found = matrix_behind(traced(cut, x), (0, 1, 2, 3))
        assert found is None or found[0].matrix.op != "placeholder"


def hidden(length: int, padding: Tensor | None, width: int) -> Tensor:
    ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
    seen = (ahead <= 0) & (ahead > -width)
    if padding is not None:
        seen = seen & padding[:, None, None]
    return torch.where(seen, 0.0, float("-inf"))


def test_constant_masks_are_known_before_they_are_computed() -> None:
    with FakeTensorMode():
        given = torch.ones(2, S, dtype=torch.bool)
    for padding, width, causal in ((None, S, True), (None, 4, False), (given, S, False)):
        inputs = () if padding is None else (torch.ones(2, S, dtype=torch.bool),)
        mask = traced(lambda *p, width=width: hidden(S, p[0] if p else None, width), *inputs)
        constants = Constants(mask.graph)
        assert (constants.of(mask) is None) == (padding is not None)
        assert is_causal(constants.of(mask)) == causal
        assert hides_later_keys(mask, constants)


def test_masks_that_show_later_keys() -> None:
    mask = traced(lambda p: torch.where(p[:, None, None].expand(2, 1, S, S), 0.0, float("-inf")), torch.ones(2, S) > 0)
    assert not hides_later_keys(mask, Constants(mask.graph))


@pytest.mark.parametrize(
    ("mask", "alike"),
    [
        (lambda p, _: torch.where(p[:, None, None] & (torch.arange(S)[:, None] >= 0), 0.0, float("-inf")), True),
        (lambda p, _: torch.where(p[:, None, None] & (torch.arange(S)[:, None] + 2 >= 2), 0.0, -1.0), True),
        (lambda p, _: torch.where(p[:, None, None] & (torch.arange(S)[:, None] - 1 >= 0), 0.0, -1.0), False),
        (lambda p, _: torch.where(p[:, None, None] & (torch.arange(S)[:, None] <= 5), 0.0, -1.0), False),
        (lambda p, _: 1.0 - p[:, None, None].expand(2, 1, S, S).float(), True),
        (lambda p, _: p[:, None, :, None].expand(2, 1, S, S) * -1.0, False),
        (lambda p, x: p[:, None, None] * x[:, None], False),
        (lambda p, x: p[:, None, None] * x[:, None, :1], True),
        (lambda p, _: torch.where(p[:, None, None].expand(2, 1, S, S), 0.0, -1.0).bernoulli(), False),
        (lambda p, _: torch.zeros(2, 1, S, S).masked_fill(~p[:, None, None], float("-inf")), True),
    ],
)
def test_masks_that_are_the_same_for_all_queries(mask: Callable[..., Tensor], alike: bool) -> None:
    node = traced(mask, torch.arange(S) < torch.tensor([[S], [4]]), torch.rand(2, S, S))
    assert same_for_queries(node) == alike


def test_the_first_of_values_that_are_computed_alike() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.stack([x + 1, x + 2, x + 1, x.bernoulli(), x.bernoulli(), (x + 2) * -0.0, (x + 2) * 0.0])

    (*values,) = traced(function, torch.rand(3)).args[0]
    first = FirstAlike()
    found = [first.of(value) for value in values]
    assert found == [*values[:2], values[0], *values[3:]]
