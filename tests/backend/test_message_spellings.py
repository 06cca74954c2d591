"""Spellings of attention over an edge list, and of sums of messages, that train: eager torch's numbers and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.backend.harness import assert_same, compile_and_run
from tests.backend.messages import NODES, edges, operations, trained

HEADS, SIZE = 2, 3

Weights = Callable[[Tensor, Tensor], Tensor]
"""Of scores [edges, heads] and the target of each edge."""


def sums(p: Tensor, target: Tensor) -> Tensor:
    return torch.zeros(NODES, p.shape[1]).index_add(0, target, p)


def maxima(z: Tensor, target: Tensor) -> Tensor:
    return torch.full((NODES, z.shape[1]), -torch.inf).scatter_reduce(0, target[:, None].expand_as(z), z, "amax")


def reduced_maxima(z: Tensor, target: Tensor) -> Tensor:
    return torch.zeros(NODES, z.shape[1]).index_reduce(0, target, z, "amax", include_self=False)


def shifted(z: Tensor, target: Tensor) -> Tensor:
    return (z - maxima(z.detach(), target)[target]).exp()


def logarithm_of_sums(z: Tensor, target: Tensor) -> Tensor:
    m = maxima(z.detach(), target)
    return sums((z - m[target]).exp(), target).log() + m


def log_softmax(z: Tensor, target: Tensor) -> Tensor:
    d = z - maxima(z.detach(), target)[target]
    return d - sums(d.exp(), target).log()[target]


WEIGHTS: dict[str, Weights] = {
    "nothing subtracted": lambda z, t: (lambda p: p / sums(p, t)[t])(z.exp()),
    "maxima subtracted": lambda z, t: (lambda p: p / sums(p, t)[t])(shifted(z, t)),
    "maxima with a gradient": lambda z, t: (lambda p: p / (sums(p, t) + 1e-16)[t])((z - maxima(z, t)[t]).exp()),
    "maxima by index_reduce": lambda z, t: (lambda p: p / (sums(p, t)[t] + 1e-16))((z - reduced_maxima(z, t)[t]).exp()),
    "the largest score of all": lambda z, t: (lambda p: p / sums(p, t)[t])((z - z.max()).exp()),
    "the largest score of each head": lambda z, t: (lambda p: p / sums(p, t)[t])((z - z.detach().amax(0, True)).exp()),
    "sums that are clamped": lambda z, t: (lambda p: p / sums(p, t).clamp(min=1e-6)[t])(shifted(z, t)),
    "times a reciprocal": lambda z, t: (lambda p: p * (1 / sums(p, t))[t])(shifted(z, t)),
    "times a gathered reciprocal": lambda z, t: (lambda p: p * sums(p, t)[t].reciprocal())(shifted(z, t)),
    "logarithm of sums": lambda z, t: (z - logarithm_of_sums(z, t)[t]).exp(),
    "exponential of a log softmax": lambda z, t: log_softmax(z, t).exp(),
}


class Layer(nn.Module):
    """A function of two tensors of nodes, and an edge list."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        return self.function(x, a, b, index)


def check(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], heads: int, expected: list[str], dense: str) -> None:
    """Compiles it, and compares the gradients of all three tensors."""
    layer = Layer(function)
    given = torch.randn(NODES, heads, SIZE), torch.randn(NODES, heads), torch.randn(NODES, heads)
    run, ours, theirs = trained(layer, *given, edges(), dense=dense)
    assert operations(run) == expected, run.decisions
    assert not counters["graph_break"]
    for mine, eager in zip(ours, theirs, strict=True):
        assert_same(mine, eager)


ATTENTION = ["graph attention", "graph attention backward"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_softmax_by_targets_is_attention(name: str) -> None:
    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        weight = WEIGHTS[name](F.leaky_relu(a[index[0]] + b[index[1]], 0.2), index[1])
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight[:, :, None])

    check(attended, HEADS, ATTENTION, "eager")


@pytest.mark.parametrize("name", ["maxima with a gradient", "logarithm of sums", "sums that are clamped"])
def test_inductors_decompositions_are_attention_as_well(name: str) -> None:
    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        weight = WEIGHTS[name](F.leaky_relu(a[index[0]] + b[index[1]], 0.2), index[1])
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight[:, :, None])

    check(attended, HEADS, ATTENTION, "inductor")


@pytest.mark.parametrize("floor", ["added", "clamped"])
def test_a_sum_that_is_divided_afterwards_is_attention(floor: str) -> None:
    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        p = shifted(a[index[0]] + b[index[1]], index[1])
        total = sums(p, index[1])
        whole = torch.zeros_like(x).index_add(0, index[1], x[index[0]] * p[:, :, None])
        return whole / (total + 1e-16 if floor == "added" else total.clamp(min=1e-6))[:, :, None]

    check(attended, HEADS, ATTENTION, "eager")


def test_a_division_of_zero_by_zero_stays() -> None:
    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        p = shifted(a[index[0]] + b[index[1]], index[1])
        whole = torch.zeros_like(x).index_add(0, index[1], x[index[0]] * p[:, :, None])
        return (whole / sums(p, index[1])[:, :, None]).nan_to_num()

    given = torch.randn(NODES, HEADS, SIZE), torch.randn(NODES, HEADS), torch.randn(NODES, HEADS), edges()
    run, *_ = trained(Layer(attended), *given)
    assert "graph attention" not in operations(run)
    assert "softmax and sums run separately: a target without edges divides zero by zero" in {d.reason for d in run.decisions}
    assert_same(run.output, attended(*given))


