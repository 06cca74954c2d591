"""Maxima and minima over edges, with torch's gradients: against scatter_reduce."""

import pytest
import torch
from torch import Tensor

from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.edges import edge_extremes
from gossamer.sparsity.edges.edge_extremes import extremes_ir

KINDS = {"max": "amax", "min": "amin"}


def extremes(positions: Tensor, coordinates: Tensor, x: Tensor, kind: str) -> Tensor:
    out: Tensor = torch.ops.gossamer.extremes.default(positions, coordinates, x, kind)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("features", "dtype"), [(1, torch.float32), (7, torch.float64), (200, torch.float32)])
def test_as_scatter_reduce_has_it(kind: str, features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, columns, entries = 300, 40, 2000
    target = torch.randint(0, rows, (entries,)).sort().values
    target[target == 7] = 8  # a row without entries
    source = torch.randint(0, columns, (entries,), dtype=torch.int32)
    positions = torch.searchsorted(target, torch.arange(rows + 1)).to(torch.int32)
    x = torch.randint(-2, 3, (columns, features)).to(dtype).requires_grad_()  # with many that are equal, and zeros
    out, upstream = extremes(positions, source, x, kind), torch.randn(rows, features, dtype=dtype)
    zeros, index = torch.zeros(rows, features, dtype=dtype), target[:, None].expand(-1, features)
    expected = zeros.scatter_reduce(0, index, x[source], KINDS[kind], include_self=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    found, wanted = (torch.autograd.grad(each, x, upstream)[0] for each in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_nans_stay_and_nothing_is_nothing() -> None:
    positions, x = torch.tensor([0, 2, 2]), torch.tensor([[1.0, torch.nan], [3.0, 5.0]])
    out = extremes(positions, torch.tensor([0, 1]), x, "max")
    torch.testing.assert_close(out, torch.tensor([[3.0, torch.nan], [0.0, 0.0]]), equal_nan=True)
    assert extremes(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), x, "max").tolist() == [[0, 0]]
    assert extremes(torch.tensor([0]), torch.tensor([], dtype=torch.int64), x, "min").shape == (0, 2)


def test_gradients_of_nans_are_those_of_scatter_reduce() -> None:
    positions, source = torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 1, 2, 3, 4])
    inf = torch.inf
    x = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [-inf, inf], [torch.nan, 2.0], [4.0, 2.0]], requires_grad=True)
    index = torch.tensor([0, 0, 1, 1, 2, 2])[:, None].expand(-1, 2)
    expected = torch.zeros(3, 2).scatter_reduce(0, index, x[source], "amax", include_self=False)
    out = extremes(positions, source, x, "max")
    for upstream in (torch.ones(3, 2), torch.tensor([[0.0, 1.0], [inf, -1.0], [0.0, -inf]])):
        pair = (torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for y in (out, expected))
        torch.testing.assert_close(*pair, equal_nan=True)


def test_one_kernel_serves_all_patterns() -> None:
    by = RowForm(torch.tensor([0, 1]), torch.tensor([0]), None)
    kernel = edge_extremes._kernel("max", 3, by.format, torch.float32)
    assert kernel.schedule == "reduce-edges"
    assert '"kernel.reduce_edges"' in extremes_ir("shares", 3, by.format, torch.float32)
