"""torch.sparse beside SparseTensors: its layouts as methods, its functions, its tensors as operands."""

import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import Format, GossamerError, SparseTensor, einsum, strict
from tests.sparsity.made import matrix, sparse

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda a: a.to_sparse(),
    "coo of rows": lambda a: a.to_sparse(1),
    "csr": lambda a: a.to_sparse_csr(),
    "csc": lambda a: a.to_sparse_csc(),
    "bsr": lambda a: a.to_sparse_bsr((2, 3)),
    "bsc": lambda a: a.to_sparse_bsc((2, 3)),
    "named": lambda a: a.to_sparse(layout=torch.sparse_csc),
    "named in blocks": lambda a: a.to_sparse(layout=torch.sparse_bsr, blocksize=(1, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    dense = matrix(4, 6)
    ours, theirs = LAYOUTS[layout](sparse(dense, "DCSR")), SparseTensor.from_torch(LAYOUTS[layout](dense))
    assert ours.format == theirs.format
    for mine, other in zip(ours.components, theirs.components, strict=True):
        assert mine.equal(other)
    assert layout == "coo of rows" or ours.sparse_dim() == 2


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("method", ["to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_dense_dimensions(method: str) -> None:
    dense = matrix(4, 6)[:, :, None] * torch.tensor([1.0, 0.0, 2.0])
    blocks = ((2, 3),) if "bs" in method else ()
    theirs = getattr(dense, method)(*blocks, dense_dim=1)
    ours = getattr(SparseTensor.from_dense(dense, Format.csf(3)), method)(*blocks, dense_dim=1)
    assert ours.dense_dim() == 1
    imported = SparseTensor.from_torch(theirs)
    for tensor in (ours, imported):
        torch.testing.assert_close(tensor.to_dense(), dense)
        torch.testing.assert_close((tensor * 2 + imported).sum(2).to_dense(), 3 * dense.sum(2))
    torch.testing.assert_close(einsum("ijk,jn->ikn", imported, torch.ones(6, 2)), dense.sum(1)[..., None].expand(4, 3, 2))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_batches_count_no_sparse_dimensions_and_may_be_empty() -> None:
    theirs = torch.stack([torch.eye(4, 5)] * 2).to_sparse_csr()
    ours = SparseTensor.from_torch(theirs)
    assert (ours.sparse_dim(), ours.dense_dim()) == (theirs.sparse_dim(), theirs.dense_dim())
    assert SparseTensor.from_dense(torch.zeros(2, 0, 5), ours.format).to_torch().shape == (2, 0, 5)


def test_triangles_store_no_other_elements() -> None:
    """`triu` gives each edge of an undirected graph once."""
    dense = torch.ones(5, 5) - torch.eye(5)
    for a in (sparse(dense), sparse(dense, "COO"), SparseTensor.from_dense(dense.expand(2, 5, 5), Format.csf(3))):
        for triangle in (a.triu(), a.tril()):
            assert isinstance(triangle, SparseTensor)
            assert triangle.nnz * 2 == a.nnz and triangle.format == a.format
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        SparseTensor.from_dense(torch.ones(3), Format.coo(1)).tril()


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_coordinates_of_a_product_in_a_compiled_graph(dense: str) -> None:
    """The number of entries is open there."""

    def entries(a: SparseTensor) -> tuple[Tensor, Tensor, Tensor]:
        product = (a @ a.mT).to_sparse()
        row, column = product.indices()
        return row * 1, column * 1, product.values() * a.sum(1).index_select(0, row)

    a = matrix(5, 7)
    with strict():
        ours = torch.compile(entries, backend="sparse", fullgraph=True, options={"dense": dense})(sparse(a))
    product = (a @ a.mT).to_sparse()
    expected = *product.indices(), product.values() * a.sum(1)[product.indices()[0]]
    torch.testing.assert_close(ours, expected)


def test_arrays_of_numpy_change_in_place() -> None:
    a, x, read_only = sparse(matrix(4, 6)), np.ones((4, 6), np.float32), np.broadcast_to(np.float32(1), (4, 6))
    y = x
    y += a
    y *= a
    assert y is x
    torch.testing.assert_close(torch.as_tensor(x), (1 + a.to_dense()) * a.to_dense())
    with pytest.raises(ValueError, match="read-only"):
        np.add(x, a, out=read_only)


def test_blocks_that_do_not_divide() -> None:
    with pytest.raises(GossamerError, match="blocks of 3 x 3 do not divide"):
        sparse(matrix(4, 6)).to_sparse_bsr((3, 3))


@pytest.mark.parametrize("name", ["CSR", "COO", "BSR"])
def test_masks(name: str) -> None:
    dense, mask, x = matrix(4, 6), matrix(4, 6), torch.randn(4, 6)
    for ours, plain in ((sparse(dense, name), dense), (x, x), (sparse(dense, name).double(), dense.double())):
        masked = ours.sparse_mask(sparse(mask))
        assert masked.coordinates(1).equal(sparse(mask).coordinates(1))
        torch.testing.assert_close(masked.to_dense(), torch.where(mask != 0, plain, 0))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_products_with_a_reduction(reduce: str) -> None:
    dense, x = matrix(5, 6) * (torch.arange(5) != 2)[:, None], torch.randn(6, 3)
    ours, theirs = (each.clone().requires_grad_() for each in (x, x))
    result = torch.sparse.mm(sparse(dense), ours, reduce)
    expected = torch.sparse.mm(dense.to_sparse_csr(), theirs, reduce)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_means_of_float16_whose_sums_are_too_large_for_it() -> None:
    dense = torch.full((300, 300), 4.0, dtype=torch.float16)
    dense[::2] = 0
    a, x = sparse(dense), torch.full((300, 2), 100.0, dtype=torch.float16)
    for dim in (None, 1, (0, 1)):
        torch.testing.assert_close(a.mean(dim), dense.mean(dim))
    expected = torch.where(dense[:, :2] != 0, 400.0, 0.0).half()  # sums are 300 * 400
    torch.testing.assert_close(torch.sparse.mm(a, x, "mean"), expected)


@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("p", [0.5, 1, 2, 3.5, torch.inf, "fro", 0])
@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
def test_norms(p: float, dim: int | None) -> None:
    dense = matrix(4, 6).double() * (torch.arange(4) != 2)[:, None]
    ours, theirs = (dense.clone().requires_grad_() for _ in range(2))
    result, expected = SparseTensor.from_dense(ours, Format.bsr(2, 3)).norm(p, dim), theirs.norm(p, dim)
    torch.testing.assert_close(result, expected)
    if p:
        result.sum().backward()
        expected.sum().backward()
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad * (dense != 0) if p == torch.inf else theirs.grad)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo, torch.sparse_bsc], ids=str)
def test_tensors_of_torch_sparse_as_operands(layout: torch.layout) -> None:
    a, b = matrix(4, 6), matrix(4, 6)
    theirs = b.to_sparse(layout=layout, **({"blocksize": (2, 3)} if layout == torch.sparse_bsc else {}))
    for operation in (operator.add, operator.sub, operator.mul, torch.maximum):
        torch.testing.assert_close(operation(sparse(a), theirs).to_dense(), operation(a, b))
        torch.testing.assert_close(operation(theirs, sparse(a)).to_dense(), operation(b, a))
    torch.testing.assert_close((sparse(a) @ theirs.to_dense().to_sparse().t()).to_dense(), a @ b.t())
    torch.testing.assert_close((theirs @ sparse(a.t())).to_dense(), b @ a.t())
    torch.testing.assert_close(torch.cat([sparse(a), theirs]).to_dense(), torch.cat([a, b]))
    torch.testing.assert_close(einsum("ij,kj->ik", sparse(a), theirs).to_dense(), a @ b.t())
    torch.testing.assert_close(sparse(a).copy_(theirs).to_dense(), b)
    with pytest.raises((GossamerError, RuntimeError)):
        theirs.add_(sparse(a))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int32, torch.complex64])
