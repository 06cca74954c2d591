"""What operations with SparseTensors say to operands that do not fit, and NumPy's arrays among the operands."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gossamer
from gossamer import Format, GossamerError, SparseTensor
from tests.sparsity.made import matrix, sparse

REFUSED: dict[str, tuple[Callable[[SparseTensor], Any], str]] = {
    "a matrix": (lambda a: a @ torch.ones(7, 2), r"matmul of a SparseTensor in CSR \[6, 8\] .* and a tensor \[7, 2\] .*, 7$"),
    "a vector": (lambda a: a @ torch.ones(7), r"a tensor \[7\] of torch.float32: .* must equal the last of the second, 7"),
    "a matrix before it": (lambda a: torch.ones(2, 7) @ a, r"matmul of a tensor \[2, 7\] .* CSR \[6, 8\]"),
    "a sparse matrix": (lambda a: a @ a, r"\[6, 8\] .* and a SparseTensor in CSR \[6, 8\]"),
    "a batch": (
        lambda a: sparse_batch() @ torch.ones(3, 8, 2),
        r"their batches, all sizes but the last two, must be equal or 1",
    ),
    "a number": (lambda a: torch.matmul(a, torch.tensor(2.0)), r"multiply by a number with \*"),
    "a layer": (
        lambda a: F.linear(torch.ones(3, 7), a),
        r"linear of a tensor \[3, 7\] .* must equal the last of the second, 8",
    ),
    "another type": (lambda a: a @ torch.ones(8, 2, dtype=torch.float64), r"of torch.float64: convert .* with .to\(\)"),
    "numbers instead of a tensor": (
        lambda a: gossamer.graph_attention(a, np.ones((8, 2, 4)), target=torch.ones(6, 2), source=torch.ones(8, 2)),
        r"graph_attention: values is ndarray, must be a tensor: see torch.as_tensor",
    ),
    "an array in an einsum": (lambda a: gossamer.einsum("ij,j->i", a, np.ones(8)), r"ndarray: see torch.as_tensor"),
}


def sparse_batch() -> SparseTensor:
    return SparseTensor.from_dense(torch.ones(2, 6, 8), Format.csf(3))


@pytest.mark.parametrize("operand", REFUSED)
def test_the_message_names_the_operation_and_the_shapes(operand: str) -> None:
    call, message = REFUSED[operand]
    with pytest.raises(GossamerError, match=message):
        call(sparse(matrix(6, 8)))


@pytest.mark.parametrize(("index", "named"), [(-9, -9), ([-9], -9), ([8], 8), ([0, 9], 9)])
def test_an_index_out_of_bounds_is_named_as_it_was_given(index: Any, named: int) -> None:
    with pytest.raises(IndexError, match=f"index {named}"):
        sparse(matrix(8, 8))[index]


def test_negative_indices_count_from_the_end() -> None:
    dense = matrix(8, 5)
    torch.testing.assert_close(sparse(dense)[[-1, 0, -8]].to_dense(), dense[[-1, 0, -8]])


def test_a_negative_node_is_not_told_to_pass_a_larger_size() -> None:
    with pytest.raises(gossamer.FormatError, match=r"source of edge 1 is node -1, must be in \[0, 3\): leave out the edges"):
        SparseTensor.from_edge_index(torch.tensor([[0, -1], [1, 1]]), size=3)
    with pytest.raises(gossamer.FormatError, match=r"node 5, must be in \[0, 3\): pass a larger size"):
        SparseTensor.from_edge_index(torch.tensor([[0, 5], [1, 1]]), size=3)


WITH_ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda a, x: a @ x,
    "product with an array in front": lambda a, x: x.T @ a.T,
    "sum": lambda a, x: a + x.T,
    "sum with an array in front": lambda a, x: x.T - a,
    "multiple": lambda a, x: a * x.T,
    "function of NumPy": lambda a, x: np.multiply(x.T, a),
    "sine": lambda a, x: np.sin(a),
    "scalar of NumPy": lambda a, x: np.float32(2) * a,
    "scalar minus": lambda a, x: np.float32(2) - a,
    "comparison": lambda a, x: a == x.T,
    "comparison with an array in front": lambda a, x: x.T != a,  # noqa: SIM300
    "comparison with a scalar in front": lambda a, x: np.float32(0) == a,
    "comparison by NumPy": lambda a, x: np.less(x.T, a),
}


@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
@pytest.mark.parametrize("function", WITH_ARRAYS)
def test_arrays_of_numpy_are_operands(function: str) -> None:
    dense, x = matrix(6, 8), np.arange(48, dtype=np.float32).reshape(8, 6)
    found = WITH_ARRAYS[function](sparse(dense), x)
    expected = torch.as_tensor(WITH_ARRAYS[function](dense.numpy(), x))
    torch.testing.assert_close(found.to_dense() if isinstance(found, SparseTensor) else found, expected)


def test_a_reduction_of_numpy_is_refused_by_its_name() -> None:
    with pytest.raises(GossamerError, match=r"numpy.add is not supported; use a function of torch"):
        np.add.reduce(sparse(matrix(3, 3)))
