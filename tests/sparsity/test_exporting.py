"""torch.export of models that take, hold, make and return SparseTensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gossamer import Format, SparseTensor
from tests.sparsity.made import matrix, sparse


class Called(nn.Module):
    """A function of SparseTensors as a model, which may hold one."""

    def __init__(self, function: Callable[..., object], held: Tensor | None = None) -> None:
        super().__init__()
        self.function, self.held = function, held

    def forward(self, *arguments: Tensor) -> object:
        return self.function(*((self.held,) if self.held is not None else ()), *arguments)


def several(a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Results of the same pattern, of another one, of another format; one that is used again, and plain ones."""
    relu = torch.relu(a)
    return relu, relu @ x, a.t(), (a @ a.t()) @ x, a + a.t(), a.to(torch.float64), a


def plain(results: object) -> list[Tensor]:
    assert isinstance(results, tuple)
    return [each.to_dense() if isinstance(each, SparseTensor) else each for each in results]


@pytest.mark.parametrize(("strict", "format"), [(False, "CSR"), (True, "COO")])
def test_results(strict: bool, format: str) -> None:
    torch.manual_seed(0)
    a, x = sparse(matrix(6, 6), format), torch.randn(6, 3)
    models = [(Called(several), (a, x)), (Called(several, nn.Buffer(a)), (x,)), (Called(several, nn.Parameter(a)), (x,))]
    for model, arguments in models[strict:]:
        program = torch.export.export(model, arguments, strict=strict).module()
        expected, found = several(a, x), program(*arguments)
        assert [type(each) for each in found] == [type(each) for each in expected]
        torch.testing.assert_close(plain(found), plain(expected))
    compiled = torch.compile(program, backend="sparse", options={"dense": "eager"})
    torch.testing.assert_close(plain(compiled(*arguments)), plain(expected))


def test_other_values_and_gradients() -> None:
    """Of the exported program: what it gives for another tensor of the same structure, and what flows back through it."""
    torch.manual_seed(0)
    a, x = sparse(matrix(6, 6)).requires_grad_(), torch.randn(6, 3, requires_grad=True)
    program = torch.export.export(Called(several), (a, x)).module()
    other = a.detach().with_values(torch.randn(a.nnz)).requires_grad_()
    own = other.detach().requires_grad_()
    for run, given in ((program, other), (several, own)):
        x.grad = None
        torch.stack([each.float().square().sum() for each in plain(run(given, x))]).sum().backward()
        given.x_grad = x.grad
    torch.testing.assert_close(other.grad.to_dense(), own.grad.to_dense())
    torch.testing.assert_close(other.x_grad, own.x_grad)


def test_any_number_of_columns() -> None:
    torch.manual_seed(0)
    a, x = sparse(matrix(6, 6)), torch.randn(6, 3)
    columns = torch.export.Dim("columns", min=2, max=64)
    program = torch.export.export(
        Called(lambda a, x: (a * 2, a @ x)), (a, x), dynamic_shapes={"arguments": (None, {1: columns})}
    )
    for count in (2, 3, 40):
        wide = torch.randn(6, count)
        torch.testing.assert_close(plain(program.module()(a, wide)), plain((a * 2, a @ wide)))


def test_made_of_plain_arrays() -> None:
    arrays = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
    made = Called(lambda *arrays: (SparseTensor.from_parts(Format.CSR, (2, 3), *arrays, check=False),))
    program = torch.export.export(made, (*arrays, torch.ones(3))).module()
    torch.testing.assert_close(plain(program(*arrays, torch.arange(3.0)))[0], torch.tensor([[0, 0.0, 0], [1, 0, 2]]))
