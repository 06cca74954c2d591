"""Monarch matrices and other batches of small products in a row become sparse products in one kernel."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.report.report import Decision, collect

OPTIONS = {"strict": True, "dense": "eager"}


class Monarch(nn.Module):
    """16 blocks of 20 x 24, and 24 blocks of 16 x 30, whose features are dealt out between them."""

    def __init__(self, written: Callable[["Monarch", Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.written = written
        self.first = nn.Parameter(torch.randn(16, 24, 20, dtype=dtype) / 5)
        self.second = nn.Parameter(torch.randn(24, 30, 16, dtype=dtype) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def einsum(m: Monarch, x: Tensor) -> Tensor:
    h = torch.einsum("tkp,kqp->tkq", x.view(-1, 16, 20), m.first).transpose(1, 2)
    return torch.einsum("tlr,lsr->tls", h, m.second).transpose(1, 2).reshape(*x.shape[:-1], -1)


def bmm(m: Monarch, x: Tensor) -> Tensor:
    h = torch.bmm(x.view(-1, 16, 20).transpose(0, 1), m.first.transpose(1, 2)).permute(2, 1, 0)
    return torch.bmm(h, m.second.transpose(1, 2)).permute(1, 2, 0).reshape(*x.shape[:-1], -1)


def activated(m: Monarch, x: Tensor) -> Tensor:
    h = torch.einsum("tkp,kqp->tkq", x.view(-1, 16, 20), m.first).transpose(1, 2).reshape(-1, 384)
    h = F.gelu(h).view(-1, 24, 16)
    return torch.einsum("tlr,lsr->tls", h, m.second).flatten(1).view(*x.shape[:-1], -1)


def features_first(m: Monarch, x: Tensor) -> Tensor:
    h = torch.bmm(m.first, x.view(-1, 16, 20).permute(1, 2, 0))
    return torch.bmm(m.second, h.transpose(0, 1)).permute(2, 1, 0).reshape(*x.shape[:-1], -1)


SPELLINGS = [einsum, bmm, activated, features_first]


def run(model: nn.Module, x: Tensor, **options: object) -> tuple[Tensor, list[Decision]]:
    with torch.no_grad(), collect() as found:
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS | options)(x)
    return y, found.decisions


def reference(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def close(y: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def in_a_row(decisions: list[Decision]) -> tuple[int, int]:
    """How many batches became sparse weights, and how many of these share a kernel with another."""
    return sum(each.schedule == "blocks" for each in decisions), sum("in a chain of 2" in each.reason for each in decisions)


@pytest.mark.parametrize("written", SPELLINGS)
@pytest.mark.parametrize("sizes", [(96, 320), (3, 40, 320)])
def test_two_batches_in_a_row_are_one_kernel(written: Callable[[Monarch, Tensor], Tensor], sizes: tuple[int, ...]) -> None:
    model, x = Monarch(written), torch.randn(sizes)
    y, decisions = run(model, x)
    assert in_a_row(decisions) == (2, 2) and y.stride() == model(x).stride()
    assert decisions[0].reason == "16 blocks of 20x24, 2 such products in a row: one sparse weight"
    close(y, reference(model, x))


@pytest.mark.parametrize("written", SPELLINGS)
def test_an_open_number_of_tokens(written: Callable[[Monarch, Tensor], Tensor]) -> None:
    model, x = Monarch(written), torch.randn(96, 320)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    with torch.no_grad(), collect() as found:
        for tokens in (96, 131, 5):
            given = x if tokens == 96 else torch.randn(tokens, 320)
            close(compiled(given), reference(model, given))
    assert in_a_row(found.decisions) == (2, 2)


def test_changed_and_copied_blocks() -> None:
    model, x = Monarch(einsum), torch.randn(96, 320)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.first.mul_(2), lambda: model.load_state_dict(Monarch(bmm).state_dict())):
            change()
            close(compiled(x), reference(model, x))
        other = copy.deepcopy(model)
        other.second.neg_()
        close(torch.compile(other, backend="sparse", options=OPTIONS)(x), reference(other, x))


def test_few_tokens_stay_with_torch() -> None:
    model, x = Monarch(einsum), torch.randn(16, 320)
    y, decisions = run(model, x)
    assert not decisions
    close(y, reference(model, x))


def test_training_stays_with_torch() -> None:
    model, x = Monarch(einsum), torch.randn(96, 320)
    with collect() as found:
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)(x)
        got = torch.autograd.grad(y.square().sum(), [*model.parameters()])
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    assert not found.decisions
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)


def test_one_batch_alone_stays_with_torch() -> None:
    model = Monarch(lambda m, x: torch.einsum("tkp,kqp->tkq", x.view(-1, 16, 20), m.first).flatten(1))
    y, decisions = run(model, x := torch.randn(96, 320))
    assert not decisions
    close(y, reference(model, x))


def test_views_that_mix_tokens_and_features_stay() -> None:
    """The blocks of the second batch are tokens of the first."""

    def mixed(m: Monarch, x: Tensor) -> Tensor:
        h = torch.einsum("tkp,kqp->tkq", x.view(-1, 16, 20), m.first)
        return torch.bmm(h.reshape(24, -1, 16), m.second.transpose(1, 2))

    model, x = Monarch(mixed), torch.randn(96, 320)
    y, decisions = run(model, x)
    assert not decisions
    close(y, reference(model, x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float64, 1e-9)])
def test_other_types(dtype: torch.dtype, tolerance: float) -> None:
    model, x = Monarch(einsum, dtype), torch.randn(96, 320, dtype=dtype)
    y, _ = run(model, x)
    assert y.dtype == dtype
    close(y, reference(model, x), tolerance)


def test_a_nan_stays_with_its_token() -> None:
    model, x = Monarch(einsum), torch.randn(96, 320)
    x[7, 11] = float("nan")
    y, decisions = run(model, x)
    assert in_a_row(decisions) == (2, 2)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [7]
    torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_butterfly_stages() -> None:
    """Radix 4 of 256 features: a stage multiplies four features that lie 64, 16, 4 and 1 apart."""
    stages = [nn.Parameter(torch.randn(64, 4, 4) / 2) for _ in range(4)]

    def butterfly(x: Tensor) -> Tensor:
        for stage, apart in zip(stages, (64, 16, 4, 1), strict=True):
            h = x.view(len(x), 64 // apart, 4, apart)
            x = torch.einsum("tgia,gaji->tgja", h, stage.view(64 // apart, apart, 4, 4)).reshape(len(x), 256)
        return x

    x = torch.randn(96, 256)
    with torch.no_grad(), collect() as found:
        y = torch.compile(butterfly, backend="sparse", fullgraph=True, options=OPTIONS)(x)
        expected = x.double()
        for stage, apart in zip(stages, (64, 16, 4, 1), strict=True):
            h = expected.view(96, 64 // apart, 4, apart)
            expected = torch.einsum("tgia,gaji->tgja", h, stage.double().view(64 // apart, apart, 4, 4)).reshape(96, 256)
    assert sum(each.schedule == "blocks" for each in found.decisions) == 4
    close(y, expected)


def test_the_option_disable_leaves_batches_to_torch() -> None:
    model, x = Monarch(einsum), torch.randn(96, 320)
    y, decisions = run(model, x, disable=["block-products"])
    assert not decisions
    close(y, reference(model, x))
