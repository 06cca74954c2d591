"""Counting sort: against torch's stable sort, and where it serves: edge lists, conversions, entries in any order."""

import numpy as np
import pytest
import scipy.sparse
import torch

from gossamer import Format, SparseTensor
from gossamer.sparsity.arrays.sorting import sort_keys


@pytest.mark.parametrize("keys", [torch.int32, torch.int64])
@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
@pytest.mark.parametrize(("count", "extent"), [(0, 5), (1, 1), (7, 3), (1000, 50), (5000, 20000)])
def test_it_is_a_stable_sort(count: int, extent: int, keys: torch.dtype, positions: torch.dtype) -> None:
    given = torch.randint(0, extent, (count,), dtype=keys)
    begins, order = sort_keys(given, extent, positions)
    expected = given.sort(stable=True)
    assert begins.dtype == positions
    assert torch.equal(begins.long(), torch.searchsorted(expected.values, torch.arange(extent + 1, dtype=keys)))
    assert torch.equal(torch.arange(count) if order is None else order, expected.indices)


def test_keys_in_order_stay_where_they_are() -> None:
    begins, order = sort_keys(torch.tensor([0, 0, 2, 3]), 5, torch.int32)
    assert begins.tolist() == [0, 2, 2, 3, 4, 4]
    assert order is None


def test_keys_may_have_any_stride() -> None:
    for keys, expected in (
        (torch.tensor([[0, 4], [0, 4], [3, 4]])[:, 0], [0, 2, 2, 2, 3, 3]),
        (torch.tensor([3]).expand(4), [0, 0, 0, 0, 4, 4]),
        (torch.tensor([[3, 4], [0, 4]], dtype=torch.int32)[:, 0], [0, 1, 1, 1, 2, 2]),
    ):
        assert sort_keys(keys, 5, torch.int64)[0].tolist() == expected


@pytest.mark.parametrize("widths", [(32, 32), (64, 64), (32, 16)])
@pytest.mark.parametrize(
    ("before", "after"), [("CSR", "CSC"), ("CSC", "CSR"), ("DCSC", "CSR"), ("DCSR", "CSC"), ("DCSR", "CSR")]
)
def test_conversions_are_those_of_scipy(before: str, after: str, widths: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    made = scipy.sparse.random_array((300, 200), density=0.02, format="csr", dtype=np.float32, rng=rng)
    tensor = SparseTensor.from_scipy(made).to_format(getattr(Format, before))
    into = getattr(Format, after).with_widths(*widths)
    found, expected = tensor.to_format(into), made.asformat(after.lower())
    expected.sort_indices()
    assert found.format == into
    assert torch.equal(found.positions(1).long(), torch.from_numpy(expected.indptr).long())
    assert torch.equal(found.coordinates(1).long(), torch.from_numpy(expected.indices).long())
    assert torch.equal(found.values(), torch.from_numpy(expected.data))


@pytest.mark.parametrize("nodes", [30, 100_000])  # few coordinates for each entry, and many
def test_entries_in_any_order_are_summed_where_they_coincide(nodes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    at = torch.randint(0, 30, (2, 500), generator=generator)
    values = torch.randint(1, 5, (500,), generator=generator).float()
    graph = SparseTensor.from_edge_index(at, values, (nodes, nodes)).to_format(Format.CSR)
    source, target = at.numpy()
    expected = scipy.sparse.coo_array((values.numpy(), (target, source)), shape=(nodes, nodes)).tocsr()
    assert (graph.to_scipy() != expected).nnz == 0
