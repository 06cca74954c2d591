"""The schedule "gustavson": CSR times CSR to CSR, in one pass and in two, on any number of threads."""

import gc

import numpy as np
import pytest
import scipy.sparse
import torch

from gossamer import Format, SparseTensor
from gossamer.dialects.errors import CompileError
from gossamer.runtime.memory import warm_memory
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand, einsum
from gossamer.sparsity.compiler.kernel_memory import GIVER, given
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.calls import kernel_of
from gossamer.sparsity.operations.sparse_kernels import _arrays, _einsum_ir
from tests.sparsity.made import by_rows, team_of

CSR = Format.CSR.with_widths(32, 32)
A, B, C = Operand("ik", CSR), Operand("kj", CSR), Operand("ij", CSR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_chosen_for_csr(dtype: torch.dtype) -> None:
    assert kernel_of(_einsum_ir, Spec((A, B), C), dtype).schedule == "gustavson"


@pytest.mark.parametrize(
    ("operands", "result", "dtype"),
    [
        ((A, Operand("ik", CSR)), Operand("ik", CSR), torch.float32),
        ((A, Operand("jk", CSR)), C, torch.float32),
        ((A, Operand("kj", Format.CSC)), C, torch.float32),
        ((A, B), C, torch.bfloat16),
    ],
)
def test_all_else_goes_to_the_reference(operands: tuple[Operand, ...], result: Operand, dtype: torch.dtype) -> None:
    with pytest.raises(CompileError, match="the gustavson schedule"):
        compile_region(einsum(operands, result, dtype), schedule="gustavson")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_stores_what_the_reference_does(dtype: torch.dtype) -> None:
    a, b = (torch.from_numpy(_random(60, 60, 0.1, seed).toarray()).to(dtype) for seed in (1, 2))
    b[3, 4] = -(a[0] @ b)[4] / a[0, 3] if a[0, 3] else 0
    arrays = []
    for schedule in ("gustavson", "reference"):
        results = torch.full([6], GIVER)
        with given() as blocks:
            compile_region(einsum([A, B], C, dtype), schedule=schedule)([by_rows(a), by_rows(b)], results)
        arrays.append(_arrays(results, (torch.int32, torch.int32, dtype), blocks))
    for ours, theirs in zip(*arrays, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "density"),
    [(1, 1, 1, 0.0), (3, 4, 5, 0.5), (300, 200, 9000, 0.02), (200, 300, 64, 0.1), (50, 40, 4097, 1.0)],
)
def test_it_computes_what_scipy_does(rows: int, inner: int, columns: int, density: float, threads: int) -> None:
    _check(_random(rows, inner, density, 1), _random(inner, columns, density, 2), threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_products_that_may_be_much_larger_than_their_factors_are_counted_first(threads: int) -> None:
    star = scipy.sparse.lil_array((400, 400), dtype=np.float32)
    star[0, :] = star[:, 0] = 1
    _check(star.tocsr(), star.tocsr(), threads)


def test_memory_of_a_result_lives_as_long_as_its_arrays() -> None:
    matrix = SparseTensor.from_scipy(_random(2000, 2000, 0.01, 1))
    product = matrix @ matrix
    values = product.values()[5:]
    before = values.clone()
    del product
    gc.collect()
    _ = [matrix @ matrix for _ in range(3)]
    assert torch.equal(values, before)


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OverflowError, MemoryError])
def test_what_is_raised_while_it_asks_for_memory_is_raised(
    problem: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> None:
        raise problem(size)

    matrix = SparseTensor.from_scipy(_random(300, 300, 0.1, 1))
    with monkeypatch.context() as patched, pytest.raises(problem):
        patched.setattr(warm_memory, "block", refuse)
        matrix @ matrix
    assert (matrix @ matrix).values().numel()


def _check(a: scipy.sparse.csr_array, b: scipy.sparse.csr_array, threads: int) -> None:
    with team_of(threads):
        product = (SparseTensor.from_scipy(a) @ SparseTensor.from_scipy(b)).to_scipy()
    expected = a @ b
    expected.sort_indices()
    assert (product.indptr == expected.indptr).all()
    assert (product.indices == expected.indices).all()
    np.testing.assert_allclose(product.data, expected.data, rtol=1e-5)


def _random(rows: int, columns: int, density: float, seed: int) -> scipy.sparse.csr_array:
    rng = np.random.default_rng(seed)
    made = scipy.sparse.random_array((rows, columns), density=density, format="csr", dtype=np.float32, rng=rng)
    made.sort_indices()
    return made
