"""Copied values of a matrix that is used again: writes to the matrix are seen, however they come about."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import SparseTensor
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.torch_names import PRIVATE
from gossamer.sparsity.arrays import sliced_rows
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.arrays.sliced_rows import SlicedRows
from tests.sparsity.made import sparse
from tests.sparsity.sliced import TIMES, again, band, copied, of_any_size, skewed

__all__ = ["copied", "of_any_size"]


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
    timed = 0 if owner == "torch" else sliced_rows._ROUNDS
    assert [stored is not None for stored in hashed] == [True, *[owner != "torch"] * (timed + 4)]


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
    assert hashed[-1] is None
    WRITES[write](a)
    expected = a.to_dense() @ x
    assert not torch.allclose(before, expected)
    for y in again(a, x, 6):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert hashed[-1] is None


def test_compiled_products_rely_on_the_count_of_writes(hashed: list[Tensor | None]) -> None:
    a, x = sparse(skewed(2000, 40)), torch.randint(-3, 4, (40,)).float()
    product = torch.compile(lambda a, x: a @ x, fullgraph=True)
    write = torch.compile(lambda a: a.mul_(3), fullgraph=True)
    for _ in range(2):
        for _ in range(TIMES + 2):
            assert torch.equal(product(a, x), a.to_dense() @ x)
        assert hashed[-1] is None
        write(a)


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


@pytest.mark.parametrize("pays", [False, True])
def test_products_that_hash_values_stay_by_rows_if_that_is_faster(
    pays: bool, hashed: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle([0, 1, 0, 2] if pays else [0, 2, 0, 1])  # begin and end of a product by slices, then by rows
    monkeypatch.setattr(sliced_rows, "_clock", lambda threads: lambda: float(next(times)))
    with torch.inference_mode():
        a, x = band(500), torch.ones(500)
        assert all(bool((y == 5).all()) for y in again(a, x, TIMES + 1))
        begun = len(hashed)
        assert all(bool((y == 5).all()) for y in again(a, x, 4))
    assert len(hashed) - begun == 4 * pays


def test_products_of_known_matrices_do_not_hash_values_where_rows_are_faster(hashed: list[Tensor | None]) -> None:
    a, x = sparse(skewed(2000, 40)), torch.ones(40)
    use = sliced_rows.use_of(RowForm(*a.components[:2], None), a.components[-1])
    assert use is not None
    use._hash_pays[torch.get_num_threads()] = False
    again(a, x, TIMES + 3)
    assert [stored is not None for stored in hashed] == [True, *[False] * 4]


def test_new_values_at_every_product_are_not_copied(copied: list[torch.Tensor]) -> None:
    a, x = sparse(skewed(2000, 40)), torch.ones(40)
    for _ in range(6):
        a @ x
        a.components[-1].add_(1)
    assert not copied
