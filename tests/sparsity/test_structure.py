"""What is refused when a SparseTensor is made, and what the message says."""

import pytest
import torch

import gossamer
from gossamer import Format, FormatError, SparseTensor

GOOD = {"positions": torch.tensor([0, 2, 2, 3]), "coordinates": torch.tensor([0, 2, 1]), "values": torch.ones(3)}


def csr(shape: tuple[int, int] = (3, 3), format: Format = Format.CSR, **changed: torch.Tensor) -> SparseTensor:
    return SparseTensor.from_parts(format, shape, **{**GOOD, **changed})


def test_what_is_well_formed_is_taken_without_a_copy() -> None:
    a = csr()
    assert a.positions(1).data_ptr() == GOOD["positions"].data_ptr()
    assert a.coordinates(1).data_ptr() == GOOD["coordinates"].data_ptr()
    assert a.values().data_ptr() == GOOD["values"].data_ptr()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": torch.tensor([0, 2, 3])}, r"positions of 'd1 : compressed' must be 4 numbers, got \[3\]"),
        ({"positions": torch.tensor([1, 2, 2, 3])}, r"start at 1, must start at 0"),
        ({"positions": torch.tensor([0, 2, 1, 3])}, r"fall from 2 to 1 at 2"),
        ({"positions": torch.tensor([0, 2, 2, 4])}, r"end at 4, but there are 3 coordinates"),
        ({"coordinates": torch.tensor([0, 3, 1])}, r"must be in \[0, 3\), number 1 is 3"),
        ({"coordinates": torch.tensor([0, -1, 1])}, r"must be in \[0, 3\), number 1 is -1"),
        ({"coordinates": torch.tensor([2, 0, 1])}, r"not in order: entry 0 is at \[2\], entry 1 at \[0\]; sort them"),
        ({"coordinates": torch.tensor([2, 2, 1])}, r"entries 0 and 1 of .* have the same coordinate 2: sum duplicates first"),
        ({"coordinates": torch.tensor([[0, 2, 1]])}, r"coordinates of 'd1 : compressed' must be 3 numbers, got \[1, 3\]"),
        (
            {"coordinates": torch.tensor([0.0, 2.0, 1.0])},
            r"coordinates must be of one type, int32 or int64 .*, got torch.float32",
        ),
        ({"values": torch.ones(2)}, r"CSR of shape \(3, 3\) stores 3 values here, got 2"),
        ({"shape": (3, 2)}, r"must be in \[0, 2\), number 1 is 2"),
        ({"shape": (3, 3, 3)}, r"CSR has 2 dimensions, the shape \(3, 3, 3\) has 3"),
        ({"shape": (3, -1)}, r"has a negative size"),
        ({"shape": (3, 1 << 62)}, r"more places than 64 bits can number"),
    ],
)
def test_a_csr_matrix_that_is_not_one(changed: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        csr(**changed)


def test_the_ends_of_rows_need_no_order() -> None:
    a = csr(positions=torch.tensor([0, 1, 2, 3]), coordinates=torch.tensor([2, 1, 0]))
    assert torch.equal(a.to_dense(), torch.eye(3).flip(0))


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([0, 0, 1], [2, 1, 0], r"not in order: entry 0 is at \[0, 2\], entry 1 at \[0, 1\]"),
        ([1, 0, 1], [0, 1, 1], r"not in order: entry 0 is at \[1, 0\], entry 1 at \[0, 1\]"),
        ([0, 0, 1], [1, 1, 0], r"entries 0 and 1 of 'd1 : singleton\(soa\)' have the same coordinate 1"),
        ([0, 0, 1], [1, 2], r"coordinates of 'd1 : singleton\(soa\)' must be 3 numbers, got \[2\]"),
        ([0, 0, 3], [1, 2, 0], r"'d0 : compressed\(nonunique\)' must be in \[0, 3\), number 2 is 3"),
    ],
)
def test_coordinates_that_are_not_coo(rows: list[int], columns: list[int], message: str) -> None:
    at = [torch.tensor(rows), torch.tensor(columns)]
    with pytest.raises(FormatError, match=message):
        SparseTensor.from_parts(Format.COO, (3, 3), torch.tensor([0, 3]), at, torch.ones(3))


def test_groups_that_are_not_n_of_m() -> None:
    def make(crd: list[int]) -> SparseTensor:
        return SparseTensor.from_parts(Format.nm(2, 4), (1, 4), [], torch.tensor(crd), torch.ones(2))

    assert make([1, 3]).to_dense().tolist() == [[0, 1, 0, 1]]
    with pytest.raises(FormatError, match=r"not in order"):
        make([3, 1])
    with pytest.raises(FormatError, match=r"must be in \[0, 4\), number 1 is 4"):
        make([0, 4])


