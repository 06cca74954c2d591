"""Operations on SparseTensors in every format, against dense torch, SciPy and torch.sparse."""

import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import EinsumError, Format, GossamerError, SparseTensor, einsum
from gossamer.sparsity import kernels
from tests.sparsity.made import FORMATS, matrices, matrix, sparse

SOME = settings(max_examples=20, deadline=None, derandomize=True)
formats = st.sampled_from(list(FORMATS))
equal = torch.testing.assert_close


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


# Products


@SOME
@given(dense=matrices(), name=formats, columns=st.integers(1, 5))
def test_products_with_dense(dense: Tensor, name: str, columns: int) -> None:
    a, (m, k) = sparse(dense, name), dense.shape
    x, left = numbers(k, columns), numbers(columns, m)
    equal(a @ x, dense @ x)
    equal(a @ x[:, 0], dense @ x[:, 0])
    equal(left @ a, left @ dense)
    equal(left[0] @ a, left[0] @ dense)
    equal(a.t() @ left.t(), dense.t() @ left.t())
    bias = numbers(m)
    equal(F.linear(x.t(), a, bias), F.linear(x.t(), dense, bias))
    equal(torch.addmm(numbers(m, columns) * 0 + 1, a, x, beta=2, alpha=3), 2 + 3 * (dense @ x))
    equal(torch.addmv(bias, a, x[:, 0]), bias + dense @ x[:, 0])


@SOME
@given(m=st.integers(1, 6), k=st.integers(1, 6), n=st.integers(1, 6), left=formats, right=formats)
def test_products_of_two_sparse(m: int, k: int, n: int, left: str, right: str) -> None:
    x, y = matrix(m, k), matrix(k, n)
    product = sparse(x, left) @ sparse(y, right)
    assert isinstance(product, SparseTensor)
    equal(product.to_dense(), x @ y)
    equal(einsum("ik,kj->ij", sparse(x, left), sparse(y, right), format="dense"), x @ y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8])
@pytest.mark.parametrize("name", ["CSR", "COO", "BSR"])
def test_types(dtype: torch.dtype, name: str) -> None:
    dense, x = matrix(5, 8, dtype=dtype), numbers(8, 3, dtype=dtype)
    a = sparse(dense, name)
    equal(a @ x, (dense.double() @ x.double()).to(dtype))
    equal((a + a.t().t()).to_dense(), 2 * dense)
    equal((a * x[:, 0]).to_dense(), dense * x[:, 0])
    equal(a.to_dense(), dense)


def test_long_sums_of_narrow_floats_are_kept_in_f32() -> None:
    dense = torch.full((1, 4096), 0.01, dtype=torch.bfloat16)
    exact = (dense.double() @ torch.ones(4096, 1).double()).to(torch.bfloat16)
    equal(sparse(dense) @ torch.ones(4096, 1, dtype=torch.bfloat16), exact, rtol=0, atol=0)


def test_batched_products() -> None:
    dense, x = torch.stack([matrix(3, 5), matrix(3, 5)]), numbers(2, 5, 4)
    a = SparseTensor.from_dense(dense, Format.csf(3))
    equal(torch.bmm(a, x), dense @ x)
    equal(a @ x[0], dense @ x[0])
    w = sparse(dense[0])
    equal(w @ x, dense[0] @ x)
    y = numbers(2, 4, 5)
    equal(F.linear(y, w), F.linear(y, dense[0]))
    equal(y @ w.t(), y @ dense[0].t())


@pytest.mark.parametrize("name", FORMATS)
def test_sddmm(name: str) -> None:
    dense, x, y = matrix(5, 8), numbers(5, 4), numbers(8, 4)
    a = sparse(dense, name)
    equal(einsum("ij,ir,jr->ij", a, x, y).to_dense(), dense * (x @ y.t()))
    sampled = torch.sparse.sampled_addmm(a, x, y.t(), beta=2, alpha=3)
    kept = a.to_format(Format.CSR) if name in ("BSR", "BSC", "2:4", "hybrid", "dense") else a
    if kept is a:
        equal(sampled.to_dense(), 2 * dense + 3 * (dense != 0) * (x @ y.t()))


def test_sddmm_is_that_of_torch() -> None:
    dense, x, y = matrix(5, 8), torch.randn(5, 4), torch.randn(4, 8)
    theirs = torch.sparse.sampled_addmm(dense.to_sparse_csr(), x, y)
    equal(torch.sparse.sampled_addmm(sparse(dense), x, y).values(), theirs.values())