def test_types_that_count_or_turn(dtype: torch.dtype) -> None:
    a, b = matrix(4, 6).to(dtype), matrix(4, 6).to(dtype)
    ours, other = sparse(a), sparse(b, "COO")
    for dim in (None, 0, 1):
        for name in ("any", "all", "count_nonzero"):
            torch.testing.assert_close(getattr(torch, name)(ours, dim), getattr(torch, name)(a, dim))
    for kind in (torch.any, torch.all):
        each = kind(ours, dim=())
        assert isinstance(each, SparseTensor)
        torch.testing.assert_close(each.to_dense(), kind(a, dim=()))
    torch.testing.assert_close((ours * other).to_dense(), a * b)
    torch.testing.assert_close((ours + other).to_dense(), a + b)
    torch.testing.assert_close((ours @ other.t()).to_dense(), (a.to(torch.complex64) @ b.t().to(torch.complex64)).to(dtype))
    if dtype == torch.bool:
        assert isinstance(ours & other, SparseTensor) and isinstance(ours | other, SparseTensor)
        torch.testing.assert_close((ours & other).to_dense(), a & b)
        torch.testing.assert_close((ours | other).to_dense(), a | b)
    if dtype.is_complex:
        turned = ours * (1 - 2j)
        torch.testing.assert_close(turned.imag.to_dense(), (a * (1 - 2j)).imag)
        torch.testing.assert_close(turned.mH.to_dense(), (a * (1 - 2j)).mH)
