"""The schedule "rows": CSR of any size times dense, its parts, tails and bounds, and the memory of its results."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import Format, SparseTensor
from gossamer.dialects.errors import CompileError
from gossamer.sparsity import warm_memory
from gossamer.sparsity.contract_ir import Operand, einsum
from gossamer.sparsity.dense_results import _einsum_ir
from gossamer.sparsity.kernels import compile_region
from gossamer.sparsity.launch import kernel_of
from gossamer.sparsity.operands import Spec
from tests.sparsity.made import matrix, sparse

A, X, Y = Operand("ik", Format.CSR.with_widths(32, 32)), Operand("kj"), Operand("ij")


@pytest.mark.parametrize("widths", [(0, 0), (32, 32), (32, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_chosen_for_csr_times_dense(widths: tuple[int, int], dtype: torch.dtype) -> None:
    spec = Spec((Operand("ik", Format.CSR.with_widths(*widths)), X), Y)
    assert kernel_of(_einsum_ir, spec, dtype).schedule == "rows"


@pytest.mark.parametrize(
    ("operands", "result", "dtype"),
    [
        ((A, X), Operand("ji"), torch.float32),
        ((A, Operand("ij")), Operand("kj"), torch.float32),
        ((A, Operand("k")), Operand("i"), torch.float32),
        ((Operand("ik", Format.CSC), X), Y, torch.float32),
        ((A, X), Y, torch.bfloat16),
        ((A, X), Y, torch.int32),
        ((A, Operand("ik"), X), Y, torch.float32),
    ],
)
def test_what_it_refuses_goes_to_the_reference(operands: tuple[Operand, ...], result: Operand, dtype: torch.dtype) -> None:
    with pytest.raises(CompileError, match="the rows schedule"):
        compile_region(einsum(operands, result, dtype), schedule="rows")
    assert kernel_of(_einsum_ir, Spec(operands, result), dtype).schedule == "reference"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    inner=st.integers(1, 40),
    columns=st.sampled_from([1, 2, 15, 16, 17, 31, 64, 100, 127, 128, 129, 200, 300]),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    heavy=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
)
def test_any_shape_skew_and_number_of_threads(
    rows: int, inner: int, columns: int, density: float, heavy: bool, threads: int
) -> None:
    dense = torch.randint(1, 4, (rows, inner)) * (torch.rand(rows, inner) < density)
    if heavy:
        dense[rows // 2] = 1
    x = torch.randint(-3, 4, (inner, columns)).float()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        product = sparse(dense.float()) @ x
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(product, dense.float() @ x)


def test_infinity_and_nan_reach_the_rows_that_use_them_and_no_others() -> None:
    dense, x = matrix(9, 7), torch.ones(7, 20)
    x[3, 5], x[4, 19] = torch.nan, torch.inf
    touched = torch.zeros(9, 20, dtype=torch.bool)
    touched[:, 5], touched[:, 19] = dense[:, 3] != 0, dense[:, 4] != 0
    torch.testing.assert_close(~torch.isfinite(sparse(dense) @ x), touched)


def test_large_results_take_the_memory_that_others_gave_up() -> None:
    a, x = SparseTensor.from_dense(torch.eye(600)), torch.randn(600, 600)
    first, second = a @ x, a @ x
    at = {first.data_ptr(), second.data_ptr()}
    assert len(at) == 2
    view = second[300:]
    del first, second
    third, fourth = a @ x, a @ x
    assert third.data_ptr() in at
    assert fourth.data_ptr() not in at  # the view still holds the other one
    assert torch.equal(view, x[300:])
    assert torch.equal(third, x)


def test_memory_kept_for_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = warm_memory._Kept()
    monkeypatch.setattr(warm_memory, "_MOST", 10 << 20)
    for size in range(1 << 20, 9 << 20, 1 << 20):
        kept.take(size)
    assert sum(block.nbytes() for block in kept._blocks) <= 10 << 20
