"""Shapes that broadcast, in elementwise operations and in batches of products, and what einsum spells out; as dense torch."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gossamer import Format, SparseTensor, einsum
from gossamer.backend import sparse as backend
from tests.sparsity.made import matrix, sparse

SHAPES = [(4, 6), (1, 6), (4, 1), (6,), (2, 4, 6), (3, 1, 6), (1, 1), (0, 1, 6)]


def numbers(*shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2.0).clamp(min=-1).reshape(shape)


def stored(dense: Tensor) -> SparseTensor:
    return SparseTensor.from_dense(dense, Format.coo(dense.dim()) if dense.dim() % 2 else Format.csf(dense.dim()))


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul], ids=lambda each: each.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elementwise(shape: tuple[int, ...], operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    left, right = matrix(4, 6), numbers(*shape)
    for one, other, dense in (
        (sparse(left), stored(right), operation(left, right)),
        (stored(right), sparse(left, "BSR"), operation(right, left)),
        (sparse(left, "CSC"), right, operation(left, right)),
    ):
        result = operation(one, other)
        assert isinstance(result, SparseTensor) == (isinstance(other, SparseTensor) or operation is operator.mul)
        torch.testing.assert_close(result.to_dense(), dense)


def test_gradients() -> None:
    row, column = stored(numbers(1, 6).double()), stored(numbers(4, 1).double())

    def together(left: Tensor, right: Tensor) -> Tensor:
        one, other = row.with_values(left), column.with_values(right)
        return (one * other + other - one).to_dense()

    values = [each.values().clone().requires_grad_() for each in (row, column)]
    assert torch.autograd.gradcheck(together, values)


LEFT = [(4, 6), (6,), (2, 4, 6), (1, 4, 6), (3, 2, 4, 6), (3, 1, 4, 6)]
RIGHT = [(6,), (6, 3), (2, 6, 3), (1, 6, 3), (3, 2, 6, 3), (3, 1, 6, 3), (1, 2, 6, 0)]


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_batches_of_products(left: tuple[int, ...]) -> None:
    for right in RIGHT:
        a, b = numbers(*left), numbers(*right)
        for one, other in ((stored(a), b), (a, stored(b)), (stored(a), stored(b))):
            torch.testing.assert_close((one @ other).to_dense(), a @ b)


EXPRESSIONS = {
    "ii->i": [(5, 5)],
    "ii": [(5, 5)],
    "iij->j": [(4, 4, 3)],
    "iji->ij": [(4, 3, 4)],
    "ij,jj->i": [(4, 5), (5, 5)],
    "...j,jk->...k": [(2, 4, 6), (6, 3)],
    "...ij,...jk": [(1, 4, 6), (2, 6, 3)],
    "b...,b...->b": [(4, 6), (4, 6)],
    "ij...,jk->ik...": [(4, 6, 2), (6, 3)],
    "...->...": [(4, 6)],
    "i...->...": [(4, 6)],
    "...ii->...i": [(2, 4, 4)],
    "ij,ij->ij": [(4, 6), (4, 1)],
    "ij,jk->ik": [(4, 6), (1, 3)],
    "ij,bjk,bk->bik": [(4, 6), (1, 6, 3), (2, 3)],
    "ij,ji": [(1, 6), (6, 4)],
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_einsum_spells_out(expression: str) -> None:
    operands = [numbers(*shape) for shape in EXPRESSIONS[expression]]
    expected = torch.einsum(expression, *operands)
    for function in (einsum, torch.einsum):
        for at in range(len(operands)):
            mixed = [stored(each) if n == at else each for n, each in enumerate(operands)]
            torch.testing.assert_close(function(expression, *mixed).to_dense(), expected)
        torch.testing.assert_close(function(expression, *map(stored, operands)).to_dense(), expected)


def test_torch_einsum_in_its_other_spellings() -> None:
    a, x = matrix(4, 6), torch.randn(6, 3)
    torch.testing.assert_close(torch.einsum("ij,jk->ik", [sparse(a), x]), a @ x)
    torch.testing.assert_close(torch.einsum(sparse(a), [0, 1], x, [1, 2], [2, 0]), (a @ x).t())
    torch.testing.assert_close(torch.einsum(sparse(a), [..., 1], x, [1, 2]), a @ x)


def test_in_one_graph() -> None:
    torch._dynamo.reset()
    a, row, x = matrix(4, 6), numbers(1, 6), numbers(2, 6, 3)

    def function(a: Tensor, row: Tensor, x: Tensor) -> list[Tensor]:
        return [a + row, row * a, a @ x, torch.einsum("...ij,kj->...ik", a, a), (a @ a.mT).expand(2, 4, 4)]

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for ours, theirs in zip(compiled(sparse(a), stored(row), x), function(a, row, x), strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs)
