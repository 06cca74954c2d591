"""Matrices of entries by rows, and entries of matrices: rows that are whole vectors or not, with few bytes and with many."""

import pytest
import torch

from gossamer.runtime.target import host
from gossamer.sparsity.compiler.spreading import collect, collect_counted, map_of, put, spread
from tests.sparsity.made import team_of


def kept_of(rows: int, columns: int, density: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A mask with a row and a column of nothing, where its rows begin, and the columns of what it keeps."""
    torch.manual_seed(rows + columns)
    kept = torch.rand(rows, columns) < density
    kept[rows // 2, 1:] = kept[:, columns // 2] = False
    return kept, torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)]), kept.nonzero()[:, 1]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_entries_are_spread_and_collected(integers: torch.dtype, dtype: torch.dtype, threads: int) -> None:
    for rows, columns, density in (
        (1, 1, 1.0),
        (5, 3, 0.0),
        (37, 50, 0.3),
        (300, 64, 0.05),
        (2, 1040, 0.5),
        (1100, 1024, 0.05),
    ):
        kept, starts, places = kept_of(rows, columns, density)
        values = torch.randn(int(kept.sum()), dtype=dtype)
        values[:1], values[-1:] = torch.nan, torch.inf
        expected = torch.zeros(rows, columns, dtype=dtype).masked_scatter(kept, values)
        with team_of(threads):
            for _ in range(2):  # in memory that an earlier result has given up
                dense = spread(starts.to(integers), places.to(integers), values, columns)
                torch.testing.assert_close(dense, expected, rtol=0, atol=0, equal_nan=True)
            found = collect(starts.to(integers), places.to(integers), torch.where(kept, dense, torch.nan))
        torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)


def test_a_matrix_without_rows_or_columns() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert spread(torch.zeros(1, dtype=torch.int64), none, torch.zeros(0), 4).shape == (0, 4)
    assert spread(torch.zeros(3, dtype=torch.int64), none, torch.zeros(0), 0).shape == (2, 0)
    assert collect(torch.zeros(3, dtype=torch.int64), none, torch.zeros(2, 4)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entries_of_narrow_floats_are_collected(dtype: torch.dtype) -> None:
    kept, starts, places = kept_of(9, 70, 0.4)
    dense = torch.randn(9, 70).to(dtype)
    assert torch.equal(collect(starts, places, dense), dense[kept])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_are_put_into_a_matrix_and_what_is_beside_them_is_counted(dtype: torch.dtype, threads: int) -> None:
    for rows, columns, density in ((1, 1, 1.0), (5, 3, 0.0), (37, 50, 0.3), (2, 1040, 0.5), (1100, 1024, 0.05)):
        kept, starts, places = kept_of(rows, columns, density)
        dense, values = torch.randn(rows, columns, dtype=dtype), torch.randn(int(kept.sum()), dtype=dtype)
        values[1::3] = 0
        expected, version = dense.masked_scatter(kept, values), dense._version
        with team_of(threads):
            put(starts, places.int(), values, dense)
            assert torch.equal(dense, expected) and dense._version > version
            dense[~kept], others = 0, min(7, int((~kept).sum()))
            dense.view(-1)[(~kept).flatten().nonzero()[:others]] = torch.nan
            found, beside = collect_counted(starts, places.int(), dense)
        assert torch.equal(found, values) and beside == others


@pytest.mark.skipif(host().vector_bits < 512, reason="maps are for AVX-512")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_map_tells_the_same_entries(dtype: torch.dtype, threads: int) -> None:
    for rows, columns, density in ((5, 16, 0.5), (37, 48, 0.3), (2, 1040, 0.5), (1100, 1024, 0.05), (3, 32, 1.0)):
        kept, starts, places = kept_of(rows, columns, density)
        entries, map = (starts, places.int()), map_of(kept)
        assert map is not None
        values, given = torch.randn(int(kept.sum()), dtype=dtype), torch.randn(rows, columns, dtype=dtype)
        values[:1], values[-1:] = torch.nan, torch.inf
        with team_of(threads):
            for _ in range(2):  # in memory that an earlier result has given up
                dense = spread(*entries, values, columns, map)
                torch.testing.assert_close(dense, spread(*entries, values, columns), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(collect(*entries, given, map), given[kept])
            found, others = collect_counted(*entries, given, map)
            assert torch.equal(found, given[kept]) and others == int((given[~kept] != 0).sum())
            expected = given.masked_scatter(kept, values)
            put(*entries, values, given, map)
        torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_mapped_where_coordinates_are_as_fast() -> None:
    kept, _, _ = kept_of(300, 64, 0.001)
    assert map_of(kept) is None and map_of(torch.ones(4, 40, dtype=torch.bool)) is None
