"""Softmax of SparseTensors is over stored elements, against dense torch, torch.sparse and torch.masked."""

from collections.abc import Callable

import pytest
import torch

from gossamer import Format, SparseTensor
from gossamer.backend import sparse as backend
from gossamer.sparsity.arrays.stored_entries import coordinates, within
from tests.sparsity.made import matrix, sparse

equal = torch.testing.assert_close


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["BSR", "2:4", "hybrid"])
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_counts_what_fills_up_within_the_shape(name: str, dim: int) -> None:
    dense = matrix(5, 7)
    a = sparse(dense, name)
    at = coordinates(a.format, a.shape, a.components)
    inside = within(a.shape, at)
    stored = torch.zeros(5, 7, dtype=torch.bool).index_put(tuple(crd[inside] for crd in at), torch.tensor(True))
    assert (stored & (dense == 0)).any()
    for kept, tensor in ((stored, a), (dense != 0, a.to_format(Format.CSR))):
        expected = dense.masked_fill(~kept, -torch.inf).softmax(dim).masked_fill(~kept, 0)
        equal(torch.softmax(tensor, dim).to_dense(), expected)


def test_softmax_is_that_of_torch_sparse() -> None:
    dense = matrix(9, 12) * torch.randn(9, 12)
    for dim in (0, 1):
        for ours, theirs in ((torch.sparse.softmax, torch.sparse.softmax), (torch.log_softmax, torch.sparse.log_softmax)):
            equal(ours(sparse(dense, "COO"), dim).to_torch().coalesce().values(), theirs(dense.to_sparse(), dim).values())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["CSR", "COO"])
@pytest.mark.parametrize("function", [torch.masked.softmax, torch.masked.log_softmax])
def test_masked_softmax_is_over_stored_elements(function: Callable[..., torch.Tensor], name: str, compiled: bool) -> None:
    """Without a mask, torch.masked takes the pattern of a tensor of torch.sparse as its mask."""
    dense = matrix(9, 12)
    expected = function(dense, 1, mask=dense != 0)
    call = torch.compile(function, backend=backend, fullgraph=True, options={"dense": "eager"}) if compiled else function
    found = call(sparse(dense, name), 1)
    assert isinstance(found, SparseTensor)
    equal(found.to_dense()[dense != 0], expected[dense != 0])
