"""Every matrix times dense takes a schedule of ours: its rows are found once and kept as long as its arrays live."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from gossamer import Format, SparseTensor, einsum
from gossamer.sparsity.arrays import row_form
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec, dense
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.operations.matrix_calls import RowProduct, RowSample
from gossamer.sparsity.tensor.sparse_tensor import bound_to
from tests.sparsity.made import FORMATS, matrix, sparse

STORED = [name for name in FORMATS if name != "dense"]
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ij,jk->ik": lambda a, x: a @ x,
    "ij,kj->ik": lambda a, x: a @ x.T,
    "ij,jk->ki": lambda a, x: (a @ x).T,
    "ij,ik->jk": lambda a, x: a.T @ x,
    "ij,ik->kj": lambda a, x: (a.T @ x).T,
    "ij,j->i": lambda a, x: a @ x,
    "ij,i->j": lambda a, x: a.T @ x,
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("expression", PRODUCTS)
def test_products_of_every_format(expression: str, name: str) -> None:
    a = matrix(13, 10)
    sizes = {"i": 13, "j": 10, "k": 6}
    x = torch.randint(-3, 4, [sizes[letter] for letter in expression.split("->")[0].split(",")[1]]).float()
    inputs, result = expression.split("->")
    spec = Spec((Operand(inputs[:2], FORMATS[name]), Operand(inputs[3:])), Operand(result))
    assert RowProduct.of(spec) is not None
    torch.testing.assert_close(einsum(expression, sparse(a, name), x, format="dense"), PRODUCTS[expression](a, x))
    turned = einsum(f"{inputs[3:]},{inputs[:2]}->{result}", x, sparse(a, name), format="dense")
    torch.testing.assert_close(turned, PRODUCTS[expression](a, x))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("right", ["kj", "jk"])
def test_samples_of_every_format(name: str, right: str) -> None:
    a, x, y = matrix(13, 10), torch.randint(-3, 4, (13, 6)).float(), torch.randint(-3, 4, (6, 10)).float()
    spec = Spec((Operand("ij", FORMATS[name]), Operand("ik"), Operand(right)), Operand("p"))
    assert RowSample.of(spec) is not None
    pattern = bound_to("ij", sparse(a, name))
    values = sample(pattern, [dense("ik", x), dense(right, y if right == "kj" else y.T.contiguous())])
    weighted = pattern.with_values(pattern.values * values)
    found = SparseTensor(FORMATS[name], a.shape, weighted.arrays).to_dense()
    torch.testing.assert_close(found, a * (x @ y))


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        ((Operand("ij", FORMATS["dense"]), Operand("jk")), "ik"),  # stores everything
        ((Operand("ij", Format.CSR), Operand("ij")), "ij"),  # not a product
        ((Operand("ij", Format.CSR), Operand("jk")), "k"),  # sums over i too
        ((Operand("ijk", Format.csf(3)), Operand("kl")), "ijl"),
        ((Operand("ij", Format.CSR), Operand("jkl")), "ikl"),
        ((Operand("ij", Format.CSR), Operand("jk"), Operand("k")), "i"),
    ],
)
def test_what_is_no_product_with_one_matrix(operands: tuple[Operand, ...], result: str) -> None:
    assert RowProduct.of(Spec(operands, Operand(result))) is None


def test_rows_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], row_form.sorted_by_rows
    monkeypatch.setattr(row_form, "sorted_by_rows", lambda *given: made.append(1) or make(*given))
    dense_, x = matrix(9, 7), torch.randn(9, 4)
    a = sparse(dense_)
    for _ in range(3):
        torch.testing.assert_close(a.t() @ x, dense_.T @ x)
        torch.testing.assert_close((a * 2).t() @ x, 2 * dense_.T @ x)  # the same pattern, other values
        a @ torch.randn(7, 4)  # is stored by rows
    assert len(made) == 1


def test_arrays_of_others_over_the_same_memory_have_forms_of_their_own() -> None:
    columns, x = np.arange(9, dtype=np.int32), torch.randn(9, 4)
    shared = sp.csr_array((np.ones(9, np.float32), columns, np.arange(10, dtype=np.int32)), shape=(9, 9))
    first = SparseTensor.from_scipy(shared)
    torch.testing.assert_close(first.t() @ x, x)
    shared.indices[:] = np.roll(columns, 1)
    second = SparseTensor.from_scipy(shared)
    torch.testing.assert_close(second.t() @ x, torch.from_numpy(shared.T @ x.numpy()))
    assert first.components[1].data_ptr() == second.components[1].data_ptr()


def test_arrays_without_a_count_of_writes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], row_form.sorted_by_rows
    monkeypatch.setattr(row_form, "sorted_by_rows", lambda *given: made.append(1) or make(*given))
    with torch.inference_mode():
        a, x = sparse(torch.eye(9), "CSC"), torch.randn(9, 4)
        for _ in range(2):
            torch.testing.assert_close(a @ x, x)
        a.components[1].copy_(a.components[1].roll(1))
        torch.testing.assert_close(a @ x, torch.eye(9).roll(-1, 0) @ x)
    assert len(made) == 2


def test_values_written_in_any_way_are_seen() -> None:
    dense_, x = matrix(9, 7), torch.randn(9, 4)
    a = sparse(dense_)
    a.t() @ x
    a.components[-1].data.mul_(3)
    torch.testing.assert_close(a.t() @ x, 3 * dense_.T @ x)


def test_nothing_is_kept_of_a_matrix_that_is_gone() -> None:
    kept = row_form._kept
    a = sparse(matrix(50, 70), "COO")
    a @ torch.randn(70, 2)
    gc.collect()
    alive = len(kept)
    del a
    gc.collect()
    assert len(kept) == alive - 1


def test_what_is_too_large_to_be_stored_twice_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_form, "LARGE", 3)
    a, x = matrix(9, 7, 1.0), torch.randint(-3, 4, (9, 4)).float()
    torch.testing.assert_close(sparse(a).t() @ x, a.T @ x)
