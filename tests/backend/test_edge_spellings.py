"""Attention written with gather and scatter, and with operations on SparseTensors, becomes the same operation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer import Format, SparseTensor, einsum
from gossamer.backend import sparse as backend
from gossamer.backend.rewrite import SparseRewrite
from gossamer.sparsity.edges.edge_attention import NAMES
from tests.backend.harness import assert_same

NODES, SIZE = 40, 6

Spelling = Callable[..., Tensor]
Operation = tuple[dict[str, bool], tuple[float, ...], list[bool]]
"""Which terms are given, scale, slope and dropout, and which gradients are asked for."""


def softmax_by(target: Tensor, z: Tensor, least: float | None = -torch.inf) -> Tensor:
    """Of z [edges] over the edges of each target; the maxima begin with `least`, or are not subtracted."""
    if least is not None:
        most = torch.full((NODES,), least).scatter_reduce(0, target, z.detach(), "amax")
        z = z - most[target]
    p = z.exp()
    return p / (torch.zeros(NODES).scatter_add(0, target, p) + (0.0 if least is None else 1e-16))[target]


def summed(target: Tensor, messages: Tensor) -> Tensor:
    return torch.zeros(NODES, SIZE).index_add(0, target, messages)


def dots(index: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q[index[1]] * k[index[0]]).sum(-1)


def by_rows(a: SparseTensor, t: Tensor) -> SparseTensor:
    return a.with_values(torch.ones_like(a.values())) * t[:, None]


def by_columns(a: SparseTensor, s: Tensor) -> SparseTensor:
    return a.with_values(torch.ones_like(a.values())) * s


def product(a: SparseTensor, q: Tensor, k: Tensor) -> SparseTensor:
    return einsum("ij,ik,jk->ij", a.with_values(torch.ones_like(a.values())), q, k)


Z_LISTS: dict[str, Spelling] = {
    "graph attention": lambda e, w, q, k, t, s: F.leaky_relu(s[e[0]] + t[e[1]], 0.2),
    "rectified": lambda e, w, q, k, t, s: F.relu(s[e[0]] + t[e[1]]),
    "products": lambda e, w, q, k, t, s: dots(e, q, k) * 0.5,
    "weighted products": lambda e, w, q, k, t, s: dots(e, q, k) * w / 3,
    "products and stored scores": lambda e, w, q, k, t, s: w - dots(e, q, k),
    "stored scores": lambda e, w, q, k, t, s: -w,
}
Z_TENSORS: dict[str, Callable[..., SparseTensor]] = {
    "graph attention": lambda a, q, k, t, s: F.leaky_relu(by_columns(a, s) + by_rows(a, t), 0.2),
    "rectified": lambda a, q, k, t, s: F.relu(by_columns(a, s) + by_rows(a, t)),
    "products": lambda a, q, k, t, s: product(a, q, k) * 0.5,
    "weighted products": lambda a, q, k, t, s: a.with_values(product(a, q, k).values() * a.values() / 3),
    "products and stored scores": lambda a, q, k, t, s: a - product(a, q, k),
    "stored scores": lambda a, q, k, t, s: -a,
}


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """The attention in graphs that are left after rewriting."""
    found: list[Operation] = []
    real = SparseRewrite._rewrite

    def noting(self: SparseRewrite, graph: fx.Graph, *rest: Any) -> None:
        real(self, graph, *rest)
        graph.lint()
        for node in graph.nodes:
            name = str(node.target)
            if name.startswith("gossamer.attend"):
                arguments = [a for a, f in zip(node.args, node.target._schema.arguments, strict=True) if f.name in NAMES]
                by = {f.name: a for a, f in zip(node.args, node.target._schema.arguments, strict=True)}
                terms = {name: each is not None for name, each in zip(NAMES, arguments, strict=True)}
                found.append((terms, (by["scale"], by["slope"], by["dropout"]), list(by.get("needs", []))))

    monkeypatch.setattr(SparseRewrite, "_rewrite", noting)
    return found


def given() -> tuple[SparseTensor, Tensor, list[Tensor]]:
    """A pattern with values, its edge list in the order of its entries, and nodes' tensors."""
    mask = torch.rand(NODES, NODES) < 0.2
    a = SparseTensor.from_dense(torch.rand(NODES, NODES) * mask, Format.CSR)
    target, source = mask.nonzero().unbind(1)
    nodes = [torch.randn(NODES, SIZE), torch.randn(NODES, SIZE), torch.randn(NODES), torch.randn(NODES)]
    return a, torch.stack([source, target]), [*nodes, torch.randn(NODES, SIZE)]


