"""Operations on SparseTensors in every format, against dense torch, SciPy and torch.sparse."""

from collections.abc import Callable

import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import EinsumError, Format, GossamerError, SparseTensor, einsum
from gossamer.runtime import region_kernel
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.operations.sparse_results import einsum_sparse
from gossamer.sparsity.tensor.sparse_tensor import bound_to, made_of
from tests.sparsity.made import FORMATS, matrices, matrix, sparse, two_of_four

SOME = settings(max_examples=5, derandomize=True)
formats = st.sampled_from(list(FORMATS))
equal = torch.testing.assert_close


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


# Products


@SOME
@given(m=st.integers(1, 6), k=st.integers(1, 6), n=st.integers(1, 6), left=formats, right=formats)
def test_products_of_two_sparse(m: int, k: int, n: int, left: str, right: str) -> None:
    x, y = matrix(m, k), matrix(k, n)
    product = sparse(x, left) @ sparse(y, right)
    assert isinstance(product, SparseTensor)
    equal(product.to_dense(), x @ y)
    equal(einsum("ik,kj->ij", sparse(x, left), sparse(y, right), format="dense"), x @ y)


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


@pytest.mark.parametrize("name", ["COO", "CSR", "BSR"])
def test_sddmm(name: str) -> None:
    dense, x, y = matrix(5, 8), numbers(5, 4), numbers(8, 4)
    a = sparse(dense, name)
    equal(einsum("ij,ir,jr->ij", a, x, y).to_dense(), dense * (x @ y.t()))
    if name != "BSR":  # whose zeros in blocks are entries
        sampled = torch.sparse.sampled_addmm(a, x, y.t(), beta=2, alpha=3)
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


@pytest.mark.parametrize("name", ["COO", "CSR int32", "DCSC", "BSR", "2:4", "hybrid"])
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


@pytest.mark.parametrize("name", ["CSR", "COO", "BSR", "2:4"])
def test_einsum_of_one_that_sums_nothing(name: str) -> None:
    dense = matrix(40, 30)
    a = sparse(dense, name)
    for expression, expected in (("ij->ij", dense), ("ij->ji", dense.T)):
        for format in (None, Format.CSC, FORMATS["CSR int32"]):
            out = einsum(expression, a, format=format)
            assert isinstance(out, SparseTensor) and format in (None, out.format)
            equal(out.to_dense(), expected)
            out.mul_(2)
            equal(a.to_dense(), dense)  # whose memory the result does not share
    assert einsum("ij->ij", a).format == a.format
    assert einsum("ij->ji", a).format == (a.format if name == "COO" else Format.CSR)
    assert not isinstance(einsum("ij->i", a), SparseTensor)


@pytest.mark.parametrize("size", [30, 3000])
def test_a_kernel_that_gives_back_its_arguments(size: int) -> None:
    a = SparseTensor.from_dense(torch.eye(size), Format.COO)
    for _ in range(2):
        equal(made_of(einsum_sparse([bound_to("ij", a)], Operand("ij", a.format))).to_dense(), torch.eye(size))


def test_einsum_of_one_of_three_dimensions() -> None:
    dense = matrix(4, 15).view(4, 3, 5)
    t = SparseTensor.from_dense(dense, Format.csf(3))
    for expression in ("bij->bij", "bij->bji", "bij->jbi"):
        out = einsum(expression, t)
        assert isinstance(out, SparseTensor) and out.format == Format.csf(3)
        equal(out.to_dense(), torch.einsum(expression, dense))
    assert not isinstance(einsum("bij->ij", t), SparseTensor)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("ij,jk", r"einsum 'ij,jk' has 2 operands, got 1"),
        ("ii->i", r"einsum 'ii->i': 'i' is 3 and 4"),
        ("ij->ii", r"'i' occurs twice in 'ii'"),
        ("ijk->i", r"'ijk' names 3 dimensions of CSR of shape \(3, 4\)"),
        ("ij->k", r"the result has 'k', which no operand has"),
        ("...ijk->k", r"'...ijk' names 3 dimensions of a tensor \[3, 4\]"),
        ("i.j->j", r"only letters, commas, ... and one -> can be read"),
    ],
)
def test_expressions_that_do_not_fit(expression: str, message: str) -> None:
    with pytest.raises(EinsumError, match=message):
        einsum(expression, sparse(matrix(3, 4)))


def test_operands_that_do_not_fit() -> None:
    a = sparse(matrix(3, 4))
    with pytest.raises(GossamerError, match=r"matmul of a SparseTensor in CSR \[3, 4\] .* and a tensor \[5, 2\]"):
        a @ torch.ones(5, 2)
    with pytest.raises(GossamerError, match=r"\[4, 2\] of torch.float64: convert the operands to one dtype"):
        a @ torch.ones(4, 2, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bool])