def test_products_are_those_of_scipy() -> None:
    x = scipy.sparse.random_array((60, 80), density=0.1, rng=1)
    y = scipy.sparse.random_array((80, 50), density=0.1, rng=2)
    product = SparseTensor.from_scipy(x.tocsr()) @ SparseTensor.from_scipy(y.tocsr())
    theirs = (x.tocsr() @ y.tocsr()).sorted_indices()
    assert product.format == Format.CSR.with_widths(32, 32)
    assert product.coordinates(1).tolist() == theirs.indices.tolist()
    equal(product.values(), torch.from_numpy(theirs.data))


# einsum


@pytest.mark.parametrize("name", ["COO", "CSF", "mixed"])
def test_einsum_of_a_tensor_of_three_dimensions(name: str) -> None:
    format = {
        "COO": Format.coo(3),
        "CSF": Format.csf(3),
        "mixed": Format.parse("#sparse_tensor.encoding<{map = (i, j, k) -> (j : dense, i : compressed, k : dense)}>"),
    }[name]
    dense = matrix(4, 15).view(4, 3, 5)
    t = SparseTensor.from_dense(dense, format)
    b, c = numbers(3, 2), numbers(5, 2)
    for expression, operands in {
        "ijk,jr,kr->ir": (b, c),  # MTTKRP
        "ijk,kr->ijr": (c,),  # TTM
        "ijk->jk": (),
        "ijk->kji": (),
        "ijk->": (),
        "ijk,j->ik": (b[:, 0],),
    }.items():
        equal(einsum(expression, t, *operands, format="dense"), torch.einsum(expression, dense, *operands))


def test_einsum_of_three_sparse() -> None:
    x, y, z = matrix(4, 5), matrix(5, 6), matrix(6, 3)
    for result in ("il", "li", "i", ""):
        equal(
            einsum(f"ij,jk,kl->{result}", sparse(x), sparse(y, "CSC"), sparse(z, "COO"), format="dense"),
            torch.einsum(f"ij,jk,kl->{result}", x, y, z),
        )


@pytest.mark.parametrize("name", FORMATS)
def test_einsum_into_a_format(name: str) -> None:
    x, y = torch.eye(4, 5), matrix(5, 4)
    product = einsum("ij,jk->ik", sparse(x), sparse(y), format=FORMATS[name])
    assert product.format == FORMATS[name]
    equal(product.to_dense(), x @ y)
    equal(einsum("ij,jk->ik", sparse(x), y, format=FORMATS[name]).to_dense(), x @ y)


def test_einsum_infers_the_format() -> None:
    a, b, x = sparse(matrix(4, 4)), sparse(matrix(4, 4), "COO"), numbers(4, 4)
    assert einsum("ij,jk->ik", a, x).layout == torch.strided and not isinstance(einsum("ij,jk->ik", a, x), SparseTensor)
    assert einsum("ij,ij->ij", a, x).coordinates(1) is a.coordinates(1)
    assert einsum("ij,jk->ik", b, a).format == Format.COO
    assert not isinstance(einsum("ij,ij->i", a, b), SparseTensor)
    implicit = einsum("ij,jk", a, x)
    equal(implicit, a.to_dense() @ x)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("ij,jk", r"einsum 'ij,jk' has 2 operands, got 1"),
        ("ii->i", r"'i' stands twice in 'ii'; diagonals are not supported"),
        ("ijk->i", r"'ijk' names 3 dimensions of CSR of shape \(3, 4\)"),
        ("ij->k", r"the result has 'k', which no operand has"),
        ("...j->j", r"only letters, commas and one -> can be read \(no ellipsis\)"),
    ],
)
def test_expressions_that_do_not_fit(expression: str, message: str) -> None:
    with pytest.raises(EinsumError, match=message):
        einsum(expression, sparse(matrix(3, 4)))


def test_operands_that_do_not_fit() -> None:
    a = sparse(matrix(3, 4))
    with pytest.raises(EinsumError, match=r"einsum 'ik,kj->ij': 'k' is 4 and 5"):
        a @ torch.ones(5, 2)
    with pytest.raises(EinsumError, match=r"of torch.float32 and torch.float64: convert the operands to one dtype"):
        a @ torch.ones(4, 2, dtype=torch.float64)
    with pytest.raises(GossamerError, match=r"no kernels for torch.complex64, only for float32, .*: convert the operands"):
        sparse(matrix(3, 4, dtype=torch.complex64)) @ torch.ones(4, 2, dtype=torch.complex64)


# Elementwise


@SOME
@given(dense=matrices(), left=formats, right=formats, seed=st.integers(0, 99))
def test_union_and_intersection(dense: Tensor, left: str, right: str, seed: int) -> None:
    torch.manual_seed(seed)
    other = matrix(*dense.shape)
    a, b = sparse(dense, left), sparse(other, right)
    equal((a * b).to_dense(), dense * other)
    if left == "2:4":  # which the union may not be
        a = a.to_format(Format.CSR)
    equal((a + b).to_dense(), dense + other)
    equal((a - b).to_dense(), dense - other)
    assert (a + b).format == a.format


