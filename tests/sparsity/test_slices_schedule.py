"""The schedule "slices": products of a vector with a matrix that is used again, in slices of rows."""

import ctypes
import gc
import threading

import numpy as np
import pytest
import torch

from gossamer import SparseTensor, einsum
from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import Slices
from gossamer.runtime.target import host
from gossamer.sparsity.arrays import sliced_rows
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.arrays.sliced_rows import SlicedRows
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.contract_ir import einsum as einsum_ir
from gossamer.sparsity.operations.matrix_calls import ByRows
from tests.sparsity.made import sparse, team_of
from tests.sparsity.sliced import CSR, TIMES, again, band, copied, of_any_size, skewed

__all__ = ["copied", "of_any_size"]

A, X, Y = Operand("ik", CSR), Operand("k"), Operand("i")


@pytest.mark.parametrize(("schedule", "width", "apart"), [("slices16", 16, 1), ("slices", 32, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_computes_what_the_reference_does(dtype: torch.dtype, schedule: str, width: int, apart: int) -> None:
    contract, x = einsum_ir([A, X], Y, dtype), torch.arange(90 * apart).remainder(7).to(dtype)
    reference, sliced = (compile_region(contract, schedule=each) for each in ("reference", schedule))
    positions, columns, values = sparse(skewed(203, 90).to(dtype)).components
    form = RowForm(positions.int(), columns.int() * apart, None)
    packing = sliced.formats[0]
    assert isinstance(packing, Slices)
    slices = SlicedRows.of(form, packing.lanes, windows=host().vector_bits >= 512)
    assert slices is not None
    assert slices.width == packing.width == width
    copy, outputs = torch.empty(len(slices.order), dtype=dtype), [torch.full((203,), torch.nan, dtype=dtype) for _ in range(4)]

    slices.fill(copy, values)
    reference([ByRows(form.positions, form.coordinates, values, 203, len(x)), x], outputs[0])
    hashes = set()
    for threads, out in zip((1, 2, 5), outputs[1:], strict=True):
        with team_of(threads):
            found = ctypes.c_int64()
            words = (word for tensor in (copy, x, out) for word in (tensor.data_ptr(), tensor.numel()))
            slices.bound(sliced, values)(ctypes.addressof(found), 2, *words)
            hashes.add(found.value)
        assert torch.equal(out, outputs[0])
    assert len(hashes) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_what_it_refuses(dtype: torch.dtype) -> None:
    with pytest.raises(CompileError):
        compile_region(einsum_ir([A, X], Y, dtype), schedule="slices")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("format", ["CSR", "CSC", "COO"])
def test_the_third_product_takes_it(format: str, threads: int, copied: list[torch.Tensor]) -> None:
    dense, x = skewed(3000, 40), torch.randn(40)
    a = sparse(dense, format)
    with team_of(threads):
        assert not copied
        for y in again(a, x):
            torch.testing.assert_close(y, dense @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a @ x.unsqueeze(1), (dense @ x).unsqueeze(1), rtol=1e-4, atol=1e-4)
    assert len(copied) == 1


def test_transposed_products_take_it(copied: list[torch.Tensor]) -> None:
    dense, x = skewed(50, 2000).T.contiguous().T, torch.randn(50)
    a = sparse(dense)
    for _ in range(TIMES + 1):
        torch.testing.assert_close(einsum("ij,i->j", a, x), dense.T @ x, rtol=1e-4, atol=1e-4)
    assert len(copied) == 1


def stencil(side: int) -> SparseTensor:
    import scipy.sparse as sp

    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=(-1, 0, 1), shape=(side, side))
    found = sp.csr_array(sp.kronsum(line, line)).astype(np.float32)
    found.sort_indices()
    return SparseTensor.from_scipy(found)


def test_columns_that_follow_each_other_are_not_gathered() -> None:
    a, x = stencil(40), torch.randint(-3, 4, (1600,)).float()
    expected = torch.from_numpy(a.to_scipy() @ x.numpy())
    assert all(torch.equal(y, expected) for y in again(a, x))
    structure = next(use._form for _, use in sliced_rows._uses.items() if use._form is not None).structure
    origins, starts = structure[2], structure[6]
    assert (origins >= 0).float().mean() > 0.5
    assert (starts >= 0).float().mean() > 0.5


def test_rows_that_would_be_filled_up_too_much_stay_as_they_are(copied: list[torch.Tensor]) -> None:
    dense = torch.eye(64, 4000)
    dense[0] = 1
    a, x = sparse(dense), torch.randn(4000)
    for y in again(a, x):
        torch.testing.assert_close(y, dense @ x, rtol=1e-4, atol=1e-4)
    assert not copied


def test_infinity_and_nan_reach_the_rows_that_use_them_and_no_others() -> None:
    dense, x = skewed(3000, 40), torch.ones(40)
    x[0], x[5] = torch.nan, torch.inf
    touched = (dense[:, 0] != 0) | (dense[:, 5] != 0)
    for y in again(sparse(dense), x):
        torch.testing.assert_close(~torch.isfinite(y), touched)


def test_nothing_is_kept_of_a_matrix_that_is_gone() -> None:
    a = sparse(skewed(2000, 40))
    again(a, torch.randn(40))
    gc.collect()
    alive = len(sliced_rows._uses)
    del a
    gc.collect()
    assert len(sliced_rows._uses) == alive - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [40, 80, 5000])
def test_patterns_swapped_here_and_swapped_back_there_are_seen(dtype: torch.dtype, far: int) -> None:
    a, x = band(4096, dtype), torch.arange(4096).to(dtype)
    step = 8 // dtype.itemsize  # as long as a pair of words
    values, first, second = a.components[-1].numpy(), step - 1, step - 1 + step * far
    values[first] = values[second + step] = 2
    again(a, x)
    values[[first, first + step, second, second + step]] = 1, 2, 2, 1
    assert torch.equal(a @ x, a.to_dense() @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_write_to_any_value_of_the_first_lines_is_seen(dtype: torch.dtype) -> None:
    a, x = band(500, dtype), torch.ones(500, dtype=dtype)
    for at in range(20):
        again(a, x, TIMES + 1)
        a.components[-1].numpy()[at] = 2
        assert torch.equal(a @ x, a.to_dense() @ x)


def test_a_write_while_values_are_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, a, x = SlicedRows.fill, band(500), torch.ones(500)

    def then_written(form: SlicedRows, values: torch.Tensor, stored: torch.Tensor) -> None:
        fill(form, values, stored)
        stored.numpy()[:] = 3

    monkeypatch.setattr(SlicedRows, "fill", then_written)
    assert [int(y[0]) for y in again(a, x, 2 * TIMES)] == [5] * (TIMES - 1) + [15] * (TIMES + 1)


def test_matrices_over_the_same_arrays_have_forms_of_their_own(copied: list[torch.Tensor]) -> None:
    positions, columns, values = band(1000).components
    positions = torch.cat([positions, positions[-1:].expand(24)])
    x = torch.ones(1000)
    for rows in (1024, 1000, 600, 1024):
        parts = positions[: rows + 1], columns[: 5 * rows], values[: 5 * rows]
        a = SparseTensor.from_parts(CSR, (rows, 1000), *parts)
        for y in again(a, x):
            assert torch.equal(y, torch.cat([torch.full((min(rows, 1000),), 5.0), torch.zeros(max(rows - 1000, 0))]))
    assert len(copied) >= 3


@pytest.mark.parametrize("at", [0, 1])
def test_a_structure_written_to_is_seen(at: int) -> None:
    a, x = band(500), torch.arange(500).float()
    again(a, x)
    a.components[at][10:-20].sub_(1)
    same = SparseTensor.from_parts(CSR, (500, 500), *(array.clone() for array in a.components), check=False)
    expected = same @ x
    assert all(torch.equal(y, expected) for y in again(a, x))


def test_what_one_thread_copies_is_not_used_for_the_values_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x, fill = band(500), torch.ones(500), SlicedRows.fill
    b = SparseTensor.from_parts(CSR, (500, 500), *a.components[:2], torch.full((2500,), 2.0))

    def meanwhile(form: SlicedRows, values: torch.Tensor, stored: torch.Tensor) -> None:
        fill(form, values, stored)
        monkeypatch.setattr(SlicedRows, "fill", fill)
        other = threading.Thread(target=again, args=(b, x, 1))
        other.start()
        other.join()

    monkeypatch.setattr(SlicedRows, "fill", meanwhile)
    again(a, x, TIMES)
    for matrix, value in ((b, 10), (a, 5), (b, 10)):
        assert all(bool((y == value).all()) for y in again(matrix, x))


def test_forms_and_values_take_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch, copied: list[torch.Tensor]) -> None:
    x, matrices = torch.ones(500), [band(500, value=value) for value in (1.0, 2.0, 3.0)]
    again(matrices[0], x)
    size = sliced_rows._uses.items()[-1][1].bytes
    monkeypatch.setattr(sliced_rows, "_BYTES", 2 * size)
    for number in (1, 0, 2):  # the second goes
        again(matrices[number], x)
    assert sum(use.bytes for _, use in sliced_rows._uses.items()) == 2 * size
    assert sum(type(found) is SlicedRows for found in gc.get_objects()) == 2
    copies = len(copied)
    again(matrices[0], x)
    assert len(copied) == copies
    assert all(bool((y == 10).all()) for y in again(matrices[1], x))
    assert len(copied) == copies + 1
    monkeypatch.setattr(sliced_rows, "_BYTES", size - 1)
    assert all(bool((y == 5).all()) for y in again(band(500), x))
    assert len(copied) == copies + 1


def test_deterministic_algorithms_stay_by_rows(copied: list[torch.Tensor]) -> None:
    a, x = band(500), torch.randn(500)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = again(a, x)
        assert all(torch.equal(y, first) for y in others)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not copied
