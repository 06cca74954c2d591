"""The same graph in another order: neighbours get near, products agree, gradients flow."""

import pytest
import torch

from gossamer import Format, GossamerError, SparseTensor, reorder


def shuffled_path(nodes: int) -> torch.Tensor:
    path = torch.diag(torch.rand(nodes - 1) + 1, 1)
    path = path + path.t()
    order = torch.randperm(nodes)
    return path[order][:, order]


@pytest.mark.parametrize("format", [Format.CSR, Format.COO, Format.CSC, Format.CSR.with_widths(32, 32)])
def test_neighbours_of_a_path_are_next_to_each_other(format: Format) -> None:
    torch.manual_seed(0)
    dense = shuffled_path(30)
    a, order = reorder(SparseTensor.from_dense(dense, format))
    assert a.format == format
    assert torch.equal(a.to_dense(), dense[order][:, order])
    rows, columns = a.to_dense().nonzero().unbind(1)
    assert int((rows - columns).abs().max()) == 1


def test_products_agree_and_gradients_flow() -> None:
    torch.manual_seed(0)
    dense, x = shuffled_path(12), torch.randn(12, 3)
    values = SparseTensor.from_dense(dense).requires_grad_()
    a, order = reorder(values)
    y = (a @ x[order])[order.argsort()]
    torch.testing.assert_close(y, dense @ x)
    y.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad.to_dense(), (dense != 0) * x.sum(1))


def test_only_square_matrices_are_graphs() -> None:
    with pytest.raises(GossamerError, match=r"square, got \[2, 3\]"):
        reorder(SparseTensor.from_dense(torch.ones(2, 3)))