def test_types_without_kernels_are_computed_by_torch(dtype: torch.dtype) -> None:
    dense = matrix(3, 4).to(dtype)
    if dtype.is_complex:
        dense = dense * 1j
    a = sparse(dense)
    assert a.to_dense().equal(dense)
    if dtype.is_complex:
        x = torch.randn(4, 2, dtype=dtype)
        equal(a @ x, dense @ x)
        equal(a.sum(), dense.sum())
        equal((a @ a.t()).to_dense(), dense @ dense.t())
        equal((a + a.to_format(Format.COO)).to_dense(), 2 * dense)
    else:
        assert a.any() == dense.any()
        assert a.amax(1).equal(dense.amax(1))


# Elementwise, shapes and reductions, beside what test_every_operation.py has


def test_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(GossamerError, match=r"mul of \[3, 3\] and \[2, 3\], which do not broadcast"):
        sparse(matrix(3, 3)) * sparse(matrix(2, 3))


@SOME
@given(dense=matrices(), left=formats, right=formats, seed=st.integers(0, 99))
def test_union_and_intersection_of_any_two_formats(dense: Tensor, left: str, right: str, seed: int) -> None:
    torch.manual_seed(seed)
    other = matrix(*dense.shape)
    a, b = sparse(dense, left), sparse(other, right)
    equal((a * b).to_dense(), dense * other)
    if left == "2:4":  # which the union may not be
        a = a.to_format(Format.CSR)
    equal((a + b).to_dense(), dense + other)
    assert (a + b).format == a.format


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_types_are_promoted_as_torch_does(dtype: torch.dtype) -> None:
    one, other = matrix(5, 7), matrix(5, 7, dtype=dtype)
    for operation in (torch.add, torch.sub, torch.mul):
        for left, right in ((one, other), (other, one)):
            expected = operation(left, right)
            for second in (sparse(right, "COO"), right):
                equal(operation(sparse(left), second).to_dense(), expected)
    equal((sparse(other) * (one + 0.5)).to_dense(), other * (one + 0.5))
    equal((sparse(one) / (other + 1)).to_dense(), one / (other + 1))


DENSE_WHERE_ZERO_MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "bounds that are NaN": lambda a: torch.clamp(a, torch.nan, 1),
    "an upper bound that is NaN": lambda a: a.clamp_max(torch.nan),
    "bounds above 0": lambda a: torch.clamp(a, 2, 1),
    "bounds below 0": lambda a: torch.clip(a, -1, -2),
    "a function that torch.nn.functional has by another name": F.logsigmoid,
}


@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
def test_what_moves_zeros_is_computed_for_all_elements() -> None:
    dense = matrix(5, 6)
    for name, function in DENSE_WHERE_ZERO_MOVES.items():
        found = function(sparse(dense))
        assert not isinstance(found, SparseTensor), name
        torch.testing.assert_close(found, function(dense), equal_nan=True)
    assert isinstance(torch.clamp(sparse(dense), -1, 1), SparseTensor)


def test_reductions_are_those_of_scipy() -> None:
    matrix = scipy.sparse.random_array((60, 80), density=0.1, rng=1, format="csr")
    a = SparseTensor.from_scipy(matrix)
    for axis in (0, 1):
        equal(a.amax(axis), torch.from_numpy(matrix.max(axis=axis).toarray()))
        equal(a.amin(axis), torch.from_numpy(matrix.min(axis=axis).toarray()))
        equal(a.sum(axis), torch.from_numpy(matrix.sum(axis=axis)))


def test_joined_matrices_are_those_of_scipy() -> None:
    x, y = (scipy.sparse.random_array((20, 30), density=0.2, rng=seed, format="csr") for seed in (1, 2))
    joined = torch.cat([SparseTensor.from_scipy(x), SparseTensor.from_scipy(y)], 1).to_scipy()
    theirs = scipy.sparse.hstack([x, y], format="csr")
    assert joined.indices.tolist() == theirs.indices.tolist()
    assert joined.data.tolist() == theirs.data.tolist()


