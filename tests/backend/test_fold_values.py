"""The normalisation of an adjacency is computed when the adjacency is new, and followed when it changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import gossamer
from gossamer import SparseTensor
from gossamer.backend import sparse as backend
from gossamer.backend.rewrite import SparseRewrite
from gossamer.backend.run import computed

NODES = 12


class Gcn(nn.Module):
    """A layer of graph convolution that normalises by degrees in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, a: SparseTensor, x: Tensor) -> Tensor:
        scale = (a.sum(1) + 1).rsqrt()
        return (a * scale[:, None] * scale) @ self.lin(x)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that values are computed."""
    found: list[str] = []
    real = computed.evaluated

    def noting(*given: Any) -> Any:
        found.append("values")
        return real(*given)

    monkeypatch.setattr(computed, "evaluated", noting)
    return found


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Our operations in the graphs that are left after rewriting."""
    found: list[str] = []
    real = SparseRewrite._rewrite

    def noting(self: SparseRewrite, graph: fx.Graph, *rest: object) -> None:
        real(self, graph, *rest)
        graph.lint()
        found.extend(str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("gossamer."))

    monkeypatch.setattr(SparseRewrite, "_rewrite", noting)
    return found


def adjacency() -> SparseTensor:
    return SparseTensor.from_dense((torch.rand(NODES, NODES) < 0.4).float())


def compiled(function: Callable[..., Tensor], **options: str) -> Callable[..., Tensor]:
    given = {"dense": "eager", **options}
    return torch.compile(function, backend=lambda gm, ex: backend(gm, ex, options=given), fullgraph=True)


@pytest.mark.parametrize("training", [False, True])
def test_it_is_computed_once(training: bool, evaluations: list[str], operations: list[str]) -> None:
    model, a = Gcn(), adjacency()
    fast = compiled(model)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            x = torch.randn(NODES, 8)
            torch.testing.assert_close(fast(a, x), model(a, x))
    assert operations == ["structure", "einsum", *(["einsum"] if training else [])]
    assert evaluations == ["values"]


def test_new_values_and_other_graphs_are_noticed(evaluations: list[str]) -> None:
    model, a, x = Gcn(), adjacency(), torch.randn(NODES, 8)
    fast = compiled(model)
    with torch.no_grad():
        fast(a, x)
        a.components[-1].mul_(3)
        torch.testing.assert_close(fast(a, x), model(a, x))
        other = adjacency()
        torch.testing.assert_close(fast(other, x), model(other, x))
    assert len(evaluations) == 3


def test_full_verification_and_inference_tensors_compare_values(evaluations: list[str]) -> None:
    model, x = Gcn(), torch.randn(NODES, 8)
    for mode, options in ((torch.inference_mode, {}), (torch.no_grad, {"verify": "full"})):
        evaluations.clear()
        with mode():
            a, fast = adjacency(), compiled(model, **options)
            for _ in range(2):
                fast(a, x)
            assert len(evaluations) == 1
            a.components[-1].data.mul_(3)
            torch.testing.assert_close(fast(a, x), model(a, x))
        torch._dynamo.reset()


def test_types_have_values_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}
    monkeypatch.setattr(computed, "_table", known)
    model, a, x = Gcn(), adjacency(), torch.randn(NODES, 8)
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        own = SparseTensor.from_dense(a.to_dense().to(dtype))
        with torch.no_grad():
            torch.testing.assert_close(compiled(model)(own, x.to(dtype)), model(own, x.to(dtype)))
        torch._dynamo.reset()
    assert [each.dtype for each in known.values()] == [torch.float32, torch.float64]


def test_values_that_need_a_gradient_stay_in_the_graph(operations: list[str]) -> None:
    model, x = Gcn(), torch.randn(NODES, 8)
    a = nn.Parameter(adjacency())
    (found,) = torch.autograd.grad(compiled(model)(a, x).square().sum(), a)
    (expected,) = torch.autograd.grad(model(a, x).square().sum(), a)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-4, atol=1e-4)
    assert "structure" not in operations


def test_the_report_names_it() -> None:
    with torch.no_grad():
        report = gossamer.explain(Gcn(), adjacency(), torch.randn(NODES, 8), options={"dense": "eager"})
    folded = next(d for d in report.decisions if d.schedule == "folded")
    assert (folded.name, folded.op, folded.shape) == ("a", "values", (NODES, NODES))