class OwnExponential(torch.autograd.Function):
    """An exponential whose gradient is twice as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def test_gradients_that_autograd_did_not_make_are_kept() -> None:
    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        p = OwnExponential.apply(a[index[0]] + b[index[1]])
        weight = p / sums(p, index[1])[index[1]]
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight[:, :, None])

    given = torch.randn(NODES, HEADS, SIZE), torch.randn(NODES, HEADS), torch.randn(NODES, HEADS), edges()
    run, ours, expected = trained(Layer(attended), *given)
    (reason,) = [d.reason for d in run.decisions if d.op == "graph attention"]
    assert reason.startswith("softmax and sums run separately: ")
    for mine, eager in zip(ours, expected, strict=True):
        assert_same(mine, eager)


@pytest.mark.parametrize("kind", ["mean", "amax"])
def test_rows_without_edges_that_keep_their_values_stay(kind: str) -> None:
    def kept(x: Tensor, index: Tensor) -> Tensor:
        return x.index_reduce(0, index[1], x[index[0]], kind, include_self=False)

    x, index = torch.randn(NODES, SIZE), edges()
    run = compile_and_run(kept, x, index, regions=0)
    assert_same(run.output, kept(x, index))


def test_several_maxima_of_the_same_messages_train() -> None:
    def both(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        messages = gathered(x, index)
        return reduced(messages, index, "amax") - 2 * reduced(messages, index, "amin")

    kinds = ["max aggregation", "max aggregation backward", "min aggregation", "min aggregation backward"]
    check(both, 1, ["aggregation backward", *kinds], "eager")


def test_scores_in_a_column_are_attention() -> None:
    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        p = shifted(a[index[0]] + b[index[1]], index[1])
        x = x.squeeze(1)
        weight = p / sums(p, index[1])[index[1]]
        return torch.zeros_like(x).index_add(0, index[1], weight * x[index[0]])

    check(attended, 1, ATTENTION, "eager")


@pytest.mark.parametrize("scores", ["sum", "product"])
def test_scores_of_heads_with_a_last_dimension_of_one_are_attention(scores: str) -> None:
    """As DGL computes them."""

    def attended(x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        z = a[:, :, None][index[0]] + b[:, :, None][index[1]]
        z = F.leaky_relu(z, 0.2) if scores == "sum" else (x[index[0]] * x.sin()[index[1]]).sum(-1, keepdim=True) + z
        each = index[1][:, None, None].expand_as(z)
        most = torch.full((NODES, HEADS, 1), -torch.inf).scatter_reduce(0, each, z.detach(), "amax")
        p = (z - most[index[1]]).exp()
        weight = p / torch.zeros(NODES, HEADS, 1).index_add(0, index[1], p)[index[1]]
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight)

    check(attended, HEADS, ATTENTION, "eager")


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.squeeze(1)[index[0]]


def put(messages: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(NODES, SIZE).index_add(0, index[1], messages)


def reduced(messages: Tensor, index: Tensor, kind: str) -> Tensor:
    return torch.zeros(NODES, SIZE).index_reduce(0, index[1], messages, kind, include_self=False)


def norm(index: Tensor) -> Tensor:
    """One over the square root of each degree."""
    return torch.zeros(NODES, 1).index_add(0, index[1], torch.ones(index.shape[1], 1)).clamp(min=1) ** -0.5


SUM = ["aggregation", "aggregation backward"]
MESSAGES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], list[str]]] = {
    "times a number": (lambda x, a, b, e: put(gathered(x, e) * 0.5, e), SUM),
    "over a number": (lambda x, a, b, e: put(gathered(x, e) / 3, e), SUM),
    "negative": (lambda x, a, b, e: put(-gathered(x, e), e), SUM),
    "weighted before and after": (
        lambda x, a, b, e: put(0.5 * gathered(x, e) * a[e[0]], e),
        [*SUM, "aggregation backward", "edge products backward"],
    ),
    "alpha": (lambda x, a, b, e: torch.zeros(NODES, SIZE).index_add(0, e[1], gathered(x, e), alpha=0.25), SUM),
    "degrees of both sides": (lambda x, a, b, e: put(gathered(x, e) * norm(e)[e[0]] * norm(e)[e[1]] * 2, e), SUM),
    "mean by index_reduce": (lambda x, a, b, e: reduced(gathered(x, e), e, "mean"), SUM),
    "maximum by index_reduce": (
        lambda x, a, b, e: reduced(gathered(x, e), e, "amax"), ["max aggregation", "max aggregation backward"],
    ),
    "maximum of what edges compute": (
        lambda x, a, b, e: reduced((gathered(x, e) * a[e[1]]).tanh(), e, "amax"),
        ["aggregation backward", "aggregation backward", "max aggregation", "max aggregation backward"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_sum_of_messages_is_a_product(name: str) -> None:
    function, expected = MESSAGES[name]
    check(function, 1, expected, "eager")
