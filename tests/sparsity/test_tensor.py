"""SparseTensor: how it is made and converted, and that it reads as a torch.Tensor."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import Format, FormatError, SparseTensor
from gossamer.sparsity.arrays.structure import check
from tests.sparsity.made import FORMATS, matrices, matrix, sparse

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
QUICK = settings(max_examples=40, derandomize=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# From and to dense tensors and other formats


@QUICK
@given(dense=matrices(), name=st.sampled_from(list(FORMATS)), other=st.sampled_from(list(FORMATS)))
def test_any_matrix_in_any_format_and_from_it_to_any_other(dense: Tensor, name: str, other: str) -> None:
    a = sparse(dense, name)
    check(a.format, a.shape, a.components)
    torch.testing.assert_close(a.to_dense(), dense)
    b = a.to_format(FORMATS[other])
    check(b.format, b.shape, b.components)
    assert b.format == FORMATS[other]
    torch.testing.assert_close(b.to_dense(), dense)


@QUICK
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), coo=st.booleans())
def test_tensors_of_any_rank(shape: list[int], coo: bool) -> None:
    dense = matrix(1, int(np.prod(shape))).view(shape)
    a = SparseTensor.from_dense(dense, Format.coo(len(shape)) if coo else Format.csf(len(shape)))
    torch.testing.assert_close(a.to_dense(), dense)
    torch.testing.assert_close(a.to_torch().to_dense(), dense)


@pytest.mark.parametrize("name", FORMATS)
def test_the_arrays_are_those_that_packing_makes(name: str) -> None:
    from gossamer.runtime.packing import pack

    dense = matrix(7, 12)
    for ours, packed in zip(sparse(dense, name).components, pack(dense, FORMATS[name]).components, strict=True):
        assert torch.equal(ours, packed)


def test_names_of_formats_are_read_in_any_case() -> None:
    a = SparseTensor.from_dense(torch.eye(3), "csr")
    assert a.format == Format.CSR
    assert a.to_format("Coo").format == Format.COO


def test_tensors_without_elements() -> None:
    for name in ("COO", "CSR", "DCSR", "BSR"):
        for shape in ((0, 4), (4, 0), (0, 0)):
            a = sparse(torch.zeros(shape), name)
            assert a.nnz == 0
            assert a.to_dense().shape == shape
            assert (a @ torch.ones(shape[1], 3)).shape == (shape[0], 3)


def test_zeros_that_were_given_stay_and_those_that_fill_blocks_go() -> None:
    a = SparseTensor.from_parts(Format.CSR, (2, 2), torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([0.0, 5.0]))
    assert a.to_format(Format.COO).nnz == 2
    assert sparse(torch.eye(4), "BSR").to_format(Format.CSR).nnz == 4


def test_more_than_n_of_m() -> None:
    with pytest.raises(FormatError, match=r"2:4 stores 2 of every 4 elements, but group 1 has 3 nonzeros: prune to 2:4"):
        SparseTensor.from_dense(torch.tensor([[1.0, 1, 0, 0, 1, 1, 1, 0]]), Format.nm(2, 4))


def test_a_unique_level_that_would_need_a_coordinate_twice() -> None:
    format = Format.parse("#sparse_tensor.encoding<{map = (i, j) -> (i : compressed, j : singleton)}>")
    with pytest.raises(FormatError, match=r"'d0 : compressed' needs the coordinate 1 twice: make the level nonunique"):
        SparseTensor.from_dense(torch.tensor([[1.0, 0], [1, 1]]), format)


# torch.sparse


LAYOUTS = {
    "COO": lambda d: d.to_sparse(),
    "CSR": lambda d: d.to_sparse_csr(),
    "CSC": lambda d: d.to_sparse_csc(),
    "BSR(2, 3)": lambda d: d.to_sparse_bsr((2, 3)),
    "BSC": lambda d: d.to_sparse_bsc((2, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dense", [matrix(4, 6), torch.zeros(4, 6), torch.ones(2, 3)], ids=["some", "none", "full"])
def test_from_torch_and_back(layout: str, dense: Tensor) -> None:
    theirs = LAYOUTS[layout](dense)
    a = SparseTensor.from_torch(theirs)
    torch.testing.assert_close(a.to_dense(), dense)
    back = a.to_torch()
    torch.testing.assert_close(back.to_dense(), dense)
    if layout != "BSC":
        assert a.format.name == layout
        assert back.layout == theirs.layout


def test_from_torch_shares_memory() -> None:
    theirs = matrix(4, 6).to_sparse_csr()
    a = SparseTensor.from_torch(theirs)
    assert a.values().data_ptr() == theirs.values().data_ptr()
    assert a.coordinates(1).data_ptr() == theirs.col_indices().data_ptr()
    assert a.to_torch().values().data_ptr() == theirs.values().data_ptr()


def test_int32_indices_stay() -> None:
    dense = matrix(4, 6)
    csr = dense.to_sparse_csr()
    theirs = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), (4, 6))
    a = SparseTensor.from_torch(theirs)
    assert a.format == Format.CSR.with_widths(32, 32)
    assert a.to_torch().col_indices().dtype == torch.int32
    torch.testing.assert_close(a @ torch.ones(6), dense.sum(1))


def test_duplicates_of_torch_are_summed() -> None:
    theirs = torch.sparse_coo_tensor([[1, 0, 1], [2, 0, 2]], [1.0, 2.0, 3.0], (2, 3))
    assert SparseTensor.from_torch(theirs).to_dense().tolist() == [[2, 0, 0], [0, 0, 4]]


@pytest.mark.parametrize("to", ["to_sparse_csr", "to_sparse_csc"])
def test_batches_and_dense_dimensions_of_torch(to: str) -> None:
    dense = torch.stack([matrix(4, 6, 0.5)] * 2) * torch.arange(1.0, 3)[:, None, None]
    batched = getattr(dense, to)()
    torch.testing.assert_close(SparseTensor.from_torch(batched).to_dense(), dense)
    hybrid = getattr(dense.permute(1, 2, 0).contiguous(), to)(dense_dim=1)
    torch.testing.assert_close(SparseTensor.from_torch(hybrid).to_dense(), dense.permute(1, 2, 0))
    coo = dense.permute(1, 2, 0).to_sparse(2)
    a = SparseTensor.from_torch(coo)
    torch.testing.assert_close(a.to_dense(), dense.permute(1, 2, 0))
    assert a.values().shape == coo.values().shape and a.indices().equal(coo.indices()) and a._nnz() == coo._nnz()
    blocks = torch.ones(4, 6).to_sparse_bsr((2, 3))
    assert SparseTensor.from_torch(blocks)._nnz() == blocks._nnz()
    back = a.to_torch()
    assert back.dense_dim() == 1 and back.to_dense().equal(a.to_dense())
    rows = torch.eye(4, 3).to_sparse(1)
    assert (SparseTensor.from_torch(rows).to_scipy().toarray() == np.eye(4, 3)).all()


def test_bad_indices_of_torch_are_found() -> None:
    bad = torch.sparse_csr_tensor(torch.tensor([0, 2]), torch.tensor([5, 0]), torch.ones(2), (1, 3), check_invariants=False)
    with pytest.raises(FormatError, match=r"must be in \[0, 3\), number 0 is 5"):
        SparseTensor.from_torch(bad)


def test_a_strided_tensor_becomes_csr() -> None:
    assert SparseTensor.from_torch(matrix(4, 6)).format == Format.CSR


# SciPy


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "lil", "dok", "dia"])
def test_from_scipy_and_back(kind: str) -> None:
    dense = matrix(4, 6)
    a = SparseTensor.from_scipy(getattr(scipy.sparse, f"{kind}_array")(dense.numpy()))
    torch.testing.assert_close(a.to_dense(), dense)
    back = a.to_scipy()
    np.testing.assert_array_equal(back.toarray(), dense.numpy())
    assert back.format == (kind if kind in ("csr", "csc", "coo") else back.format)


@pytest.mark.parametrize("kind", ["csr", "coo"])
def test_vectors_of_scipy(kind: str) -> None:
    theirs = getattr(scipy.sparse, f"{kind}_array")(np.array([1.0, 0.0, 2.0]))  # a matrix before SciPy 1.15
    a = SparseTensor.from_scipy(theirs)
    np.testing.assert_array_equal(a.to_dense().numpy(), theirs.toarray())
    np.testing.assert_array_equal(a.to_scipy().toarray(), theirs.toarray())


def test_scipy_with_unsorted_columns_and_duplicates() -> None:
    theirs = scipy.sparse.csr_array((np.array([1.0, 2.0]), np.array([2, 0]), np.array([0, 2])), shape=(1, 3))
    assert SparseTensor.from_scipy(theirs).to_dense().tolist() == [[2, 0, 1]]
    twice = scipy.sparse.csr_array((np.array([1.0, 2.0]), np.array([1, 1]), np.array([0, 2])), shape=(1, 3))
    with pytest.raises(FormatError, match="SciPy's sum_duplicates"):
        SparseTensor.from_scipy(twice)


def test_from_scipy_shares_memory_of_structure() -> None:
    theirs = scipy.sparse.csr_array(matrix(4, 6).numpy())
    _, columns, values = SparseTensor.from_scipy(theirs).components
    assert columns.data_ptr() == theirs.indices.ctypes.data
    assert values.data_ptr() != theirs.data.ctypes.data and values.tolist() == theirs.data.tolist()


def test_what_is_not_scipy() -> None:
    with pytest.raises(FormatError, match=r"takes a SciPy sparse array or matrix, got ndarray"):
        SparseTensor.from_scipy(np.eye(2))


# Graphs


def test_rows_of_an_adjacency_are_targets() -> None:
    edge_index = torch.tensor([[0, 0, 2, 0], [1, 2, 1, 1]])
    a = SparseTensor.from_edge_index(edge_index, torch.tensor([1.0, 2, 3, 4]), 3)
    assert a.to_dense().tolist() == [[0, 0, 0], [5, 0, 3], [2, 0, 0]]
    assert SparseTensor.from_edge_index(edge_index).sum().item() == 4
    assert SparseTensor.from_edge_index(edge_index, size=(4, 5), format=Format.COO).shape == (4, 5)


def test_edges_that_do_not_fit() -> None:
    edge_index = torch.tensor([[0, 4], [1, 2]])
    with pytest.raises(FormatError, match=r"source of edge 1 is node 4, must be in \[0, 3\): pass a larger size"):
        SparseTensor.from_edge_index(edge_index, size=3)
    with pytest.raises(FormatError, match=r"weight must be \[2\], one an edge, got \[3\]"):
        SparseTensor.from_edge_index(edge_index, torch.ones(3))
    with pytest.raises(FormatError, match=r"edge_index must be integers \[2, edges\], got torch.int64 \[3, 2\]"):
        SparseTensor.from_edge_index(torch.zeros(3, 2, dtype=torch.long))


# It reads as a tensor


def test_repr() -> None:
    a = sparse(torch.eye(3))
    assert repr(a) == "SparseTensor(CSR, shape=(3, 3), nnz=3)"
    assert repr(a.double()) == "SparseTensor(CSR, shape=(3, 3), nnz=3, dtype=torch.float64)"
    assert repr(a.requires_grad_()) == "SparseTensor(CSR, shape=(3, 3), nnz=3, requires_grad=True)"
    assert "grad_fn=<_WrapBackward>" in repr(a * 2)


def test_attributes() -> None:
    a = sparse(matrix(3, 5), "COO")
    assert (a.shape, a.dtype, a.device.type, a.dim(), len(a)) == ((3, 5), torch.float32, "cpu", 2, 3)
    assert a.nnz == a.values().numel() == a.coordinates(0).numel() == a.coordinates(1).numel()
    with pytest.raises(FormatError, match=r"level 1 of COO has no positions, only 0 has"):
        a.positions(1)


def test_values_have_the_shape_of_a_block() -> None:
    assert sparse(torch.eye(6), "BSR").values().shape[1:] == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_to_another_dtype(dtype: torch.dtype) -> None:
    dense = matrix(3, 5)
    a = sparse(dense).to(dtype)
    assert a.dtype == dtype
    torch.testing.assert_close(a.to_dense(), dense.to(dtype))


def saved(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", FORMATS)
def test_save_load_and_copy(name: str) -> None:
    dense = matrix(4, 8)
    a = sparse(dense, name)
    for again in (saved(a), copy.deepcopy(a), a.clone(), a.detach()):
        assert again.format == a.format
        torch.testing.assert_close(again.to_dense(), dense)
    changed = a.clone().mul_(2)
    torch.testing.assert_close(changed.to_dense(), 2 * dense)
    torch.testing.assert_close(a.to_dense(), dense)


def test_a_deep_copy_has_the_gradient_and_attributes_and_shares_what_was_shared() -> None:
    a = sparse(matrix(4, 8)).requires_grad_()
    (a @ torch.ones(8, 2)).sum().backward()
    a.tag = ["mine"]  # type: ignore[attr-defined]
    twin, alias = copy.deepcopy((a, a.detach()))
    assert torch.equal(twin.grad.to_dense(), a.grad.to_dense()) and twin.grad is not a.grad
    assert twin.tag == a.tag and twin.tag is not a.tag  # type: ignore[attr-defined]
    with torch.no_grad():
        twin.mul_(2)
    assert torch.equal(alias.to_dense(), 2 * a.detach().to_dense())
    with pytest.raises(RuntimeError, match="copy what detach"):
        copy.deepcopy(a * 2)


@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
def test_a_single_number_converts_to_those_of_python() -> None:
    one = sparse(torch.tensor([[3]]))
    assert (complex(one), float(one), int(one), list(range(one)), [4, 5, 6, 7][one]) == (3 + 0j, 3.0, 3, [0, 1, 2], 7)


def test_a_file_with_bad_indices_is_refused() -> None:
    bad = SparseTensor.from_parts(Format.CSR, (1, 3), torch.tensor([0, 1]), torch.tensor([7]), torch.ones(1), check=False)
    with pytest.raises(FormatError, match=r"must be in \[0, 3\), number 0 is 7"):
        saved(bad)


def test_parameters_and_state_dicts() -> None:
    dense = matrix(4, 6)
    layer = nn.Linear(6, 4)
    layer.weight = nn.Parameter(sparse(dense))
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, SparseTensor)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    other = nn.Linear(6, 4)
    other.weight = nn.Parameter(sparse(2 * dense))
    other.load_state_dict(saved(layer.state_dict()))
    torch.testing.assert_close(other.weight.detach().to_dense(), dense)
    again = copy.deepcopy(layer)
    assert isinstance(again.weight, nn.Parameter)
    assert again.weight.requires_grad
    assert isinstance(saved(layer.weight), nn.Parameter)


def test_values_of_another_pattern_load_with_it() -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    layer.weight, other.weight = nn.Parameter(sparse(torch.eye(4))), nn.Parameter(sparse(torch.ones(4, 4)))
    layer(torch.ones(2, 4))
    layer.load_state_dict(other.state_dict())
    assert layer.weight is not other.weight
    torch.testing.assert_close(layer(torch.ones(2, 4)), other(torch.ones(2, 4)))


@pytest.mark.parametrize("what", [torch.eye(3), torch.eye(3).to_sparse_csr(), np.eye(3), Format.CSR], ids=str)
def test_the_bare_constructor_says_which_to_use(what: Any) -> None:
    with pytest.raises(FormatError, match=r"puts arrays together, got \w+: use SparseTensor\.from_torch, from_scipy"):
        SparseTensor(what)


def test_truths_times_a_truth_are_truths_whatever_fills_up_blocks() -> None:
    given = torch.rand(7, 5) > 0.8
    given[:, 1:] &= ~given[:, :-1]
    two_of_four = Format.parse(
        "#sparse_tensor.encoding<{map = (i, j) -> (i : dense, j floordiv 4 : dense, j mod 4 : structured[2, 4])}>"
    )
    for format in (two_of_four, Format.bsr(2, 2)):
        result = SparseTensor.from_dense(given, format) * True
        assert result.dtype == torch.bool and torch.equal(result.to_dense(), given)
