"""The schedule "slices": products of a vector with a matrix that is used again, in slices of rows."""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import Format, SparseTensor, einsum
from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import Slices
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import host
from gossamer.runtime.torch_internals import PRIVATE
from gossamer.sparsity.arrays import sliced_rows
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.arrays.sliced_rows import SlicedRows
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.contract_ir import einsum as einsum_ir
from gossamer.sparsity.operations.matrix_calls import ByRows
from tests.sparsity.made import sparse, team_of

CSR = Format.CSR.with_widths(32, 32)
A, X, Y = Operand("ik", CSR), Operand("k"), Operand("i")
TIMES = sliced_rows._SETTLED


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_rows, "_LEAST", 1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The values that are brought into slices."""
    found: list[torch.Tensor] = []
    fill = SlicedRows.fill
    monkeypatch.setattr(SlicedRows, "fill", lambda form, values, stored: found.append(stored) or fill(form, values, stored))
    yield found


def skewed(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Small integers, rows of all lengths, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, 1, generator=generator) ** 3
    return (
        torch.randint(1, 4, (rows, columns), generator=generator) * (torch.rand(rows, columns, generator=generator) < share)
    ).float()


def again(a: SparseTensor, x: torch.Tensor, times: int = TIMES + 2) -> list[torch.Tensor]:
    return [a @ x for _ in range(times)]


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


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor | None]]:
    """The values that products hash, None for a product that does not."""
    found: list[Tensor | None] = []
    bound = SlicedRows.bound

    def noted(form: SlicedRows, kernel: RegionKernel, stored: Tensor | None, *words: int) -> Callable[..., None]:
        call = bound(form, kernel, stored, *words)
        return lambda *left: found.append(stored) or call(*left)

    monkeypatch.setattr(SlicedRows, "bound", noted)
    yield found


def in_memory_of(owner: str) -> tuple[SparseTensor, Callable[[], object]]:
    """A matrix, and somebody who can write to its values."""
    a = sparse(skewed(2000, 40))
    values = a.components[-1]
    if owner == "torch":
        return a, lambda: values.mul_(2)
    if owner == "another tensor":
        hidden = values.data
        return a, lambda: hidden[1::2].neg_()
    if owner == "nobody":
        return a, lambda: values.data.copy_(values.flip(0))
    if owner == "NumPy":
        return a, lambda: values.numpy().__setitem__(7, 5.0)
    if owner == "DLPack":
        array = np.from_dlpack(values)
        return a, lambda: array.__setitem__(7, 5.0)
    if owner == "NumPy before":
        values.numpy()
        return a, lambda: values.data.copy_(values.flip(0))
    array = values.numpy().copy()
    return a.with_values(torch.from_numpy(array)), lambda: array.__setitem__(7, 5.0)


@pytest.mark.parametrize("owner", ["torch", "nobody", "another tensor", "NumPy", "NumPy before", "an array of NumPy", "DLPack"])
def test_values_that_were_written_to_are_seen(owner: str, copied: list[torch.Tensor]) -> None:
    (a, write), x = in_memory_of(owner), torch.randint(-3, 4, (40,)).float()
    again(a, x)
    write()
    expected = a.to_dense() @ x
    assert all(torch.equal(y, expected) for y in again(a, x, TIMES + 3))
    assert len(copied) == 2


@pytest.mark.parametrize("owner", ["torch", "another tensor", "NumPy before", "an array of NumPy", "DLPack"])
def test_values_are_hashed_where_writes_may_not_be_counted(owner: str, hashed: list[Tensor | None]) -> None:
    (a, _write), x = in_memory_of(owner), torch.ones(40)
    again(a, x, TIMES + 3)
    assert [stored is not None for stored in hashed] == [True, *[owner != "torch"] * 4]


def step(optimizer: type[torch.optim.Optimizer], **options: bool) -> Callable[[SparseTensor], object]:
    def write(a: SparseTensor) -> None:
        a.grad = a.detach().clone()
        optimizer([a], lr=0.5, **options).step()

    return write


def load(a: SparseTensor) -> None:
    module = torch.nn.Module()
    module.register_parameter("a", a)
    module.load_state_dict({"a": (2 * a).detach()})


def in_inference_mode(a: SparseTensor) -> None:
    with torch.inference_mode():
        a.mul_(3)


WRITES: dict[str, Callable[[SparseTensor], object]] = {
    "mul_": lambda a: a.mul_(3),
    "copy_": lambda a: a.copy_(2 * a),
    "zero_": lambda a: a.zero_(),
    "foreach": lambda a: torch._foreach_mul_([a], 2.0),
    "detach": lambda a: a.detach().mul_(3),
    "data": lambda a: a.data.mul_(3),
    "inference mode": in_inference_mode,
    "SGD": step(torch.optim.SGD),
    "fused Adam": step(torch.optim.Adam, fused=True),
    "load_state_dict": load,
    "compiled": lambda a: torch.compile(lambda a: a.mul_(3), fullgraph=True)(a),
}


@pytest.mark.parametrize("format", ["CSR", "CSC"])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writes_to_the_matrix_are_seen(write: str, format: str, hashed: list[Tensor | None]) -> None:
    a, x = torch.nn.Parameter(sparse(skewed(2000, 40), format)), torch.randint(-3, 4, (40,)).float()
    assert isinstance(a, SparseTensor)
    before = again(a, x, 6)[-1]
    assert (hashed[-1] is None) == (format == "CSR")  # by columns, arrays alone are known
    WRITES[write](a)
    expected = a.to_dense() @ x
    assert not torch.allclose(before, expected)
    for y in again(a, x, 6):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert (hashed[-1] is None) == (format == "CSR")


def test_values_are_hashed_where_torch_does_not_tell_who_has_them(
    monkeypatch: pytest.MonkeyPatch, hashed: list[Tensor | None]
) -> None:
    monkeypatch.setattr(sliced_rows, "storage_references", PRIVATE["storage_references"].stand_in)
    monkeypatch.setattr(sliced_rows, "_references_tell", sliced_rows._references_tell.__wrapped__)
    again(band(500), torch.ones(500))
    assert hashed and all(stored is not None for stored in hashed)


def test_new_values_in_the_memory_of_old_ones_are_seen() -> None:
    pattern, x = band(500), torch.ones(500)
    for value in (1.0, 2.0, 3.0):
        a = pattern.with_values(torch.full((2500,), value))
        assert all(bool((y == 5 * value).all()) for y in again(a, x))
        del a


def test_a_tensor_that_gets_other_memory_is_seen() -> None:
    a, x = band(500), torch.ones(500)
    values = a.components[-1]
    for value in range(2, 6):
        again(a, x)
        values.data = torch.zeros(2500)  # which gives back the memory that the next one takes
        values.data = torch.full((2500,), float(value))
        assert all(bool((y == 5 * value).all()) for y in again(a, x))


def test_another_tensor_over_the_same_memory_has_its_own_count(copied: list[torch.Tensor]) -> None:
    a, x = band(500), torch.ones(500)
    values = a.components[-1]
    again(a, x)
    hidden = values.data
    values.mul_(2)
    a = a.with_values(hidden)
    del values
    assert all(bool((y == 10).all()) for y in again(a, x))
    assert len(copied) == 2


def test_tensors_without_a_count_of_writes_are_hashed(hashed: list[Tensor | None]) -> None:
    with torch.inference_mode():
        a, x = band(500), torch.ones(500)
        again(a, x, TIMES + 1)
        a.components[-1].mul_(3)
        assert all(bool((y == 15).all()) for y in again(a, x))
    assert all(stored is not None for stored in hashed)


def test_new_values_at_every_product_are_not_copied(copied: list[torch.Tensor]) -> None:
    a, x = sparse(skewed(2000, 40)), torch.ones(40)
    for _ in range(6):
        a @ x
        a.components[-1].add_(1)
    assert not copied


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


def band(rows: int, dtype: torch.dtype = torch.float32, value: float = 1.0) -> SparseTensor:
    """Five entries in each row."""
    columns = (torch.arange(rows).unsqueeze(1) + torch.arange(5)).remainder(rows).sort(1).values
    positions = 5 * torch.arange(rows + 1, dtype=torch.int32)
    return SparseTensor.from_parts(
        CSR, (rows, rows), positions, columns.flatten().int(), torch.full((5 * rows,), value, dtype=dtype)
    )


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
