"""SparseTensors that a graph makes itself, and sizes that it learns when it runs: one graph, and eager results."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import Format, FormatError, SparseTensor, einsum, graph_attention
from gossamer.backend import sparse as backend
from tests.sparsity.made import FORMATS, matrix, sparse


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], dense: str = "eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, options={"dense": dense, "strict": True})


def close(found: Any, expected: Any) -> None:
    assert isinstance(found, SparseTensor) == isinstance(expected, SparseTensor)
    if isinstance(expected, SparseTensor):
        assert found.format == expected.format
        found, expected = found.to_dense(), expected.to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "2:4"])
def test_a_graph_stores_the_nonzeros_of_a_dense_tensor(format: str) -> None:
    dense, x = matrix(6, 8), torch.randn(8, 3)

    def product(dense: Tensor, x: Tensor) -> Tensor:
        return SparseTensor.from_dense(dense, FORMATS[format]) @ x

    close(compiled(product)(dense, x), dense @ x)


MADE: dict[str, Callable[[Tensor], Any]] = {
    "from_dense": lambda dense: SparseTensor.from_dense(dense),
    "from_torch of a matrix": lambda dense: SparseTensor.from_torch(dense),
    "from_torch of three dimensions": lambda dense: SparseTensor.from_torch(dense.unflatten(0, (2, 3))),
    "of nothing": lambda dense: SparseTensor.from_dense(dense * 0),
    "of what a mask keeps": lambda dense: SparseTensor.from_dense(dense[dense[:, 0] > 0]),
}


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("how", MADE)
def test_a_graph_returns_what_it_has_made(how: str, dense: str) -> None:
    x = matrix(6, 8)
    close(compiled(MADE[how], dense)(x), MADE[how](x))


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_gradients_flow_to_the_dense_tensor_at_its_nonzeros(dense: str) -> None:
    x, y = matrix(6, 8).requires_grad_(), torch.randn(8, 3)
    compiled(lambda x, y: SparseTensor.from_dense(x) @ y, dense)(x, y).sum().backward()
    expected = y.sum(1).expand(6, 8) * (x != 0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def of_parts(positions: Tensor, coordinates: Tensor, values: Tensor, x: Tensor) -> Tensor:
    return SparseTensor.from_parts(Format.CSR, (6, 8), positions, coordinates, values) @ x


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_a_graph_checks_the_parts_that_it_is_given(integer: torch.dtype, dense: str) -> None:
    a, x = sparse(matrix(6, 8)), torch.randn(8, 3)
    positions, coordinates, values = (a.positions(1).to(integer), a.coordinates(1).to(integer), a.values())
    function = compiled(of_parts, dense)
    close(function(positions, coordinates, values, x), a.to_dense() @ x)
    wrong = coordinates.clone()
    wrong[2] = 9
    with pytest.raises(FormatError, match=r"coordinates of 'd1 : compressed' must be in \[0, 8\), number 2 is 9"):
        function(positions, wrong, values, x)
    with pytest.raises(FormatError, match="positions of 'd1 : compressed' start at 1"):
        function(positions + 1, coordinates, values, x)


def test_parts_of_an_input_make_another_tensor() -> None:
    a, x = sparse(matrix(6, 8)), torch.randn(8, 3)

    def scaled(a: Tensor, values: Tensor, x: Tensor) -> Tensor:
        return SparseTensor.from_parts(Format.CSR, (6, 8), a.crow_indices(), a.col_indices(), values * 2) @ x

    close(compiled(scaled)(a, a.values(), x), 2 * (a.to_dense() @ x))


def test_edges_say_how_many_nodes_there_are() -> None:
    edges, x = torch.randint(0, 8, (2, 30)), torch.randn(8, 3)
    edges[:, 0] = 7
    close(compiled(lambda e, x: SparseTensor.from_edge_index(e) @ x)(edges, x), SparseTensor.from_edge_index(edges) @ x)
    close(compiled(lambda e: SparseTensor.from_edge_index(e))(edges), SparseTensor.from_edge_index(edges))


def where(mask: Tensor) -> Tensor:
    """The same rows as a mask, of another size as far as a graph knows."""
    return mask.nonzero().flatten()


Q = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
OPEN: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "product": lambda a, x, m: a[:, m] @ x[where(m)],
    "product of transposed": lambda a, x, m: a[m].T @ x[where(m)],
    "sparse product": lambda a, x, m: a[:, m] @ a[where(m)],
    "union": lambda a, x, m: a[m] + a[where(m)],
    "intersection": lambda a, x, m: a[m] * a[where(m)],
    "times dense": lambda a, x, m: a[m] * torch.ones(8, 8)[where(m)],
    "plus dense": lambda a, x, m: a[m] + torch.ones(8, 8)[where(m)],
    "SDDMM": lambda a, x, m: einsum("ij,ik,jk->ij", a[m], x[where(m)], x),
    "softmax": lambda a, x, m: torch.softmax(a[m], 1) @ x,
    "largest": lambda a, x, m: a[m].amax(1),
    "joined": lambda a, x, m: torch.cat([a[:, m], a[:, where(m)]]),
    "other values": lambda a, x, m: a[m].with_values(a[where(m)].values() * 2),
    "first row": lambda a, x, m: a[m][0],
    "last row": lambda a, x, m: a[m][-1],
    "attention": lambda a, x, m: graph_attention(a[m][:, where(m)], Q[m], queries=Q[where(m)], keys=Q[m]),
    "attention with terms": lambda a, x, m: graph_attention(a[:, m], Q[where(m)], target=Q[..., 0], source=Q[m][..., 0]),
    "diagonal": lambda a, x, m: einsum("ii->i", a[m][:, where(m)]),
    "einsum in COO": lambda a, x, m: einsum("ij,jk,kl->il", a[m], a, x, format=Format.COO),
    "batch": lambda a, x, m: SparseTensor.from_dense(torch.ones(8, 3, 4), Format.csf(3))[m] @ torch.ones(4, 2),
    "weights of edges": lambda a, x, m: SparseTensor.from_edge_index(
        torch.arange(16).view(2, 8)[:, m] % 8, torch.ones(8)[where(m)], 8
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_sizes_that_the_run_of_a_graph_shows_to_be_equal(name: str) -> None:
    a, x, mask = sparse(matrix(8, 8)), torch.randn(8, 3), torch.tensor([True, False, True, True, False, True, False, True])
    close(compiled(OPEN[name])(a, x, mask), OPEN[name](a, x, mask))


def test_sizes_that_the_run_shows_to_differ_are_refused() -> None:
    a, x, mask = sparse(matrix(8, 8)), torch.randn(8, 3), torch.arange(8) < 4
    function = compiled(lambda a, x, m, n: a[:, m] @ x[n])
    close(function(a, x, mask, mask.flip(0)), a.to_dense()[:, mask] @ x[mask.flip(0)])
    with pytest.raises(RuntimeError):
        function(a, x, mask, torch.arange(8) < 5)


@pytest.mark.filterwarnings("ignore:torch.compile")
def test_a_tensor_of_torch_sparse_is_converted_between_two_graphs() -> None:
    """Dynamo traces neither torch's sparse tensors nor, in graphs of their own, the functions that convert them."""
    at = torch.randint(0, 6, (2, 10))

    def product(weight: Tensor, x: Tensor) -> Tensor:
        return SparseTensor.from_torch(torch.sparse_coo_tensor(at, weight.reshape(-1), (6, 6))) @ x

    function = torch.compile(product, backend=backend, options={"dense": "eager", "strict": True})
    weight, x = torch.randn(5, 2, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    for ours, theirs in zip(
        *(torch.autograd.grad(f(weight, x).sin().sum(), (weight, x)) for f in (function, product)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


EINSUMS = ["ij,jk,kl->il", "ij,ij,jk->ik", "ij,jk,ik->ik"]


@pytest.mark.parametrize("format", [Format.COO, Format.bsr(2, 2)], ids=lambda f: f.name)
@pytest.mark.parametrize("expression", EINSUMS)
def test_dense_results_are_stored_in_the_format_that_is_asked_for(expression: str, format: Format) -> None:
    a, x = sparse(matrix(6, 6)), torch.randn(6, 4)
    operands = {"ij,jk,kl->il": (a, a, x), "ij,ij,jk->ik": (a, a, x), "ij,jk,ik->ik": (a, x, x)}[expression]
    function = compiled(lambda *each: einsum(expression, *each, format=format))
    close(function(*operands), einsum(expression, *operands, format=format))
