"""Spellings of attention that become one operation with its gradients, each against dense float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.harness import assert_same, compile_and_run

INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
LENGTH = 70


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(*biases: Sequence[int]) -> list[Tensor]:
    """Queries, keys and values of different numbers, and biases of some shapes, all with gradients."""
    given = made(3, 2, 4, LENGTH, 16).unbind()
    return [x.clone().requires_grad_() for x in (*given, *(made(*shape) for shape in biases))]


def hidden(x: Tensor) -> Tensor:
    """All but a window of 20 keys up to the query."""
    i = torch.arange(x.shape[-2])
    return (i[:, None] < i) | (i[:, None] - i >= 20)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / 4).masked_fill(hidden(q), -INF)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.25).masked_fill(hidden(q), -INF).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def einsum_by_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    weights = torch.einsum("bqhd,bkhd->bhqk", *by_token[:2]).mul(0.25).masked_fill(hidden(q), -INF).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, by_token[2]).transpose(1, 2)


def powers_by_their_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    power = (s - s.amax(-1, keepdim=True)).exp()
    return (power / power.sum(-1, keepdim=True)) @ v


def powers_of_a_detached_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    power = (s - s.max(-1, keepdim=True).values.detach()).exp()
    return (power / power.sum(-1, keepdim=True)) @ v


def powers_by_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


def zeroed_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in ESPnet and in Transformer-XL."""
    away = hidden(q)
    return (q @ k.mT / 4).masked_fill(away, LOWEST).softmax(-1).masked_fill(away, 0.0) @ v


def kept_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in GPT-1 and GPT-2."""
    kept = (~hidden(q)).to(q.dtype)
    return (q @ k.mT / 4 * kept - 1e9 * (1 - kept)).softmax(-1) @ v


def added_per_product(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias in the product itself, as in BLOOM."""
    folded = [x.flatten(0, 1) for x in (bias.expand(2, -1, -1, -1), q, k.mT)]
    s = torch.baddbmm(*folded, alpha=0.25).unflatten(0, (2, 4))
    return s.masked_fill(hidden(q), -INF).softmax(-1) @ v


def slopes(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    i = torch.arange(LENGTH)
    return (q @ k.mT / 4 + slope[:, None, None] * (i - i[:, None])).masked_fill(hidden(q), -INF).softmax(-1) @ v


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "a scale that fills a tensor": lambda q, k, v: (
        (q @ k.mT / torch.full([], 16**0.5, dtype=q.dtype)).masked_fill(hidden(q), -INF).softmax(-1) @ v
    ),
    "a scale that is a tensor": lambda q, k, v: (q @ k.mT * torch.tensor(0.25)).masked_fill(hidden(q), -INF).softmax(-1) @ v,
    "the square root of a tensor": lambda q, k, v: (
        (q @ k.mT / torch.sqrt(torch.tensor(16.0))).masked_fill(hidden(q), -INF).softmax(-1) @ v
    ),
    "a scale before and after": lambda q, k, v: ((q / 2) @ (k / 4).mT * 2).masked_fill(hidden(q), -INF).softmax(-1) @ v,
    "powers by their sum": powers_by_their_sum,
    "powers of a detached largest": powers_of_a_detached_largest,
    "exp of log_softmax": lambda q, k, v: F.log_softmax(scores(q, k), -1).exp() @ v,
    "powers by logsumexp": powers_by_logsumexp,
    "einsum": einsum,
    "einsum by tokens": einsum_by_tokens,
    "weights that are zeroed": zeroed_weights,
    "scores that are kept": kept_scores,
}
"""Those of three operands."""

BIASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "in the product": (added_per_product, (1, 4, LENGTH, LENGTH)),
    "slopes": (slopes, (4,)),
    **{
        f"of {'x'.join(map(str, shape))}": (
            lambda q, k, v, bias: (q @ k.mT / 4 + bias).masked_fill(hidden(q), -INF).softmax(-1) @ v,
            shape,
        )
        for shape in ((1, 1, 1, LENGTH), (LENGTH, 1), (4, 1, 1), (4, LENGTH, LENGTH))
    },
}
"""What is added, and the shape of what it is made of."""


def check(function: Callable[..., Tensor], given: list[Tensor], dense: str = "eager") -> None:
    """One region, and output and gradients as in float64."""
    run = compile_and_run(function, *given, regions=1, grad=True, dense=dense)
    assert run.regions[0].schedule == "blocks"
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
    expected = function(*wide)
    assert_same(run.output, expected.float())
    upstream = made(*expected.shape)
    ours = torch.autograd.grad(run.output, [x for x in given if x.requires_grad], upstream)
    theirs = torch.autograd.grad(expected, [x for x in wide if x.requires_grad], upstream.double())
    for mine, exact in zip(ours, theirs, strict=True):
        assert_same(mine, exact.float())


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_trains(name: str) -> None:
    check(SPELLINGS[name], tensors())


@pytest.mark.parametrize("name", ["powers by their sum", "powers by logsumexp", "einsum by tokens", "weights that are zeroed"])
def test_a_spelling_trains_after_inductors_decompositions(name: str) -> None:
    check(SPELLINGS[name], tensors(), dense="inductor")


@pytest.mark.parametrize("name", BIASES)
def test_what_is_added_has_a_gradient_of_its_shape(name: str) -> None:
    function, shape = BIASES[name]
    check(function, tensors(shape))


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)])
def test_only_some_operands_train(trained: tuple[int, ...]) -> None:
    given = [x.requires_grad_(n in trained) for n, x in enumerate(x.detach() for x in tensors())]
    check(lambda q, k, v: scores(q, k).softmax(-1) @ v, given)


def test_queries_and_values_may_be_one_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, x.mT).masked_fill(hidden(x), -INF).softmax(-1), x)

    check(function, [(made(8, LENGTH, 16) / 4).requires_grad_()])


def test_what_is_added_to_replaced_scores_has_no_gradient_of_ours() -> None:
    """Where a low number replaces all scores of a query, they have equal weights, and what is added to them has a gradient."""
    away = hidden(torch.zeros(LENGTH, 1)) | (torch.arange(LENGTH) < 30)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ((q @ k.mT / 4).masked_fill(away, -1e9) + bias).softmax(-1) @ v

    given = tensors((4, LENGTH, LENGTH))
    run = compile_and_run(function, *given, regions=0, grad=True)
    assert "masked scores has a gradient" in run.decisions[0].reason


class Scaled(torch.autograd.Function):
    """A softmax whose gradient is its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_custom_gradient_stays_and_says_why() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Scaled.apply(scores(q, k)) @ v

    given = tensors()
    run = compile_and_run(function, *given, regions=0, grad=True)
    assert "gradient is computed in part by something else" in run.decisions[0].reason
    upstream = made(*run.output.shape)
    ours, theirs = (torch.autograd.grad(y, given, upstream) for y in (run.output, function(*given)))
    for mine, exact in zip(ours, theirs, strict=True):
        assert_same(mine, exact)
