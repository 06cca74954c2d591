"""Eager products skip the dispatcher where nobody watches, and only there."""

import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import SparseTensor, einsum
from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.tensor import fast_matmul
from gossamer.sparsity.tensor.einsum import EinsumError
from tests.sparsity.made import matrix, sparse


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The specs of the calls that take the short way."""
    specs, run = [], fast_matmul.einsum_on_cpu
    monkeypatch.setattr(fast_matmul, "einsum_on_cpu", lambda *given: specs.append(given[2]) or run(*given))
    return specs


@pytest.mark.parametrize("format", ["CSR", "COO", "BSR"])
def test_products_take_it(format: str, taken: list[str]) -> None:
    dense = matrix(6, 5)
    a, x, y = sparse(dense, format), torch.randn(5, 3), torch.randn(4, 6)
    for ours, expected in (
        (a @ x, dense @ x),
        (a @ x[:, 0], dense @ x[:, 0]),
        (y @ a, y @ dense),
        (y[0] @ a, y[0] @ dense),
        (a @ x.t().contiguous().t(), dense @ x),
        (einsum("ij,jk->ki", a, x), (dense @ x).T),
    ):
        torch.testing.assert_close(ours, expected)
    assert len(taken) == 6


def test_gradients_take_a_node_of_autograd(taken: list[str]) -> None:
    a, x = sparse(matrix(6, 5)), torch.randn(5, 3, requires_grad=True)
    for _ in range(2):
        out = a @ x
        assert type(out.grad_fn).__name__ == "einsumBackward"
        (found,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(found, a.to_dense().sum(0)[:, None].expand(5, 3))
    assert not taken
    with torch.no_grad():
        assert (sparse(matrix(6, 5)) @ x).grad_fn is None
    assert taken


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_profilers_and_graphs_see_the_operation(taken: list[str]) -> None:
    a, x = sparse(matrix(6, 5)), torch.randn(5, 3)
    with _Seen() as seen:
        a @ x
    assert "gossamer.einsum.default" in seen.names
    with torch.profiler.profile() as profiled:
        a @ x
    assert any("gossamer::einsum" in event.key for event in profiled.key_averages())
    assert not taken
    assert torch.compile(lambda m, v: m @ v, backend="aot_eager", fullgraph=True)(a, x).shape == (6, 3)
    traced = torch.jit.trace(lambda v: a @ v, x, check_trace=False)
    assert not taken
    torch.testing.assert_close(traced(2 * x), 2 * a.to_dense() @ x)
    traced = torch.jit.trace(lambda v: a[None].expand(2, 6, 5) @ v, x, check_trace=False)  # here sizes are tensors
    torch.testing.assert_close(traced(2 * x), (2 * a.to_dense() @ x).expand(2, 6, 3))
    for write in (lambda v: torch.zeros(6, 3).addmm_(a, v), lambda v: a.clone().mul_(2) @ v / 2):
        traced = torch.jit.trace(write, x, check_trace=False)
        for factor in (1, 2):
            torch.testing.assert_close(traced(factor * x), factor * a.to_dense() @ x)
    traced = torch.jit.trace(lambda v: a.flatten() @ v, torch.ones(30), check_trace=False)
    torch.testing.assert_close(traced(torch.ones(30)), a.to_dense().sum())


class _SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_every_product() -> None:
    a, x = sparse(matrix(6, 5)), torch.randn(5, 3)
    expected = repeated(a, x)
    with _SeenFunctions() as seen, torch.device("cpu"):
        products = [a @ x for _ in range(3)]
    assert sum("matmul" in name for name in seen.names) == 3
    assert all(torch.equal(product, expected) for product in products)


def test_autocast_is_obeyed() -> None:
    a, x = sparse(matrix(6, 5)), torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ x).dtype == torch.bfloat16
        for product in (torch.mv, lambda m, v: torch.addmv(x.new_zeros(6), m, v)):
            torch.testing.assert_close(product(a, x[:, 0]), product(a.to_dense(), x[:, 0]))  # torch does not convert these


@pytest.mark.parametrize("format", ["CSR", "CSC", "BSR"])
def test_sddmm_takes_it_too(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[SparseTensor | None] = []
    einsums = sys.modules["gossamer.sparsity.tensor.einsum"]  # the package has a function of this name
    run = einsums.sample_at_once
    monkeypatch.setattr(einsums, "sample_at_once", lambda *given: taken.append(run(*given)) or taken[-1])
    dense, x, y = matrix(6, 5), torch.randn(6, 3), torch.randn(5, 3)
    a = sparse(dense, format)
    for expression, operands in (
        ("ij,ik,jk->ij", (x, y)),
        ("ij,ki,jk->ij", (x.T.contiguous(), y)),
        ("ij,ik,jk,k->ij", (x, y, x[0])),
    ):
        out = einsum(expression, a, *operands)
        assert taken[-1] is out and out.format == a.format
        torch.testing.assert_close(out.to_dense(), torch.einsum(expression, dense, *operands))
    assert einsum("ij,ik,jk->ij", a, x.requires_grad_(), y).requires_grad
    with pytest.raises(EinsumError, match="'k' is 3 and 2"):
        einsum("ij,ik,jk->ij", a, x, y[:, :2])
    assert taken[-2:] == [None, None]


def test_mistakes_have_the_same_messages(taken: list[str]) -> None:
    a = sparse(matrix(6, 5))
    with pytest.raises(ArgumentError, match=r"\[6, 5\] .* \[4, 3\]"):
        a @ torch.randn(4, 3)
    with pytest.raises(ArgumentError, match="convert the operands to one dtype"):
        a @ torch.randn(5, 3, dtype=torch.float64)
    assert not taken


def test_two_sparse_ones_do_not(taken: list[str]) -> None:
    assert isinstance(sparse(matrix(6, 5)) @ sparse(matrix(5, 6)), SparseTensor)
    assert not taken


def repeated(a: SparseTensor, x: torch.Tensor) -> torch.Tensor:
    """a @ x, for which an earlier product has left something behind."""
    a @ x
    before = a._repeated
    assert before is not None
    product = before.times(a, x)
    assert product is not None
    return product


def test_a_second_product_with_a_matrix_by_rows_is_ready(taken: list[str]) -> None:
    dense = matrix(6, 5)
    a, x = sparse(dense), torch.randn(5, 3)
    torch.testing.assert_close(repeated(a, x), dense @ x)
    torch.testing.assert_close(a @ x[:, 0].contiguous(), dense @ x[:, 0])
    assert len(taken) == 1
    a.components[-1].data.mul_(2)
    torch.testing.assert_close(a @ x, 2 * dense @ x)
    torch.testing.assert_close(a @ x.t().contiguous().t(), 2 * dense @ x)  # x is not as it must be
    assert len(taken) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64], ids=str)
def test_torchs_operations_compute_further_products_of_types_without_kernels(dtype: torch.dtype) -> None:
    dense, x = (matrix(6, 5) > 0).to(dtype), torch.ones(5, 3, dtype=dtype)
    a = sparse(dense)
    for _ in range(2):
        assert torch.equal(a @ x, dense @ x) and torch.equal(a @ x[:, 0].contiguous(), dense @ x[:, 0])


def test_what_has_changed_since_is_seen() -> None:
    dense = matrix(6, 5)
    a, x = sparse(dense), torch.randn(5, 3)
    repeated(a, x)
    a.requires_grad_()
    assert (a @ x).requires_grad
    a.requires_grad_(False)
    assert (a @ x.requires_grad_()).requires_grad
    with pytest.raises(ArgumentError, match=r"\[6, 5\] .* \[4, 3\]"):
        a @ torch.randn(4, 3)
    values = a.components[-1]
    values.set_((2 * values).untyped_storage())
    with torch.no_grad():
        torch.testing.assert_close(a @ x, 2 * dense @ x)


def test_a_module_converts_its_matrix_after_a_product() -> None:
    """torch swaps such parameters, which takes that nobody refers to them weakly."""
    module, x = torch.nn.Module(), torch.randn(5, 3)
    module.a = torch.nn.Parameter(sparse(matrix(6, 5)))
    with torch.no_grad():
        before = repeated(module.a, x)
        module.double()
        # The sums before were of float32, in another order.
        torch.testing.assert_close(module.a @ x.double(), before.double(), rtol=1e-5, atol=1e-5)


def test_what_is_ready_is_made_anew_once_the_values_have_moved(taken: list[str]) -> None:
    dense = matrix(6, 5)
    a, x = sparse(dense), torch.randn(5, 3)
    repeated(a, x)
    values = a.components[-1]
    values.data = 2 * values
    assert len(taken) == 1
    for _ in range(3):
        torch.testing.assert_close(a @ x, 2 * dense @ x)
    assert len(taken) == 2
