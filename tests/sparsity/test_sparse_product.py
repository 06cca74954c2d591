"""Products of two sparse matrices: each format with each, gradients, narrow integers, columns that hardly any entry has."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from gossamer import Format, FormatError, SparseTensor, einsum
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.operations import sparse_product

FORMATS = {
    "CSR": Format.CSR,
    "CSC": Format.CSC,
    "COO": Format.COO,
    "DCSR": Format.DCSR,
    "DCSC": Format.DCSC,
    "BSR": Format.bsr(2, 2),
    "narrow": Format.CSR.with_widths(16, 8),
}


def _matrix(rows: int, columns: int, seed: int, density: float = 0.3) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, columns, generator=made) < density
    return torch.randint(-3, 4, (rows, columns), generator=made) * kept.float()


@pytest.mark.parametrize("left", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("right", FORMATS.values(), ids=FORMATS)
def test_formats(left: Format, right: Format) -> None:
    a, b = _matrix(13, 10, 1), _matrix(10, 17, 2)
    torch.testing.assert_close((SparseTensor.from_dense(a, left) @ SparseTensor.from_dense(b, right)).to_dense(), a @ b)


@pytest.mark.parametrize("result", [Format.CSR, Format.CSC, Format.COO])
@pytest.mark.parametrize("expression", ["ik,kj->ij", "ki,kj->ij", "ik,jk->ij", "ik,kj->ji"])
def test_transposes(expression: str, result: Format) -> None:
    a, b = _matrix(12, 12, 1).double(), _matrix(12, 12, 2).double()
    product = einsum(expression, SparseTensor.from_dense(a), SparseTensor.from_dense(b), format=result)
    assert product.format.levels == result.levels
    torch.testing.assert_close(product.to_dense(), torch.einsum(expression, a, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", [Format.CSR, Format.COO, Format.bsr(2, 2)], ids=["CSR", "COO", "BSR"])
def test_sums_of_narrow_floats_are_in_f32(dtype: torch.dtype, format: Format) -> None:
    a, b = _matrix(6, 3000, 1).abs().to(dtype), _matrix(3000, 8, 2).abs().to(dtype)
    product = SparseTensor.from_dense(a, format) @ SparseTensor.from_dense(b, format)
    assert product.dtype == dtype
    assert torch.equal(product.to_dense(), (a.double() @ b.double()).to(dtype))  # which 16 bits could not have counted to
    total = SparseTensor.from_dense(a, format) + SparseTensor.from_dense(b.t().contiguous()[:6], format)
    assert torch.equal(total.to_dense(), a + b.t()[:6])


def test_gradients() -> None:
    a = SparseTensor.from_dense(_matrix(8, 8, 1).double())

    def gram(values: Tensor) -> Tensor:
        of = a.with_values(values)
        return (of @ of.t()).values()

    assert torch.autograd.gradcheck(gram, (a.values().clone().requires_grad_(),))


WRITES = {
    "counted": lambda values: values.mul_(2),
    "by NumPy": lambda values: np.multiply(values.numpy(), 2, out=values.numpy()),
    "through data": lambda values: values.data.mul_(2),
    "to NaN": lambda values: values.data.fill_(torch.nan),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_values_that_are_kept_by_rows_follow_those_that_are_stored(write: Callable[[Tensor], object]) -> None:
    a = SparseTensor.from_dense(_matrix(12, 10, 1))
    for _ in range(3):
        dense = a.to_dense()
        torch.testing.assert_close((a @ a.T).to_dense(), dense @ dense.T, equal_nan=True)
    gathered = len(sparse_product._gathered)
    write(a.values())
    found, dense = (a @ a.T).to_dense(), a.to_dense()
    torch.testing.assert_close(torch.nan_to_num(found, 7), torch.nan_to_num(dense @ dense.T, 7).where(found != 0, 0))
    assert len(sparse_product._gathered) == gathered
    del a
    gc.collect()
    assert len(sparse_product._gathered) < gathered


def test_values_by_rows_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def values(form: RowForm, stored: Tensor) -> Tensor:
        if form.order is None:
            return stored
        gathered.append(form)
        return stored.index_select(0, form.order)

    monkeypatch.setattr(RowForm, "values", values)
    a = SparseTensor.from_dense(_matrix(12, 10, 1).masked_fill(_matrix(12, 10, 3) == 3, torch.nan))
    for _ in range(3):
        a @ a.T
    assert len(gathered) == 1


def test_narrow_integers_hold_what_fits_them() -> None:
    a = _matrix(250, 250, 1, 0.01)
    product = SparseTensor.from_dense(a, Format.CSR.with_widths(16, 8)) @ SparseTensor.from_dense(a, Format.CSR)
    assert [array.dtype for array in product.components[:-1]] == [torch.int16, torch.int8]
    torch.testing.assert_close(product.to_dense(), a @ a)


@pytest.mark.parametrize(("widths", "said"), [((16, 16), r"with_widths\(32, 16\)"), ((32, 8), r"with_widths\(32, 16\)")])
def test_narrow_integers_that_the_result_does_not_fit_are_refused(widths: tuple[int, int], said: str) -> None:
    a = SparseTensor.from_dense(_matrix(300, 300, 1))
    with pytest.raises(FormatError, match=said):
        einsum("ik,kj->ij", a, a, format=Format.CSR.with_widths(*widths))


@pytest.mark.parametrize("columns", [1 << 30, 1 << 61])
def test_columns_without_entries_take_no_memory(columns: int) -> None:
    ones, at = torch.ones(2), torch.tensor([5, columns - 1])
    wide = SparseTensor.from_parts(Format.CSR, (2, columns), torch.tensor([0, 1, 2]), at, ones)
    product = SparseTensor.from_dense(torch.tensor([[2.0, 3.0]])) @ wide
    positions, coordinates, values = product.components
    assert positions.tolist() == [0, 2]
    assert coordinates.tolist() == at.tolist()
    assert values.tolist() == [2, 3]


def test_hypersparse_products_have_the_entries_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    a = SparseTensor.from_dense(_matrix(40, 40, 1))
    expected = a @ a
    monkeypatch.setattr(sparse_product, "_WIDE", 0)
    monkeypatch.setattr(sparse_product, "_HYPERSPARSE", 0)
    for ours, theirs in zip((a @ a).components, expected.components, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("error::UserWarning", "ignore:torch.compile broke the graph at .*test_sparse_product")
def test_dynamo_does_not_trace_what_runs_between_its_graphs() -> None:
    a, x = _matrix(30, 30, 1), torch.randn(30, 4)
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        compiled = torch.compile(lambda a, x: torch.relu((a @ a) @ x), backend="sparse", options={"dense": "eager"})
        ours = compiled(SparseTensor.from_dense(a), x)
    torch.testing.assert_close(ours, torch.relu(a @ a @ x))
    assert all(reason.startswith("Dynamic shape operator") for reason in counters["graph_break"])
    torch._dynamo.reset()
