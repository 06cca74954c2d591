"""The schedule "rows": CSR of any size times dense, its parts, tails and bounds, and the memory of its results."""

import gc
import os
import signal
import weakref
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import Format, SparseTensor
from gossamer.dialects.errors import CompileError
from gossamer.runtime.memory import warm_memory
from gossamer.runtime.target import Target
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand, einsum
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.calls import kernel_of
from gossamer.sparsity.operations.dense_results import einsum_ir
from tests.open_contracts import OpenProduct
from tests.sparsity.made import by_rows, matrix, sparse, team_of

A, X, Y = Operand("ik", Format.CSR.with_widths(32, 32)), Operand("kj"), Operand("ij")


@pytest.mark.parametrize("widths", [(0, 0), (32, 32), (32, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_is_chosen_for_csr_times_dense(widths: tuple[int, int], dtype: torch.dtype) -> None:
    spec = Spec((Operand("ik", Format.CSR.with_widths(*widths)), X), Y)
    assert kernel_of(einsum_ir, spec, dtype).schedule == "rows"


@pytest.mark.parametrize(
    ("operands", "result", "dtype"),
    [
        ((A, X), Operand("ji"), torch.float32),
        ((A, Operand("ij")), Operand("kj"), torch.float32),
        ((Operand("ik", Format.CSC), X), Y, torch.float32),
        ((A, X), Y, torch.int32),
        ((A, Operand("ik"), X), Y, torch.float32),
    ],
)
def test_what_it_refuses_goes_to_the_reference(operands: tuple[Operand, ...], result: Operand, dtype: torch.dtype) -> None:
    with pytest.raises(CompileError, match="the rows schedule"):
        compile_region(einsum(operands, result, dtype), schedule="rows")
    assert kernel_of(einsum_ir, Spec(operands, result), dtype).schedule == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("x", ["kj", "k"])
def test_it_computes_what_the_reference_does(x: str, dtype: torch.dtype) -> None:
    contract = einsum([A, Operand(x)], Operand(x.replace("k", "i")), dtype)
    dense = matrix(70, 50).to(dtype)
    shape = [{"k": 50, "j": 37}[letter] for letter in x]
    results = []
    for schedule in ("rows", "reference"):
        kernel, out = compile_region(contract, schedule=schedule), torch.empty(70, *shape[1:], dtype=dtype)
        kernel([by_rows(dense), torch.arange(prod(shape)).view(shape).remainder(7).to(dtype)], out)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("gathers", [False, True])
def test_vectors_are_read_by_single_loads_unless_gathers_are_faster(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "gathers", gathers)
    stages: dict[str, str] = {}
    contract = einsum([A, Operand("k")], Operand("i"), torch.float32)
    kernel = compile_region(contract, schedule="rows", observer=lambda stage, _, text: stages.update({stage: text}))
    assert any("vector.gather" in text for text in stages.values()) == gathers
    for density in (0.02, 0.5):  # rows are short and long
        dense, x = matrix(70, 50, density), torch.arange(50).remainder(7).float()
        kernel([by_rows(dense), x], out := torch.empty(70))
        assert torch.equal(out, dense @ x)


EPILOGUES = [
    ("f32", ("token_scale", "bias", "residual", "relu"), False),
    ("f32", ("gelu",), False),
    ("f64", ("scale", "bias", "silu"), False),
    ("bf16", ("bias", "residual", "relu"), False),
    ("f32", ("residual", "relu"), True),
    ("f32", ("scale", "relu"), True),
]


@pytest.mark.parametrize(("element", "steps", "vector"), EPILOGUES)
def test_epilogues_are_what_the_reference_computes(element: str, steps: tuple[str, ...], vector: bool) -> None:
    """Once for each element, also of rows that are empty or cut into parts, whose sums are complete at the end only."""
    described = OpenProduct(element, steps, vector, widths=(32, 32))
    kernels = [compile_region(described.text(), schedule=schedule) for schedule in ("rows", "reference")]
    assert kernels[0].schedule == "rows"
    dense = matrix(60, 3000, 0.01).to(described.dtype)
    dense[7], dense[20], dense[21], dense[59] = 1, 0, -1, 2
    dense[30, 5] = torch.inf
    for columns in [1] if vector else [1, 20, 257]:
        x = (torch.randn([3000] if vector else [3000, columns]) * 4).round().div(64).to(described.dtype)
        x[8, ...] = torch.nan
        dense[:, 8], dense[40, 8] = 0, 1
        extras = described.extras(60, columns)
        for threads in (1, 2, 7):
            with team_of(threads):
                results = [torch.empty([60] if vector else [60, columns], dtype=described.dtype) for _ in kernels]
                for kernel, out in zip(kernels, results, strict=True):
                    kernel([by_rows(dense), x, *extras], out)
            tolerance = 2e-2 if element == "bf16" else 1e-5
            torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance, equal_nan=True)
            expected = described.reference((dense.double() @ x.double()).to(described.dtype), extras)
            usual = expected.isfinite()
            torch.testing.assert_close(results[0][usual], expected[usual], rtol=tolerance, atol=tolerance)
            assert usual.sum() < usual.numel()


@settings(max_examples=60, derandomize=True)
@given(
    rows=st.integers(1, 40),
    inner=st.integers(1, 40),
    columns=st.sampled_from([1, 2, 15, 16, 17, 64, 100, 255, 256, 257, 300]),
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
    with team_of(threads):
        product = sparse(dense.float()) @ x
    torch.testing.assert_close(product, dense.float() @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 20, 257])
@pytest.mark.parametrize("heavy", [(0,), (3, 4), (299,)])
def test_rows_longer_than_a_part_are_cut(heavy: tuple[int, ...], columns: int, dtype: torch.dtype) -> None:
    dense = torch.eye(300, 20000)
    dense[list(heavy)] = 1
    x = torch.randint(-1, 2, (20000, columns)).to(dtype)
    for threads in (1, 2, 7):
        with team_of(threads):
            product = sparse(dense.to(dtype)) @ x
        torch.testing.assert_close(product, (dense @ x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [40, 300])
def test_rows_of_a_large_operand_are_fetched_ahead(columns: int, dtype: torch.dtype) -> None:
    rows = (7 << 20) // (columns * dtype.itemsize)  # more than any second-level cache holds
    at, x = torch.randint(rows, (2, 500)), torch.randint(-3, 4, (rows, columns)).to(dtype)
    a = SparseTensor.from_edge_index(at.flip(0), torch.ones(500, dtype=dtype), (rows, rows))
    expected = torch.zeros(rows, columns).index_add_(0, at[0], x[at[1]].float())
    torch.testing.assert_close(a @ x, expected.to(dtype))


def test_infinity_and_nan_reach_the_rows_that_use_them_and_no_others() -> None:
    dense, x = matrix(9, 7), torch.ones(7, 20)
    x[3, 5], x[4, 19] = torch.nan, torch.inf
    touched = torch.zeros(9, 20, dtype=torch.bool)
    touched[:, 5], touched[:, 19] = dense[:, 3] != 0, dense[:, 4] != 0
    torch.testing.assert_close(~torch.isfinite(sparse(dense) @ x), touched)


def test_the_child_of_a_fork_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    with warm_memory._kept._lock:  # as another thread has it
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            os._exit(warm_memory._kept.take(1 << 20)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
    kept.take(1 << 20)
    assert 0 < sum(len(block) for blocks in kept._free.values() for block in blocks) <= 10 << 20


def test_memory_that_comes_back_is_not_kept_beyond_that(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = warm_memory._Kept()
    monkeypatch.setattr(warm_memory, "_MOST", 3 << 20)
    taken = [kept.take(1 << 20) for _ in range(5)]
    del taken
    gc.collect()
    assert sum(len(block) for blocks in kept._free.values() for block in blocks) == 3 << 20


def test_memory_that_the_system_does_not_have_is_a_memory_error() -> None:
    for size in (1 << 60, 1 << 70):
        with pytest.raises(MemoryError, match="MiB"):
            warm_memory.empty([size], torch.float32)


@pytest.mark.parametrize("inference", [True, False])
def test_a_result_in_memory_of_another_has_a_storage_of_its_own(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_memory, "_kept", warm_memory._Kept())
    with torch.inference_mode(inference):
        first = warm_memory.empty([1 << 18], torch.float32)
        address, storage = first.data_ptr(), weakref.ref(first.untyped_storage())
        del first
        second = warm_memory.empty([1 << 18], torch.float32)
    assert second.data_ptr() == address
    assert storage() is None  # by which packed weights and sorted edges recognise their tensors


def test_memory_is_in_use_from_when_it_is_taken() -> None:
    kept = warm_memory._Kept()
    first, second = kept.take(1 << 20), kept.take(1 << 20)
    first[0] = 1
    assert second[0] == 0
