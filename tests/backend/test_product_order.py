"""A (X W) or (A X) W: which is computed, by the sizes of both products of the graph, and that gradients follow."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import gossamer
from gossamer import SparseTensor
from gossamer.backend import sparse as backend
from gossamer.backend.rewrite import SparseRewrite

Function = Callable[..., Tensor]
NODES = 30
PRODUCTS = (torch.ops.gossamer.einsum.default, torch.ops.gossamer.region.default)

TRANSFORM: dict[str, Function] = {
    "matmul": lambda a, x, w, b: torch.relu(a @ (x @ w)),
    "linear": lambda a, x, w, b: torch.relu(a @ F.linear(x, w.t().contiguous())),
}
AGGREGATE: dict[str, Function] = {
    "matmul": lambda a, x, w, b: torch.relu((a @ x) @ w),
    "linear": lambda a, x, w, b: torch.relu(F.linear(a @ x, w.t().contiguous(), b)),
}


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns each sparse product in the rewritten graphs has, by itself or with what follows it inside."""
    found: list[int] = []
    real = SparseRewrite._rewrite

    def noting(self: SparseRewrite, graph: fx.Graph, *rest: object) -> None:
        real(self, graph, *rest)
        graph.lint()
        found.extend(n.meta["val"].shape[1] for n in graph.nodes if n.target in PRODUCTS)

    monkeypatch.setattr(SparseRewrite, "_rewrite", noting)
    return found


def inputs(narrow: int, wide: int, features_need_gradient: bool) -> tuple[SparseTensor, list[Tensor]]:
    a = SparseTensor.from_dense((torch.rand(NODES, NODES) < 0.3).float())
    x = torch.randn(NODES, narrow, requires_grad=features_need_gradient)
    return a, [x, torch.randn(narrow, wide, requires_grad=True), torch.randn(wide)]


def run(function: Function, a: SparseTensor, given: list[Tensor]) -> list[Tensor]:
    out = function(a, *given)
    leaves = [each for each in given if each.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def compiled(function: Function) -> Function:
    options = {"dense": "eager", "strict": True}
    return torch.compile(function, backend=lambda gm, ex: backend(gm, ex, options=options), fullgraph=True)


@pytest.mark.parametrize("features_need_gradient", [False, True])
@pytest.mark.parametrize(
    ("written", "narrow", "wide", "expected", "without"),
    [
        ("transform", 4, 16, [4, 4], [4]),
        ("transform", 16, 4, [4, 4], [4, 4]),
        ("transform", 12, 8, [8, 8], [12]),
        ("aggregate", 16, 4, [4, 4], [16]),
        ("aggregate", 4, 16, [4, 4], [4]),
    ],
)
@pytest.mark.parametrize("spelled", TRANSFORM)
def test_the_cheaper_order_is_taken_with_its_gradients(
    spelled: str, written: str, narrow: int, wide: int, expected: list[int], without: list[int],
    features_need_gradient: bool, columns: list[int],
) -> None:  # fmt: skip
    """Where features need no gradient, aggregating first saves the product with the transpose."""
    function = (TRANSFORM if written == "transform" else AGGREGATE)[spelled]
    a, given = inputs(narrow, wide, features_need_gradient)
    torch.testing.assert_close(run(compiled(function), a, given), run(function, a, given), rtol=1e-4, atol=1e-3)
    assert columns == (expected if features_need_gradient else without)


@pytest.mark.parametrize(("written", "narrow", "wide"), [("transform", 4, 16), ("aggregate", 16, 4)])
def test_in_inference(written: str, narrow: int, wide: int, columns: list[int]) -> None:
    function = (TRANSFORM if written == "transform" else AGGREGATE)["linear"]
    a, given = inputs(narrow, wide, False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(function)(a, *given), function(a, *given), rtol=1e-4, atol=1e-4)
    assert columns == [4]


def test_what_is_used_otherwise_keeps_its_order(columns: list[int]) -> None:
    a, (x, w, _) = inputs(4, 16, False)

    def function(a: SparseTensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return a @ h, h

    with torch.no_grad():
        torch.testing.assert_close(compiled(function)(a, x, w), function(a, x, w), rtol=1e-4, atol=1e-4)
    assert columns == [16]


def test_the_report_says_why() -> None:
    a, given = inputs(4, 16, False)
    report = gossamer.explain(lambda a, x, w: a @ (x @ w), a, *given[:2], options={"dense": "eager"})
    order, product = [d for d in report.decisions if d.format]
    assert (order.op, order.name) == ("product order", "a")
    assert order.reason == "(A X) W: A is multiplied with 4 columns, gradients included"
    assert order.gain is not None and order.gain > 2
    assert (product.op, product.schedule, product.shape) == ("einsum ik,kj->ij", "rows", (NODES, NODES))
    assert product.reason == "loops i, k, j, in parallel by rows"
    assert "(A X) W" in str(report)
