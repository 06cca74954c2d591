"""Blocks beside dense dimensions and batches: from torch.sparse and back, and computed with in any order of dimensions."""

import pytest
import torch
from torch import Tensor

from gossamer import Format, SparseTensor, einsum

LAYOUTS = {"BSR": torch.sparse_bsr, "BSC": torch.sparse_bsc, "CSR": torch.sparse_csr, "CSC": torch.sparse_csc}
SHAPES = [((4, 6), 0), ((4, 6, 3), 1), ((4, 6, 1), 1), ((4, 6, 0), 1), ((2, 4, 6), 0), ((2, 4, 6, 3), 1), ((4, 6, 3, 2), 2)]
BLOCKS = [(2, 2), (2, 1), (1, 3), (1, 1), (4, 6)]


def of_layout(layout: str, shape: tuple[int, ...], dense_dims: int, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A tensor, dense and in a layout of torch, whose matrices in a batch have as many entries each."""
    torch.manual_seed(0)
    matrices = (torch.arange(24).view(4, 6) * 7 % 5 < 2).float()
    kept = matrices.view(*[1] * (len(shape) - 2 - dense_dims), 4, 6, *[1] * dense_dims)
    dense = torch.randn(shape) * kept
    given = {"blocksize": block} if layout.startswith("BS") else {}
    return dense, dense.to_sparse(layout=LAYOUTS[layout], dense_dim=dense_dims, **given)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("shape", "dense_dims"), SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["BSR", "BSC"])
def test_blocked_layouts_come_from_torch_and_go_back(
    layout: str, shape: tuple[int, ...], dense_dims: int, block: tuple[int, int]
) -> None:
    dense, given = of_layout(layout, shape, dense_dims, block)
    a = SparseTensor.from_torch(given)
    torch.testing.assert_close(a.to_dense(), dense)
    torch.testing.assert_close(a.to_torch().to_dense(), dense)
    torch.testing.assert_close(a.transpose(0, 1).to_dense(), dense.transpose(0, 1))
    torch.testing.assert_close((a * dense).to_dense(), dense * dense)
    method = {"BSR": torch.Tensor.to_sparse_bsr, "BSC": torch.Tensor.to_sparse_bsc}[layout]
    stored = method(SparseTensor.from_dense(dense, Format.csf(dense.dim())), block, dense_dims)
    torch.testing.assert_close(stored.to_dense(), dense)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dense_dims"), [((4, 6), 0), ((4, 6, 3), 1), ((2, 4, 6), 0)], ids=str)
def test_a_layout_of_torch_comes_back_as_it_was(layout: str, shape: tuple[int, ...], dense_dims: int) -> None:
    _, given = of_layout(layout, shape, dense_dims, (2, 3))
    back = SparseTensor.from_torch(given).to_torch()
    assert back.layout == given.layout
    assert back.values().shape == given.values().shape
    names = ("ccol_indices", "row_indices") if layout.endswith("C") else ("crow_indices", "col_indices")
    for name in names:
        torch.testing.assert_close(getattr(back, name)(), getattr(given, name)())


ORDERS = [
    "j : dense, i : dense, k floordiv 3 : compressed, k mod 3 : dense",
    "j : dense, i : compressed, k floordiv 3 : dense, k mod 3 : dense",
    "j : dense, k floordiv 3 : compressed, i : dense, k mod 3 : dense",
    "k floordiv 3 : dense, j : dense, i : compressed, k mod 3 : dense",
    "j floordiv 2 : dense, k floordiv 3 : compressed, i : dense, j mod 2 : dense, k mod 3 : dense",
]


@pytest.mark.parametrize("levels", ORDERS)
def test_blocks_below_dimensions_in_any_order(levels: str) -> None:
    torch.manual_seed(0)
    dense, x = torch.randn(4, 6, 6) * (torch.rand(4, 6, 6) < 0.5), torch.randn(6, 2)
    a = SparseTensor.from_dense(dense, Format.parse(f"#sparse_tensor.encoding<{{map = (i, j, k) -> ({levels})}}>"))
    torch.testing.assert_close(a.to_dense(), dense)
    torch.testing.assert_close(a @ x, dense @ x)
    torch.testing.assert_close((a * dense).to_dense(), dense * dense)
    torch.testing.assert_close(einsum("ijk,ik->jk", a, dense[:, 0]), torch.einsum("ijk,ik->jk", dense, dense[:, 0]))


@pytest.mark.parametrize("width", [8, 16])
def test_narrow_positions_above_127_entries(width: int) -> None:
    """They are unsigned, and torch's integers of 8 and 16 bits are not."""
    dense = torch.ones(20, 10)
    a = SparseTensor.from_dense(dense, Format.CSR.with_widths(width, width))
    assert a.nnz == 200
    assert a[0:0].shape == (0, 10)
    torch.testing.assert_close(a[2:5].to_dense(), dense[2:5])
    torch.testing.assert_close(torch.softmax(a, 0).to_dense(), torch.softmax(dense, 0))
    torch.testing.assert_close(a.T @ torch.ones(20), dense.T @ torch.ones(20))
    for _ in range(200):  # what lies beside the arrays does not matter
        torch.testing.assert_close((a + a.to_format(Format.COO)).to_dense(), dense * 2)


@pytest.mark.parametrize("format", [Format.bsr(2, 3), Format.nm(2, 4), Format.CSC, Format.COO], ids=lambda f: f.name)
@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
@pytest.mark.parametrize("name", ["amax", "amin"])
def test_gradients_of_extremes(format: Format, dim: int | tuple[int, int], name: str) -> None:
    torch.manual_seed(1)
    dense = torch.randn(7, 8) * torch.tensor([1.0, 0, 1, 0]).repeat(2)
    a = SparseTensor.from_dense(dense, format)
    leaf, reference = a.values().detach().clone().requires_grad_(), dense.clone().requires_grad_()
    getattr(torch, name)(a.with_values(leaf), dim).sum().backward()
    getattr(torch, name)(reference, dim).sum().backward()
    stored = a.with_values(torch.ones_like(leaf)).to_dense()
    torch.testing.assert_close(a.with_values(leaf.grad).to_dense(), reference.grad * stored)
