"""Eager products skip the dispatcher where nobody watches, and only there."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import SparseTensor, einsum
from gossamer.sparsity import at_once
from gossamer.sparsity import repeated as repeated_products
from gossamer.sparsity.einsum import EinsumError
from gossamer.sparsity.repeated import known
from tests.sparsity.made import matrix, sparse


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The specs of the calls that take the short way."""
    specs, run = [], at_once.einsum_on_cpu
    monkeypatch.setattr(at_once, "einsum_on_cpu", lambda *given: specs.append(given[2]) or run(*given))
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


def test_gradients_do_not(taken: list[str]) -> None:
    a, x = sparse(matrix(6, 5)), torch.randn(5, 3, requires_grad=True)
    (a @ x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not taken
        a @ x
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


def test_autocast_is_obeyed() -> None:
    a, x = sparse(matrix(6, 5)), torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ x).dtype == torch.bfloat16


def test_mistakes_have_the_same_messages(taken: list[str]) -> None:
    a = sparse(matrix(6, 5))
    with pytest.raises(EinsumError, match="is 5 and 4"):
        a @ torch.randn(4, 3)
    with pytest.raises(EinsumError, match="convert the operands to one dtype"):
        a @ torch.randn(5, 3, dtype=torch.float64)
    assert not taken


def test_two_sparse_ones_do_not(taken: list[str]) -> None:
    assert isinstance(sparse(matrix(6, 5)) @ sparse(matrix(5, 6)), SparseTensor)
    assert not taken


def repeated(a: SparseTensor, x: torch.Tensor) -> torch.Tensor:
    """a @ x, for which an earlier product has left something behind."""
    a @ x
    before = known(a)
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


def test_what_has_changed_since_is_seen() -> None:
    dense = matrix(6, 5)
    a, x = sparse(dense), torch.randn(5, 3)
    repeated(a, x)
    a.requires_grad_()
    assert (a @ x).requires_grad
    a.requires_grad_(False)
    assert (a @ x.requires_grad_()).requires_grad
    with pytest.raises(EinsumError, match="is 5 and 4"):
        a @ torch.randn(4, 3)
    values = a.components[-1]
    values.set_((2 * values).untyped_storage())
    with torch.no_grad():
        torch.testing.assert_close(a @ x, 2 * dense @ x)


def test_what_is_ready_goes_with_the_matrix() -> None:
    a = sparse(matrix(6, 5))
    a @ torch.randn(5, 3)
    alive = len(repeated_products._known)
    del a
    gc.collect()
    assert len(repeated_products._known) == alive - 1


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