def run(function: Callable[..., Tensor], structure: Any, weights: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The result, and all gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    weights = weights.detach().clone().requires_grad_()
    out = function(structure, weights, *leaves)
    found = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), [weights, *leaves],
                                allow_unused=True)  # fmt: skip
    first = found[0].values() if isinstance(found[0], SparseTensor) else found[0]
    return [out.detach(), *(each for each in (first, *found[1:]) if each is not None)]


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    options = {"dense": "eager", "strict": True, "min_gain": 0.0}
    return torch.compile(function, backend=lambda gm, ex: backend(gm, ex, options=options), fullgraph=True)


@pytest.mark.parametrize("name", Z_LISTS)
def test_both_spellings_are_one_operation(name: str, operations: list[Operation]) -> None:
    a, index, tensors = given()

    def listed(e: Tensor, w: Tensor, q: Tensor, k: Tensor, t: Tensor, s: Tensor, v: Tensor) -> Tensor:
        weight = softmax_by(e[1], Z_LISTS[name](e, w, q, k, t, s))
        return summed(e[1], v[e[0]] * weight[:, None])

    def stored(_: None, w: SparseTensor, q: Tensor, k: Tensor, t: Tensor, s: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(Z_TENSORS[name](w, q, k, t, s), 1) @ v

    expected = run(listed, index, a.values(), tensors)
    first = run(compiled(listed), index, a.values(), tensors)
    by_lists = list(operations)
    operations.clear()
    second = run(compiled(stored), None, a, tensors)
    assert len(by_lists) == 2
    assert by_lists == operations
    for mine, other, eager in zip(first, second, expected, strict=True):
        assert_same(mine, eager)
        assert_same(other, eager)


@pytest.mark.parametrize("least", [-torch.inf, -1e30, None])
def test_what_maxima_begin_with_does_not_matter(least: float | None, operations: list[Operation]) -> None:
    a, index, tensors = given()

    def attended(e: Tensor, w: Tensor, q: Tensor, k: Tensor, t: Tensor, s: Tensor, v: Tensor) -> Tensor:
        return summed(e[1], v[e[0]] * softmax_by(e[1], F.leaky_relu(s[e[0]] + t[e[1]]), least)[:, None])

    found, expected = (run(each, index, a.values(), tensors) for each in (compiled(attended), attended))
    assert len(operations) == 2
    for mine, eager in zip(found, expected, strict=True):
        assert_same(mine, eager)


def test_a_mask_below_what_maxima_begin_with_is_no_attention(operations: list[Operation]) -> None:
    a, index, tensors = given()

    def masked(e: Tensor, w: Tensor, q: Tensor, k: Tensor, t: Tensor, s: Tensor, v: Tensor) -> Tensor:
        scores = dots(e, q, k).masked_fill(w < 0.7, torch.finfo(torch.float32).min)
        return summed(e[1], v[e[0]] * softmax_by(e[1], scores, -1e30)[:, None])

    assert_same(compiled(masked)(index, a.values(), *tensors), masked(index, a.values(), *tensors))
    assert not operations


def test_values_without_a_gradient(operations: list[Operation]) -> None:
    _, index, (q, k, _, _, v) = given()

    def attended(e: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return summed(e[1], v[e[0]] * softmax_by(e[1], dots(e, q, k))[:, None])

    q.requires_grad_(), k.requires_grad_()
    found, expected = (
        torch.autograd.grad(each(index, q, k, v).square().sum(), [q, k]) for each in (compiled(attended), attended)
    )
    assert [needs for *_, needs in operations if needs] == [[name in ("queries", "keys") for name in NAMES]]
    for mine, eager in zip(found, expected, strict=True):
        assert_same(mine, eager)
