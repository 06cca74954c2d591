"""Kernels on segments against torch, segment by segment: short and long ones, none, every type."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev

from gossamer import CompileError, Format, SparseTensor
from gossamer.backend import sparse as backend
from gossamer.sparsity.operations.segments import segment_reduce, segment_softmax

COUNTS = [3, 0, 16, 17, 1, 100, 5, 0, 33, 8]


def segments(counts: list[int], dtype: torch.dtype, width: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    positions = torch.tensor([0, *counts]).cumsum(0)
    return positions.to(width), (3 * torch.randn(int(positions[-1]))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log", [False, True])
def test_softmax_and_its_gradient(dtype: torch.dtype, log: bool) -> None:
    positions, values = segments(COUNTS, dtype)
    function = torch.log_softmax if log else torch.softmax
    exact = values.double().requires_grad_()
    expected = torch.cat([function(part, 0) for part in exact.split(COUNTS)])
    result = segment_softmax(positions, values.requires_grad_(), log)
    torch.testing.assert_close(result, expected.to(dtype))
    weights = torch.randn_like(exact)
    expected.backward(weights)
    result.backward(weights.to(dtype))
    assert exact.grad is not None
    tolerance = {} if dtype.itemsize > 2 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(values.grad, exact.grad.to(dtype), **tolerance)


@pytest.mark.parametrize("kind", ["sum", "prod", "amax", "amin"])
def test_reductions(kind: str) -> None:
    neutral = {"sum": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}[kind]
    positions, values = segments(COUNTS, torch.float32, torch.int32)
    parts = values.split(COUNTS)
    expected = torch.stack([getattr(torch, kind)(part, 0) if len(part) else torch.tensor(neutral) for part in parts])
    torch.testing.assert_close(segment_reduce(positions, values, kind), expected)
    padded = [torch.cat([part, torch.zeros(100 - len(part))]) for part in parts]
    expected = torch.stack([getattr(torch, kind)(part, 0) for part in padded])
    torch.testing.assert_close(segment_reduce(positions, values, kind, 100), expected)


def test_parts_of_many_threads_and_nan() -> None:
    counts = torch.randint(0, 40, (3000,)).tolist()
    counts[7] = 40_000  # a row that is heavier than all others of its thread
    positions, values = segments(counts, torch.float32)
    values[3] = torch.nan
    expected = torch.cat([torch.softmax(part, 0) for part in values.split(counts)])
    torch.testing.assert_close(segment_softmax(positions, values), expected, equal_nan=True)


@pytest.mark.parametrize("log", [False, True])
def test_gradients_of_gradients(log: bool) -> None:
    positions, values = segments([3, 0, 9, 1], torch.float64)
    assert gradgradcheck(lambda v: segment_softmax(positions, v, log), values.requires_grad_())


@pytest.mark.parametrize("kind", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("extent", [0, 9])
def test_gradients_of_reductions(kind: str, extent: int) -> None:
    positions, values = segments([3, 9, 1], torch.float64)
    assert gradcheck(lambda v: segment_reduce(positions, v, kind, extent), values.requires_grad_())


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_the_gradient_of_a_product_with_zeros(zeros: int) -> None:
    values = torch.tensor([2.0, 3.0, 5.0])
    values[:zeros] = 0
    dense = values.clone().requires_grad_()
    dense.prod().backward()
    segment_reduce(torch.tensor([0, 3]), values.requires_grad_(), "prod").sum().backward()
    torch.testing.assert_close(values.grad, dense.grad)


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_gradients_of_gradients_of_a_product_with_zeros(zeros: int) -> None:
    counts = [4, 0, 1, 3, 7]
    positions, values = segments(counts, torch.float64)
    for part in values.split(counts):
        part[-zeros or len(part) :] = 0

    def products(v: Tensor) -> Tensor:
        return segment_reduce(positions, v, "prod")

    def expected(v: Tensor) -> Tensor:
        return torch.stack([part.prod() for part in v.split(counts)])

    def total(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda v: (function(v) ** 2 + function(v)).sum()

    exact = torch.autograd.functional.hessian(total(expected), values)
    torch.testing.assert_close(torch.autograd.functional.hessian(total(products), values), exact)
    for inner, outer in ((grad, jacrev), (grad, jacfwd), (jacfwd, jacrev), (jacfwd, jacfwd)):
        torch.testing.assert_close(outer(inner(total(products)))(values), exact)
    assert gradgradcheck(products, values.requires_grad_())


def test_the_gradient_of_a_product_in_a_graph_that_does_not_know_how_many_entries_there_are() -> None:
    levels = "j floordiv 2 : dense, i floordiv 2 : compressed, i mod 2 : dense, j mod 2 : dense"
    format = Format.parse(f"#sparse_tensor.encoding<{{map = (i, j) -> ({levels})}}>")
    torch.manual_seed(0)
    function = torch.compile(lambda a: torch.prod(a[None], dim=1), backend=backend, fullgraph=True)
    for full in (True, False):
        dense = torch.randn(6, 6, dtype=torch.float64) * full
        given = SparseTensor.from_dense(dense, format)
        values, expected = given.values().detach().requires_grad_(), dense.clone().requires_grad_()
        function(given.with_values(values)).to_dense().sum().backward()
        torch.prod(expected[None], dim=1).sum().backward()
        assert values.grad is not None and expected.grad is not None
        torch.testing.assert_close(given.with_values(values.grad).to_dense(), expected.grad)


def test_what_has_no_kernel() -> None:
    with pytest.raises(CompileError, match=r"no kernels for torch.complex64, only for float32, .*: convert the operands"):
        segment_softmax(torch.tensor([0, 1]), torch.ones(1, dtype=torch.complex64))