def test_products_of_kronecker_and_diagonals_of_blocks_are_those_of_scipy() -> None:
    x, y = (scipy.sparse.random_array((8, 9), density=0.2, rng=seed, format="csr") for seed in (1, 2))
    a, b = SparseTensor.from_scipy(x), SparseTensor.from_scipy(y)
    pairs = [(torch.kron(a, b), scipy.sparse.kron(x, y)), (torch.block_diag(a, b), scipy.sparse.block_diag([x, y]))]
    for ours, theirs in pairs:
        ours, theirs = ours.to_scipy(), theirs.tocsr()
        assert ours.indices.tolist() == theirs.indices.tolist()
        assert ours.data.tolist() == theirs.data.tolist()
    for offset in (-8, -7, 0, 3, 9):
        assert a.diagonal(offset).tolist() == x.diagonal(offset).tolist()
    vector = a.sum(0)
    matrix = torch.diag(SparseTensor.from_dense(vector, Format.coo(1)), -2)
    assert isinstance(matrix, SparseTensor)
    equal(matrix, torch.diag(vector, -2))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_powers(n: int) -> None:
    """They share no memory with the matrix."""
    dense = torch.randn(6, 6, dtype=torch.float64) * (torch.rand(6, 6) < 0.4)
    a = SparseTensor.from_dense(dense)
    power = torch.matrix_power(a, n)
    assert isinstance(power, SparseTensor)
    torch.testing.assert_close(power.to_dense(), torch.linalg.matrix_power(dense, n))
    power.values().zero_()
    assert torch.equal(a.to_dense(), dense)


def test_dimensions_that_do_not_fit() -> None:
    a = sparse(matrix(3, 4))
    for call in (lambda: a.sum(2), lambda: a.amax(-3), lambda: torch.softmax(a, 2), lambda: a.flatten(0, 5)):
        with pytest.raises(IndexError, match=r"dimension -?\d is out of range for a SparseTensor of 2 dimensions"):
            call()
    with pytest.raises(GossamerError, match=r"a SparseTensor \[3, 4\] has no shape \[5, 2\]: it has 12 elements"):
        a.reshape(5, 2)
    with pytest.raises(GossamerError, match=r"cat along dimension 0 of \[3, 4\] and \[3, 5\]: other dimensions must be equal"):
        torch.cat([a, sparse(matrix(3, 5))])


@pytest.mark.parametrize("name", FORMATS)
def test_transposes_share_memory(name: str) -> None:
    dense = matrix(5, 8)
    a = sparse(dense, name)
    for turned in (a.t(), a.T, a.mT, a.transpose(0, 1), a.permute(1, 0), a.permute((1, 0))):
        equal(turned.to_dense(), dense.t())
        assert name == "2:4" or turned.components[-1].data_ptr() == a.components[-1].data_ptr()
    equal(a.t().t().to_dense(), dense)


@pytest.mark.parametrize(
    ("index", "message"),
    [(6, "index 6 is out of bounds"), ((0, 0, 0), "too many indices: 3 for a SparseTensor of 2 dimensions")],
)
def test_indices_that_do_not_fit(index: object, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        sparse(matrix(6, 7))[index]


# Kernels


def test_one_kernel_serves_every_shape_and_pattern() -> None:
    sparse(matrix(3, 4)) @ numbers(4, 5)
    known = set(region_kernel._by_key)
    for m, k, n in ((1, 1, 1), (7, 9, 2), (30, 2, 11)):
        dense, x = matrix(m, k), numbers(k, n)
        equal(sparse(dense) @ x, dense @ x)
    assert set(region_kernel._by_key) == known


def test_results_in_a_format_do_not_leak() -> None:
    import resource

    a = sparse(matrix(300, 300, 0.1))
    a @ a
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        a @ a
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; each product takes about 1 MB


SEEN: dict[str, Callable[[SparseTensor], Tensor]] = {
    "sum": lambda a: a.sum(),
    "sums of columns": lambda a: a.sum(0),
    "sums of rows": lambda a: a.sum(1, keepdim=True),
    "mean": lambda a: a.mean(),
    "norm": lambda a: a.norm(),
    "count": lambda a: a.count_nonzero(),
    "extremes": lambda a: torch.amax(a, 1),
    "product": lambda a: a @ torch.ones(5, 2),
    "product of the transposed": lambda a: a.t() @ torch.ones(3, 2),
    "einsum over rows": lambda a: einsum("ij,jk->k", a, torch.ones(5, 2)),
    "einsum of two": lambda a: einsum("ij,ij->", a, a),
}


@pytest.mark.parametrize("name", ["BSR", "BSC", "2:4"])
def test_nothing_sees_what_fills_up_blocks(name: str) -> None:
    dense = two_of_four(torch.arange(1.0, 16).reshape(3, 5))
    a = sparse(dense, name)
    numbers = a.with_values(torch.arange(1.0, a.nnz + 1)).to_dense().long()
    outside = torch.ones(a.nnz).index_fill(0, numbers[numbers > 0] - 1, 0).bool()
    a = a.with_values(a.values().flatten().masked_fill(outside, 7))
    for what, function in SEEN.items():
        expected = function(dense) if "einsum" not in what else function(sparse(dense))  # type: ignore[arg-type]
        torch.testing.assert_close(function(a), expected, msg=lambda text, what=what: f"{what}: {text}")


def test_slices_from_the_end() -> None:
    dense = matrix(4, 5)
    torch.testing.assert_close(sparse(dense).narrow(-1, -2, 2).to_dense(), dense.narrow(-1, -2, 2))
