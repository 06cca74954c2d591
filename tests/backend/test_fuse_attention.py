"""SDDMM, softmax and SpMM in a compiled graph become one operation, forward and backward, whatever they are spelled like."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import gossamer
from gossamer import Format, SparseTensor, einsum
from gossamer.backend import sparse as backend
from gossamer.backend.rewrite import SparseRewrite
from gossamer.sparsity.edges.dropout_mask import kept
from gossamer.sparsity.edges.edge_attention import SEEDS

Function = Callable[..., Tensor]


def product(a: SparseTensor, q: Tensor, k: Tensor) -> Tensor:
    return einsum("ij,ik,jk->ij", a, q, k)


def with_one(a: SparseTensor, t: Tensor) -> SparseTensor:
    return a.with_values(a.values() * t[:1])


FUSED: dict[str, Function] = {
    "einsum": lambda a, q, k, v, t, s: torch.softmax(product(a, q, k) * 0.5, 1) @ v,
    "sampled_addmm": lambda a, q, k, v, t, s: torch.softmax(torch.sparse.sampled_addmm(a, q, k.t(), alpha=0.5), 1) @ v,
    "other order": lambda a, q, k, v, t, s: einsum("ij,kj->ki", torch.softmax(einsum("jk,ij,ik->ij", k, a, q), 1), v.t()),
    "leaky_relu": lambda a, q, k, v, t, s: torch.relu(torch.softmax(F.leaky_relu(product(a, q, k), 0.1), 1) @ v),
    "stored scores": lambda a, q, k, v, t, s: torch.softmax(-a / 3, 1) @ v,
    "product and stored scores": lambda a, q, k, v, t, s: torch.softmax(product(a, q, k) - a, 1) @ v,
    "sums by node": lambda a, q, k, v, t, s: torch.softmax(F.leaky_relu(a * t[:, None] + a * s, 0.2), 1) @ v,
    "one factor for all": lambda a, q, k, v, t, s: torch.softmax(with_one(product(a, q, k), t), 1) @ v,
}
KEPT: dict[str, Function] = {
    "weights are returned": lambda a, q, k, v, t, s: (lambda p: (p @ v, p))(torch.softmax(product(a, q, k), 1)),
    "weights are used twice": lambda a, q, k, v, t, s: (lambda p: p @ v + (p * p) @ v)(torch.softmax(product(a, q, k), 1)),
    "weights are changed": lambda a, q, k, v, t, s: (torch.softmax(product(a, q, k), 1) * 2) @ v,
    "log": lambda a, q, k, v, t, s: torch.log_softmax(product(a, q, k), 1) @ v,
    "columns": lambda a, q, k, v, t, s: torch.softmax(product(a, q, k), 0) @ v,
    "dropped weights are returned": lambda a, q, k, v, t, s: (lambda p: (p @ v, p))(F.dropout(torch.softmax(a, 1), 1e-9)),
}


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Our operations in the graphs that are left after rewriting."""
    found: Counter[str] = Counter()
    real = SparseRewrite._rewrite

    def noting(self: SparseRewrite, graph: fx.Graph, *rest: Any) -> None:
        real(self, graph, *rest)
        graph.lint()
        found.update(str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("gossamer."))

    monkeypatch.setattr(SparseRewrite, "_rewrite", noting)
    return found


def inputs(format: Format = Format.CSR, rows: int = 6, columns: int = 5) -> list[Tensor]:
    a = torch.rand(rows, columns) * (torch.rand(rows, columns) < 0.6)
    a[1] = 0
    shapes = ((rows, 4), (columns, 4), (columns, 3), (rows,), (columns,))
    return [SparseTensor.from_dense(a, format), *(torch.randn(shape) for shape in shapes)]


def compiled(function: Function, dense: str = "eager") -> Function:
    options = {"dense": dense, "strict": True}
    return torch.compile(function, backend=lambda gm, ex: backend(gm, ex, options=options), fullgraph=True)


def gradients(function: Function, given: list[Tensor], values: bool = True) -> list[Tensor | None]:
    """The result, and the gradients of all, or all but the pattern."""
    leaves = [given[0].detach(), *(each.clone().requires_grad_() for each in given[1:])]
    leaves[0].requires_grad_(values)
    out = function(*leaves)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = torch.autograd.grad(out, leaves if values else leaves[1:], upstream, allow_unused=True)
    return [out.detach(), *(each.to_dense() if isinstance(each, SparseTensor) else each for each in found)]


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUSED)
def test_forward_and_backward_are_fused(name: str, operations: Counter[str]) -> None:
    given = inputs()
    expected = gradients(FUSED[name], given)
    close(gradients(compiled(FUSED[name]), given), expected)
    assert operations["attend_edges"] == operations["attend_edges_backward"] == 1
    assert not operations["softmax"] + operations["softmax_backward"]
    if name not in ("sums by node", "one factor for all"):  # there scores are computed before
        assert set(operations) == {"attend_edges", "attend_edges_backward"}