@pytest.mark.parametrize("name", FORMATS)
def test_with_dense_and_with_numbers(name: str) -> None:
    dense, other = matrix(5, 7), numbers(5, 7)
    a = sparse(dense, name)
    for factor in (2, torch.tensor(2.0), other, other[0], other[:, :1], other[:1, :1]):
        for product in (a * factor, factor * a):
            assert isinstance(product, SparseTensor)
            equal(product.to_dense(), dense * factor)
    equal((a / 2).to_dense(), dense / 2)
    equal((a / (other.abs() + 1)).to_dense(), dense / (other.abs() + 1))
    equal(a + other, dense + other)
    equal(other - a, other - dense)
    equal(a + 1, dense + 1)


@pytest.mark.parametrize("name", FORMATS)
def test_functions_that_keep_zeros(name: str) -> None:
    dense = matrix(5, 7) * -0.25
    a = sparse(dense, name)
    for function in (torch.neg, torch.abs, torch.tanh, torch.relu, torch.sin, torch.sign, torch.expm1, F.relu, F.leaky_relu):
        equal(function(a).to_dense(), function(dense))
    equal((-a).to_dense(), -dense)
    equal((a**2).to_dense(), dense**2)


def test_what_would_make_zeros_nonzero() -> None:
    a = sparse(matrix(3, 3))
    with pytest.raises(GossamerError, match=r"a power that is not positive is not supported; zeros would not stay zeros"):
        a**-1
    with pytest.raises(GossamerError, match=r"division by a SparseTensor is not supported; its zeros would give infinities"):
        1 / a
    with pytest.raises(GossamerError, match=r"mul of sparse \[3, 3\] and \[2, 3\]: sparse operands do not broadcast"):
        a * sparse(matrix(2, 3))


# Sums and shapes


@pytest.mark.parametrize("name", FORMATS)
def test_sums_and_means(name: str) -> None:
    dense = matrix(5, 7)
    a = sparse(dense, name)
    for dim in (0, 1, -1, (0, 1)):
        for keep in (False, True):
            equal(a.sum(dim, keep), dense.sum(dim, keep))
            equal(torch.mean(a, dim, keep), dense.mean(dim, keep))
    equal(a.sum(), dense.sum())
    equal(a.sum(0, dtype=torch.float64), dense.sum(0, dtype=torch.float64))
    with pytest.raises(IndexError, match="dimension 2 is out of range"):
        a.sum(2)


@pytest.mark.parametrize("name", FORMATS)
def test_transposes_share_memory(name: str) -> None:
    dense = matrix(5, 8)
    a = sparse(dense, name)
    for turned in (a.t(), a.T, a.mT, a.transpose(0, 1), a.permute(1, 0), a.permute((1, 0))):
        equal(turned.to_dense(), dense.t())
        assert name == "2:4" or turned.components[-1].data_ptr() == a.components[-1].data_ptr()
    equal(a.t().t().to_dense(), dense)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "2:4"])
def test_rows_and_blocks(name: str) -> None:
    dense = matrix(6, 7)
    a = sparse(dense, name)
    for index in (
        slice(1, 4), slice(None, None, 2), (slice(None), slice(2, 5)), (slice(1, 5), slice(0, 3)), torch.tensor([4, 0, -1]),
        torch.tensor([True, False, True, True, False, False]), (Ellipsis, slice(1, 3)),
    ):  # fmt: skip
        part = a[index]
        assert part.format == a.format
        equal(part.to_dense(), dense[index])
    for index in (2, -1, (2, slice(1, 4)), (slice(None), 3), (2, 3)):
        equal(a[index], dense[index])


@pytest.mark.parametrize(
    ("index", "message"), [(6, "index 6 is out of bounds"), ((0, 0, 0), "3 indices for a SparseTensor of 2 dimensions")]
)
def test_indices_that_do_not_fit(index: object, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        sparse(matrix(6, 7))[index]


# Kernels


def test_one_kernel_serves_every_shape_and_pattern() -> None:
    sparse(matrix(3, 4)) @ numbers(4, 5)
    known = set(kernels._by_key)
    for m, k, n in ((1, 1, 1), (7, 9, 2), (30, 2, 11)):
        dense, x = matrix(m, k), numbers(k, n)
        equal(sparse(dense) @ x, dense @ x)
    assert set(kernels._by_key) == known


def test_results_in_a_format_do_not_leak() -> None:
    import resource

    a = sparse(matrix(300, 300, 0.1))
    a @ a
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        a @ a
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; each product takes about 1 MB
