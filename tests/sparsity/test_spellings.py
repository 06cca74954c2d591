"""The ways in which people call torch's functions, and what torch refuses: SparseTensors take and refuse the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer import EinsumError, Format, FormatError, GossamerError, SparseTensor, einsum
from tests.sparsity.made import matrix, sparse

KEYWORDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, x: torch.mm(input=a, mat2=x),
    "matmul": lambda a, x: torch.matmul(input=a, other=x),
    "addmm": lambda a, x: torch.addmm(input=x, mat1=a, mat2=x),
    "addmv": lambda a, x: torch.addmv(input=x[0], mat=a, vec=x[1]),
    "mul": lambda a, x: torch.mul(input=a, other=x),
    "add": lambda a, x: torch.add(input=a, other=a, alpha=2),
    "div": lambda a, x: torch.div(input=a, other=2, rounding_mode="floor"),
    "pow": lambda a, x: torch.pow(input=a, exponent=2),
    "sum": lambda a, x: torch.sum(a, axis=0, keepdims=True),
    "amax": lambda a, x: torch.amax(input=a, dim=0),
    "cat": lambda a, x: torch.cat(tensors=[a, a], dim=1),
    "permute": lambda a, x: a.permute(dims=(1, 0)),
    "swapaxes": lambda a, x: torch.swapaxes(a, axis0=0, axis1=1),
    "reshape": lambda a, x: a.reshape(shape=(-1,)),
    "linear": lambda a, x: F.linear(input=x, weight=a, bias=None),
    "index_select": lambda a, x: torch.index_select(input=a, dim=0, index=torch.tensor([1, 0])),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_operands_by_keyword(name: str) -> None:
    dense, x = matrix(4, 4), torch.randn(4, 4)
    result = KEYWORDS[name](sparse(dense), x)
    torch.testing.assert_close(result.to_dense(), KEYWORDS[name](dense, x))


def test_sums_of_torch_sparse() -> None:
    dense = matrix(4, 5)
    a = sparse(dense, "COO")
    assert torch.equal(torch.sparse.sum(a), dense.sum())
    assert torch.equal(torch.sparse.sum(a, 0), dense.sum(0))
    assert torch.equal(torch.sparse.sum(a, [0, 1], dtype=torch.float64), dense.sum(dtype=torch.float64))
    with pytest.raises(IndexError, match="out of range"):
        torch.sparse.sum(a, 5)


def test_results_into_a_tensor() -> None:
    dense, x = matrix(4, 5), torch.randn(5, 2)
    out = torch.empty(4, 2)
    assert torch.mm(sparse(dense), x, out=out) is out
    torch.testing.assert_close(out, dense @ x)
    torch.testing.assert_close(torch.add(sparse(dense), sparse(dense), out=torch.empty(0)), 2 * dense)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.mm(sparse(dense), x, out=out.long())
    ours = sparse(matrix(4, 5), "COO")
    assert torch.add(sparse(dense), sparse(dense), out=ours) is ours
    torch.testing.assert_close(ours.to_dense(), 2 * dense)
    with pytest.raises(GossamerError, match="which would change the shape"):
        torch.mm(sparse(dense), x, out=ours)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "permute with wrong dimensions": lambda a: a.permute(0, 2),
    "permute with repeated dimensions": lambda a: a.permute(0, 0),
    "permute of too few": lambda a: a.permute(0),
    "mask of another length": lambda a: a[torch.tensor([True, False])],
    "float index": lambda a: a[torch.tensor([0.0, 1.0])],
    "index out of bounds": lambda a: a[torch.tensor([0, 9])],
    "pairs out of bounds": lambda a: a[torch.tensor([0, 1]), torch.tensor([0, 9])],
    "step backwards": lambda a: a[::-1],
    "too many indices": lambda a: a[0, 0, 0],
    "mv of a matrix": lambda a: torch.mv(a, torch.ones(4, 2)),
    "mm of a vector": lambda a: torch.mm(a, torch.ones(4)),
    "bmm of matrices": lambda a: torch.bmm(a, torch.ones(4, 2)),
    "addmm of a vector": lambda a: torch.addmm(torch.ones(3), a, torch.ones(4)),
    "shapes of a product": lambda a: a @ torch.ones(5, 2),
    "sum over a dimension twice": lambda a: a.sum((0, 0)),
    "amax over nothing": lambda a: a[:0].amax(0),
    "max of nothing": lambda a: a[:0].max(),
    "reshape with nothing known": lambda a: a[:0].reshape(0, -1),
    "reshape to another size": lambda a: a.reshape(5, 2),
    "reshape with two unknown sizes": lambda a: a.reshape(-1, -1),
    "expand to fewer dimensions": lambda a: a.expand(4),
    "mT of a vector": lambda a: a[0:1].flatten().mT,
    "narrow beyond the end": lambda a: a.narrow(0, 2, 2),
    "mean of integers": lambda a: a.long().mean(),
    "mean in integers": lambda a: a.mean(dtype=torch.int64),
    "dimension out of range": lambda a: a.sum(2),
    "t of three dimensions": lambda a: a.unsqueeze(0).t(),
    "bools subtracted": lambda a: a.bool() - a.bool(),
    "integers divided by addcdiv": lambda a: torch.addcdiv(a, a.long(), torch.ones(3, 4).long()),
    "unknown keyword": lambda a: torch.sum(a, dims=0),
    "cat of shapes that differ": lambda a: torch.cat([a, a.t()]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses(name: str) -> None:
    dense = matrix(3, 4)
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as theirs:
        REFUSED[name](dense)
    with pytest.raises(theirs.type):
        REFUSED[name](sparse(dense))


GIVEN: dict[str, Callable[[], SparseTensor]] = {
    "lists": lambda: SparseTensor.from_dense([[1.0, 0.0], [0.0, 2.0]]),
    "NumPy": lambda: SparseTensor.from_dense(np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32)),
    "torch.sparse": lambda: SparseTensor.from_dense(torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to_sparse()),
    "the name of a format": lambda: SparseTensor.from_dense(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "COO"),
    "parts as lists": lambda: SparseTensor.from_parts("CSR", [2, 2], [0, 1, 2], [0, 1], [1.0, 2.0]),
    "parts as lists of NumPy's and torch's numbers": lambda: SparseTensor.from_parts(
        "CSR", [2, 2], list(np.array([0, 1, 2], dtype=np.int32)), list(torch.tensor([0, 1])), list(np.array([1.0, 2.0], "f4"))
    ),
    "edges in 8 bits": lambda: SparseTensor.from_edge_index(torch.tensor([[0, 1], [0, 1]]).byte(), [1.0, 2.0]),
    "edges as lists": lambda: SparseTensor.from_edge_index([[0, 1], [0, 1]], [1.0, 2.0]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_constructors_take(name: str) -> None:
    assert GIVEN[name]().to_dense().equal(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))


def test_parts_may_be_empty_lists() -> None:
    assert SparseTensor.from_parts("CSR", (2, 2), [0, 0, 0], [], []).to_dense().equal(torch.zeros(2, 2))
    assert SparseTensor.from_parts("COO", (2, 2), [0, 0], ([], []), []).to_dense().equal(torch.zeros(2, 2))


@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
def test_names_and_operators_that_few_use() -> None:
    dense = matrix(4, 4)
    assert isinstance(sparse(dense * 1j).conj(), SparseTensor)
    turned = lambda a: torch.movedim(a, (0, 1), (1, 0))
    for function in (turned, reversed, lambda a: a ** (1 + 2j), lambda a: (a * (1 + 2j)).conj()):
        torch.testing.assert_close(function(sparse(dense)).to_dense(), function(dense), equal_nan=True)
    with pytest.raises(GossamerError, match="equally many dimensions"):
        torch.movedim(sparse(dense), (0, 1), (0, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SparseTensor.from_dense(None),
            "must be a tensor, a list of numbers or a NumPy array, got None",
        ),
        (lambda: SparseTensor.from_dense("a"), "got str"),
        (lambda: SparseTensor.from_dense([["a"]]), "from_dense stores must be a tensor"),
        (lambda: SparseTensor.from_dense(torch.eye(2), 3), "the format must be a Format, such as Format.COO"),
        (lambda: SparseTensor.from_dense(torch.eye(2), "CRS"), "CRS"),
        (lambda: SparseTensor.from_edge_index(None), "edge_index must be a tensor"),
        (lambda: SparseTensor.from_edge_index([[0], [1]], size="3"), "size must be a number of nodes"),
        (lambda: SparseTensor.from_parts(Format.CSR, 2, [0], [0], [1.0]), "the shape must be a tuple of integers, got 2"),
        (lambda: SparseTensor.from_parts(Format.CSR, (2, 2), None, [0], [1.0]), "positions must be a tensor"),
        (lambda: sparse(torch.eye(2)).with_values(None), "values must be a tensor"),
    ],
)
def test_what_constructors_want(make: Callable[[], SparseTensor], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        make()


def test_what_einsum_wants() -> None:
    a = sparse(matrix(3, 3))
    with pytest.raises(EinsumError, match="got SparseTensor, SparseTensor"):
        einsum(a, a)
    with pytest.raises(EinsumError, match="got str, SparseTensor, NoneType"):
        einsum("ij,jk->ik", a, None)
    assert einsum("ij,jk->ik", a, a, format="CSC").format == Format.CSC


INDICES = {
    "pairs": lambda: (torch.tensor([0, 2, -1]), torch.tensor([1, 1, 3])),
    "pairs and one": lambda: (torch.tensor([0, 2]), torch.tensor([1])),
    "a grid": lambda: (torch.tensor([[0], [2]]), torch.tensor([[1, 3]])),
    "lists": lambda: ([0, 2], [1, 3]),
    "a list": lambda: [2, 0],
    "a mask and a tensor": lambda: (torch.tensor([True, False, True]), torch.tensor([0, 1])),
    "a mask of all": lambda: matrix(3, 4) > 0,
    "True": lambda: True,
    "False": lambda: False,
    "None": lambda: (None, slice(1, 3)),
    "None after a number": lambda: (1, None),
    "0-d": lambda: torch.tensor(1),
    "2-d": lambda: torch.tensor([[0, 1], [2, 0]]),
    "nothing": lambda: slice(2, 1),
    "an empty list": lambda: [],
    "Ellipsis": lambda: (..., 2),
}


@pytest.mark.parametrize("format", ["CSR", "CSC", "COO", "BSR"])
@pytest.mark.parametrize("name", INDICES)
@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
def test_every_form_of_index(name: str, format: str) -> None:
    dense, index = matrix(3, 4, 0.6), INDICES[name]()
    torch.testing.assert_close(sparse(dense, format)[index].to_dense(), dense[index])


def test_indices_may_be_sparse() -> None:
    dense, x, numbers, mask = (
        matrix(4, 6, 0.6),
        torch.randn(4, 6),
        torch.tensor([2, 0, 3, 0]),
        torch.tensor([True, False, False, True]),
    )
    a, n, m = sparse(dense), SparseTensor.from_dense(numbers, Format.coo(1)), SparseTensor.from_dense(mask, Format.coo(1))
    for ours, plain in ((a, dense), (x, x)):
        for own, index in (
            (n, numbers),
            (m, mask),
            ((n, 1), (numbers, 1)),
            ((m, slice(1, 3)), (mask, slice(1, 3))),
            ((n, n), (numbers,) * 2),
        ):
            torch.testing.assert_close(ours[own].to_dense(), plain[index])
        torch.testing.assert_close(ours.index_select(0, n).to_dense(), plain.index_select(0, numbers))


def test_gradients_flow_through_pairs() -> None:
    dense = matrix(3, 4, 0.6)
    a = sparse(dense).requires_grad_()
    rows, columns = torch.tensor([0, 2, 0, 0]), torch.tensor([1, 3, 1, 2])
    a[rows, columns].square().sum().backward()
    x = dense.clone().requires_grad_()
    x[rows, columns].square().sum().backward()
    torch.testing.assert_close(a.grad.to_dense(), torch.where(dense != 0, x.grad, 0))


UNSTORED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "lerp to dense": lambda a, b: torch.lerp(a, b.to_dense(), 2.0),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=2),
    "addcmul of dense": lambda a, b: torch.addcmul(a, b.to_dense() + 1, b.to_dense()),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.to_dense() + 1),
    "full_like": lambda a, b: torch.full_like(a, 3),
    "full_like of 0": lambda a, b: torch.full_like(a, 0),
    "add with alpha": lambda a, b: torch.add(a, b, alpha=3),
    "add of bools": lambda a, b: torch.add(a.bool(), b.bool(), alpha=2),
    "sum of complex": lambda a, b: (a.to(torch.complex64) * 1j).sum(0),
}


@pytest.mark.parametrize("format", ["CSR", "BSR"])
def test_sums_and_quotients_have_the_dtype_of_dense_ones(format: str) -> None:
    dense = (matrix(5, 7) * 100).round()
    for dtype in (torch.int32, torch.uint8, torch.float64):
        of_integers = dense.long()
        result, expected = sparse(of_integers, format).sum(0, dtype=dtype), of_integers.sum(0, dtype=dtype)
        assert result.dtype == expected.dtype and torch.equal(result, expected)
    for dtype in (torch.bfloat16, torch.int32):
        a, x, divisor = sparse(dense.to(dtype), format), dense.to(dtype), torch.tensor(3.0)
        quotient = (a / divisor).to_dense()
        assert quotient.dtype == (x / divisor).dtype and torch.equal(quotient, x / divisor)


@pytest.mark.parametrize("name", UNSTORED)
def test_what_is_not_stored_counts(name: str) -> None:
    dense, other = matrix(5, 4, 0.5), matrix(5, 4, 0.5)
    result = UNSTORED[name](sparse(dense), sparse(other, "COO")).to_dense()
    expected = UNSTORED[name](dense, other)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["CSR", "CSC", "COO", "BSR"])
def test_a_product_of_elements_knows_nan(name: str) -> None:
    dense = torch.tensor([[torch.nan, 0.0, 2.0], [1.0, 2.0, 3.0], [torch.inf, 0.0, 1.0]])
    for dim in (0, 1):
        torch.testing.assert_close(sparse(dense, name).prod(dim), dense.prod(dim), equal_nan=True)


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 300.0), (torch.float32, 1e30)])
def test_a_product_with_an_element_that_is_not_stored_is_zero_however_large_the_others(
    dtype: torch.dtype, large: float
) -> None:
    dense = torch.tensor([[0.0, large, large], [2.0, 3.0, 4.0], [0.0, 0.0, large]], dtype=dtype)
    for name in ("CSR", "CSC", "BSR"):
        assert torch.equal(sparse(dense, name).prod(1), dense.prod(1))


def test_what_fills_up_blocks_at_the_edge_is_never_seen() -> None:
    dense = torch.arange(1.0, 13.0).view(3, 4)
    for make in (lambda a: a / 0, lambda a: a * torch.inf, lambda a: a / torch.ones(3, 4)):
        torch.testing.assert_close(make(sparse(dense, "BSR")).sum(0), make(dense).sum(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.complex64])
def test_elements_by_lists_keep_their_type(dtype: torch.dtype) -> None:
    dense = matrix(4, 5, 0.5, dtype)
    found, expected = sparse(dense)[[0, 1, 3], [2, 3, 3]], dense[[0, 1, 3], [2, 3, 3]]
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_parts_as_torch_sparse_names_them() -> None:
    dense = matrix(4, 6)
    for layout in ("coo", "csr", "csc"):
        ours, torchs = (getattr(each, f"to_sparse_{layout}")() for each in (sparse(dense), dense))
        names = {"coo": ("indices", "_indices", "_values", "is_coalesced"), "csr": ("crow_indices", "col_indices"),
                 "csc": ("ccol_indices", "row_indices")}[layout]  # fmt: skip
        for name in ("_nnz", *names):
            found, expected = (getattr(each, name)() for each in (ours, torchs))
            assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    with pytest.raises(RuntimeError, match="crow_indices expected sparse row compressed"):
        sparse(dense, "COO").crow_indices()


def test_sums_and_samples_of_products_that_stay_sparse() -> None:
    addend, left, x = matrix(4, 3), matrix(4, 5), torch.randn(5, 3)
    found = torch.sspaddmm(sparse(addend), sparse(left), x, beta=2, alpha=3)
    assert isinstance(found, SparseTensor)
    torch.testing.assert_close(found.to_dense(), torch.addmm(addend, left, x, beta=2, alpha=3))
    batch, right = torch.randn(2, 4, 5), torch.randn(2, 5, 3)
    mask = torch.stack([matrix(4, 3), matrix(4, 3)])
    sampled = torch.sparse.sampled_addmm(SparseTensor.from_dense(mask, Format.csf(3)), batch, right, beta=0.5)
    torch.testing.assert_close(sampled.to_dense(), (0.5 * mask + batch @ right) * (mask != 0))
    with pytest.raises(GossamerError, match="the same batch in front"):
        torch.sparse.sampled_addmm(SparseTensor.from_dense(mask, Format.csf(3)), batch[0], right)


def test_types_of_integers_and_bools() -> None:
    dense = matrix(4, 4)
    for dtype in (torch.bool, torch.int32):
        for equation in ("ij->i", "ii->", "ij->ji"):
            found, expected = (torch.einsum(equation, each.to(dtype)) for each in (sparse(dense), dense))
            assert found.dtype == expected.dtype
            assert torch.equal(found.to_dense(), expected)
    for equation, x in (("ij,i->ij", torch.rand(4)), ("ij,ij->ij", torch.rand(4, 4)), ("ij,->ij", torch.rand(()).double())):
        torch.testing.assert_close(
            torch.einsum(equation, sparse(dense).int(), x).to_dense(), torch.einsum(equation, dense.int(), x)
        )
    mask = sparse(matrix(4, 4), "CSC").bool()
    assert sparse(dense).bool().sparse_mask(mask).dtype == torch.bool
    torch.testing.assert_close(torch.einsum("ij,->ij", sparse(dense), torch.tensor(2.0)).to_dense(), 2 * dense)


def test_indices_of_every_shape_and_type() -> None:
    dense = matrix(4, 5)
    assert torch.equal(sparse(dense).index_select(0, torch.tensor(1)).to_dense(), dense.index_select(0, torch.tensor(1)))
    assert torch.equal(sparse(dense)[torch.tensor([1, 0, 1, 0]).byte()].to_dense(), dense[::2])
    for index in (torch.tensor([0.0]), torch.tensor([[0, 1]])):
        with pytest.raises(GossamerError, match="index_select"):
            sparse(dense).index_select(0, index)
    with pytest.raises(GossamerError, match="resize_"):
        sparse(dense).resize_(2, 2)


def test_gradients_of_products_divide_by_nothing() -> None:
    dense = torch.tensor([[1.0, 2, 3, -torch.inf], [0, 1e30, 1e30, 2], [2, 3, 0, 4]])
    a, twin = SparseTensor.from_dense(dense).requires_grad_(), dense.clone().requires_grad_()
    a.prod(1).sum().backward()
    twin.prod(1).sum().backward()
    assert torch.equal(a.grad.to_dense(), torch.where(dense != 0, twin.grad, 0))


IN_A_GRAPH: dict[str, Callable[[Tensor, int], Any]] = {
    "sum": lambda a, dim: a.sum(dim),
    "softmax": lambda a, dim: torch.sparse.softmax(a, dim),
    "permute": lambda a, dim: a.permute(dim, 0),
    "cat": lambda a, dim: torch.cat([a, a], dim),
    "index_select": lambda a, dim: a.index_select(dim, torch.tensor(1)),
    "sspaddmm": lambda a, dim: torch.sspaddmm(a, a, a.to_dense()),
    "addmm": lambda a, dim: torch.sparse.addmm(a, a, a),
    "diagonal": lambda a, dim: einsum("ii->i", a),
    "parts": lambda a, dim: a.crow_indices() * dim,
}


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_in_graphs_whose_sizes_are_open(name: str) -> None:
    a, function = sparse(matrix(4, 4)), IN_A_GRAPH[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="sparse", fullgraph=True, dynamic=True, options={"dense": "eager"})
    torch.testing.assert_close(compiled(a, 1).to_dense(), function(a, 1).to_dense())


@pytest.mark.parametrize("name", ["permute", "mm", "mv", "t"])
def test_graphs_refuse_what_eager_code_refuses(name: str) -> None:
    refused: dict[str, Callable[[Tensor], Any]] = {
        "permute": lambda a: a.permute(0, 0),
        "mm": lambda a: torch.mm(a, torch.ones(4)),
        "mv": lambda a: a.mv(torch.ones(4, 2)),
        "t": lambda a: a.unsqueeze(0).t(),
    }
    with pytest.raises(Exception, match="takes"):
        torch.compile(refused[name], backend="eager", fullgraph=True)(sparse(matrix(4, 4)))