@pytest.mark.parametrize("name", KEPT)
def test_weights_that_are_used_otherwise_stay(name: str, operations: Counter[str]) -> None:
    given = inputs()
    result, expected = compiled(KEPT[name])(*given), KEPT[name](*given)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(*(x.to_dense() if isinstance(x, SparseTensor) else x for x in (a, b)))
    assert operations["attend_edges"] == 0
    assert operations["softmax"] == 1


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_dropout_of_weights_is_drawn_in_the_kernel(dense: str, operations: Counter[str]) -> None:
    given, share = inputs(rows=60, columns=50), 0.3
    whole = lambda a, q, k, v, t, s: torch.softmax(product(a, q, k), 1) @ v
    fast = compiled(lambda a, q, k, v, t, s: F.dropout(torch.softmax(product(a, q, k), 1), share) @ v, dense)
    torch.manual_seed(1)
    found = gradients(fast, given)
    assert set(operations) == {"attend_edges", "attend_edges_backward"}
    if dense == "inductor":  # which draws in its own way
        with torch.no_grad():
            several = torch.stack([fast(*given) for _ in range(400)])
        torch.testing.assert_close(several.mean(0), whole(*given), atol=0.25, rtol=0)
        assert several.std(0).max() > 0.1
        return
    torch.manual_seed(1)
    mask = kept(torch.randint(*SEEDS, (1,)), given[0].nnz, 1, share, torch.float32)[:, 0]

    def dropped(a: SparseTensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        weights = torch.softmax(product(a, q, k), 1)
        return weights.with_values(weights.values() * mask) @ v

    close(found, gradients(dropped, given))


def test_scores_alone_need_no_gradient_of_weights(operations: Counter[str]) -> None:
    a, q, k, v, *_ = inputs()
    function = compiled(lambda a, q, k, v: torch.softmax(product(a, q, k), 1) @ v)
    v.requires_grad_()
    (found,) = torch.autograd.grad(function(a, q, k, v).sum(), v)
    weights = torch.softmax(product(a, q, k), 1).to_dense()
    torch.testing.assert_close(found, weights.sum(0)[:, None].expand(5, 3))
    assert set(operations) == {"attend_edges", "attend_edges_backward"}


def test_columns_of_csc_are_rows(operations: Counter[str]) -> None:
    given = inputs(Format.CSC)
    function = lambda a, q, k, v, t, s: torch.softmax(product(a, q, k), 0).t() @ q
    result = compiled(function)(*given)
    torch.testing.assert_close(result, function(*given))
    assert set(operations) == {"attend_edges"}


class Transformer(nn.Module):
    """One head of attention over the edges of a graph, with what a layer has around it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, a: SparseTensor, x: Tensor) -> Tensor:
        p = torch.softmax(product(a, self.query(x), self.key(x)) * 8**-0.5, 1)
        return x + self.last(F.relu(p @ self.value(x)))


def test_through_inductor() -> None:
    given = inputs()
    close(gradients(compiled(FUSED["einsum"], "inductor"), given, False), gradients(FUSED["einsum"], given, False))


def test_training_with_any_number_of_edges(operations: Counter[str]) -> None:
    model = Transformer()
    fast = compiled(model)
    for nodes, density in ((9, 0.3), (9, 0.6), (12, 0.4)):
        a = SparseTensor.from_dense((torch.rand(nodes, nodes) < density).float())
        x = torch.randn(nodes, 8)
        model.zero_grad()
        model(a, x).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        fast(a, x).square().sum().backward()
        close([p.grad for p in model.parameters()], expected)
    assert set(operations) == {"attend_edges", "attend_edges_backward"}


def test_the_report_says_what_was_fused() -> None:
    given = inputs()
    report = gossamer.explain(FUSED["einsum"], *given, options={"dense": "eager"})
    (decision,) = [d for d in report.sparse if d.op == "attention"]
    assert (decision.format, decision.schedule, decision.shape) == ("CSR", "edges", (6, 5))
    assert "dot products" in decision.reason
    assert "attention" in str(report)


@pytest.mark.parametrize("gradient", [False, True])
def test_the_report_says_why_a_softmax_stays_apart(gradient: bool) -> None:
    given = [each.requires_grad_(gradient) for each in inputs()[1:]]
    report = gossamer.explain(KEPT["weights are used twice"], inputs()[0], *given, options={"dense": "eager"})
    (decision,) = {(d.sparse, d.reason) for d in report.decisions if d.op == "attention"}
    reason = "its gradient is computed in part by something else" if gradient else "its weights are used elsewhere"
    assert decision == (False, f"softmax and product run separately: {reason}")
