"""Batches of products with pruned weights, as of experts with a capacity and of ensembles: a region for each weight."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.report.report import collect
from tests.backend.harness import assert_same, compile_and_run, pruned

EXPERTS, COLUMNS, HIDDEN = 3, 24, 40


class Batch(nn.Module):
    """Weights for both sides of a product, and what computes it."""

    def __init__(self, written: Callable[["Batch", Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.written = written
        self.up = nn.Parameter(pruned(EXPERTS, COLUMNS, HIDDEN, dtype=dtype))
        self.rows = nn.Parameter(pruned(EXPERTS, HIDDEN, COLUMNS, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, HIDDEN, dtype=dtype))
        self.register_buffer("mask", (torch.rand(EXPERTS, COLUMNS, HIDDEN) < 0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def capacity(m: Batch, x: Tensor) -> Tensor:
    """The first choices of each expert, brought back by one-hot matrices."""
    shares = (x @ m.up[:, :, 0].t()).softmax(-1)
    best, chosen = shares.t().topk(max(1, x.shape[0] // 2))
    picked = F.one_hot(chosen, x.shape[0]).to(x.dtype)
    hidden = torch.einsum("ecd,edh->ech", torch.einsum("ecn,nd->ecd", picked, x), m.up)
    return torch.einsum("ecn,ec,ech->nh", picked, best, hidden)


WRITTEN: dict[str, Callable[[Batch, Tensor], Tensor]] = {
    "capacity": capacity,
    "all tokens": lambda m, x: torch.bmm(x.repeat(EXPERTS, 1).view(EXPERTS, -1, COLUMNS), m.up).sum(0),
    "ensemble": lambda m, x: torch.baddbmm(m.bias, x.expand(EXPERTS, -1, -1), m.rows.transpose(1, 2)).relu(),
    "weight on the left": lambda m, x: m.rows @ x.t().expand(EXPERTS, -1, -1),
    "masked": lambda m, x: torch.bmm(x.expand(EXPERTS, -1, -1), m.up * m.mask),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_each_weight_of_a_batch_is_a_region(written: Callable[[Batch, Tensor], Tensor], dtype: torch.dtype) -> None:
    model, x = Batch(written, dtype), torch.randn(10, COLUMNS).to(dtype)
    run = compile_and_run(model, x)
    assert [(each.op, each.reason) for each in run.regions if each.op == "experts"] == [("experts", "a region for each of 3")]
    with torch.no_grad():
        assert_same(run.output, model(x))
        for tokens in (7, 4, 1):
            assert_same(run.function(x[:tokens]), model(x[:tokens]))
        model.up.mul_(-2)
        assert_same(run.function(x), model(x))


def test_a_batch_without_tokens_has_an_empty_result() -> None:
    model = Batch(WRITTEN["ensemble"])
    run = compile_and_run(model, torch.randn(5, COLUMNS), dynamic=True)
    with torch.no_grad():
        assert run.function(torch.randn(0, COLUMNS)).shape == (EXPERTS, 0, HIDDEN)


def test_inductor_compiles_what_surrounds_a_batch() -> None:
    model, x = Batch(WRITTEN["ensemble"]), torch.randn(8, COLUMNS)
    run = compile_and_run(model, x, dynamic=True, dense="inductor")
    with torch.no_grad():
        assert_same(run.output, model(x))
        assert_same(run.function(x[:3]), model(x[:3]))


REFUSED: dict[str, tuple[Callable[[Batch, Tensor], Tensor], bool, str]] = {
    "training": (WRITTEN["all tokens"], True, "trained dense: batches of weights are sparse in inference only"),
    "factors": (
        lambda m, x: torch.baddbmm(m.bias, x.expand(EXPERTS, -1, -1), m.up, alpha=2),
        False,
        "no sparse kernel for a batch of weights with factors",
    ),
}


@pytest.mark.parametrize(("written", "grad", "reason"), REFUSED.values(), ids=REFUSED)
def test_the_report_says_why_a_batch_stays_dense(written: Callable[[Batch, Tensor], Tensor], grad: bool, reason: str) -> None:
    model, x = Batch(written), torch.randn(6, COLUMNS)
    run = compile_and_run(model, x, grad=grad, regions=0)
    assert [each.reason for each in run.decisions if each.name == "up"] == [reason]
    assert_same(run.output, model(x))


def test_a_batch_stays_dense_if_that_is_faster() -> None:
    model, x = Batch(WRITTEN["all tokens"]), torch.randn(6, COLUMNS)
    with torch.no_grad(), collect() as found:
        y = torch.compile(model, backend="sparse", options={"dense": "eager", "min_gain": 1000})(x)
        assert_same(y, model(x))
    (decision,) = [each for each in found.decisions if each.name == "up"]
    assert not decision.sparse
    assert decision.op == "experts"