def test_a_gap_between_loose_rows() -> None:
    format = Format.parse("#sparse_tensor.encoding<{map = (i, j) -> (i : dense, j : loose_compressed)}>")
    good = SparseTensor.from_parts(format, (2, 3), torch.tensor([0, 1, 1, 3]), torch.tensor([2, 0, 1]), torch.ones(3))
    assert good.to_dense().tolist() == [[0, 0, 1], [1, 1, 0]]
    with pytest.raises(FormatError, match=r"leave a gap after entry 1: close it"):
        SparseTensor.from_parts(format, (2, 3), torch.tensor([0, 1, 2, 3]), torch.tensor([2, 0, 1]), torch.ones(3))


def test_what_does_not_fit_its_width() -> None:
    narrow = Format.CSR.with_widths(8, 8)
    with pytest.raises(FormatError, match=r"coordinates up to 256 do not fit 8 bits, use format.with_widths\(8, 16\)"):
        SparseTensor.from_dense(torch.ones(1, 257), narrow)
    with pytest.raises(FormatError, match=r"positions up to 256 do not fit 8 bits, use format.with_widths\(16, 8\)"):
        SparseTensor.from_dense(torch.ones(2, 128), narrow)
    whole = SparseTensor.from_dense(torch.ones(1, 255), narrow)  # 8 bits hold unsigned numbers
    assert torch.equal(whole.to_dense(), torch.ones(1, 255))


def test_results_of_other_shapes_have_wider_coordinates_where_they_need_them() -> None:
    dense = torch.arange(600.0).view(20, 30) * (torch.arange(600) % 3 == 0).view(20, 30)
    a, mask = SparseTensor.from_dense(dense, Format.CSR.with_widths(8, 8)), dense > 300
    assert torch.equal(a.masked_select(mask).to_dense(), dense.masked_select(mask))
    assert torch.equal(a.flatten().to_dense(), dense.flatten())
    assert a[1:].format == a.format
    assert torch.equal(a.crow_indices(), dense.to_sparse_csr().crow_indices())  # 8 bits are unsigned
    large = SparseTensor.from_parts(
        Format.COO, (70_000, 70_000), torch.tensor([0, 1]).int(), [torch.tensor([69_999]).int()] * 2, [1.0]
    )
    assert large.flatten().coordinates(0).tolist() == [70_000**2 - 1]


def test_widths_follow_the_integers_unless_the_format_names_them() -> None:
    assert csr(**{k: GOOD[k].int() for k in ("positions", "coordinates")}).format == Format.CSR.with_widths(32, 32)
    with pytest.raises(FormatError, match=r"coordinates of 'd1 : compressed' are torch.int64, the format says torch.int32"):
        csr(format=Format.CSR.with_widths(0, 32))


def test_how_many_arrays_a_format_has() -> None:
    with pytest.raises(FormatError, match=r"COO has 2 arrays of coordinates, got 1"):
        csr(format=Format.COO)


def test_a_batch_is_a_dense_level() -> None:
    format = Format.parse("#sparse_tensor.encoding<{map = (b, i, j) -> (b : batch, i : dense, j : compressed)}>")
    with pytest.raises(FormatError, match=r"write a batch as a dense level, `d0 : dense`"):
        SparseTensor.from_dense(torch.ones(2, 3, 3), format)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("i : dense, j : compressed(nonordered)", r"entries of a SparseTensor are in order; leave out `nonordered`"),
        ("i : compressed(nonunique, nonordered), j : singleton(soa)", r"are in order; leave out `nonordered`"),
        ("i : compressed(nonunique), j : singleton(nonunique, soa)", r"'d1 : .*': each entry of a SparseTensor occurs once"),
        ("i : compressed(nonunique), j : compressed", r"'d0 : .*': each entry of a SparseTensor occurs once, so only a level"),
    ],
)
def test_entries_are_in_order_and_occur_once(levels: str, message: str) -> None:
    format = Format.parse(f"#sparse_tensor.encoding<{{map = (i, j) -> ({levels})}}>")
    kinds, ends, at = [kind for _, kind in format.components()], torch.tensor([0, 1]), torch.tensor([0])
    for check in (True, False):
        with pytest.raises(FormatError, match=message):
            SparseTensor.from_parts(
                format, (1, 1), [ends] * kinds.count("positions"), [at] * kinds.count("coordinates"), torch.ones(1), check=check
            )
    with pytest.raises(FormatError, match=message):
        SparseTensor.from_dense(torch.eye(2), format)
    with pytest.raises(FormatError, match=message):
        SparseTensor.from_dense(torch.eye(2)).to_format(format)
    with pytest.raises(FormatError, match=message):
        gossamer.register_format("Any order", format)


def test_a_promise_is_not_checked() -> None:
    unsorted = {"coordinates": torch.tensor([2, 0, 1])}
    assert SparseTensor.from_parts(Format.CSR, (3, 3), **{**GOOD, **unsorted}, check=False).nnz == 3
