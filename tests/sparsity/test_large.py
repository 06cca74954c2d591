"""Sizes that 32 bits do not hold, and structure that is checked in parts: nothing large is allocated."""

from __future__ import annotations

import pytest
import torch

from gossamer import Format, FormatError, SparseTensor
from gossamer.sparsity.arrays import structure

CSR32 = Format.CSR.with_widths(32, 32)


@pytest.mark.parametrize(("width", "most"), [(8, 1 << 8), (16, 1 << 16), (32, 1 << 31)])
def test_sizes_beyond_the_width_of_coordinates_are_refused(width: int, most: int) -> None:
    format = Format.CSR.with_widths(64, width)
    assert structure.check_sizes(format, (2, most)) == (2, most)
    with pytest.raises(FormatError, match=rf"coordinates up to {most} do not fit {width} bits, use format.with_widths\(64, "):
        structure.check_sizes(format, (2, most + 1))


def test_as_many_entries_as_32_bits_do_not_count_are_refused() -> None:
    structure.check_count(CSR32, CSR32.levels[1], 2**31 - 1)
    with pytest.raises(FormatError, match=r"positions up to 2147483648 do not fit 32 bits, use format.with_widths\(64, 32\)"):
        structure.check_count(CSR32, CSR32.levels[1], 2**31)
    structure.check_count(Format.CSR, Format.CSR.levels[1], 2**31)


@pytest.mark.parametrize("format", [Format.coo(2), Format.DCSR], ids=lambda format: format.name)
def test_coordinates_beyond_32_bits_are_handled(format: Format) -> None:
    row, column = torch.tensor([5, 2**29 - 1, 5]), torch.tensor([2**32, 7, 2**31])
    a = SparseTensor.from_edge_index(torch.stack([column, row]), torch.tensor([1.0, 2.0, 3.0]), (2**29, 2**32 + 1), format)
    assert a.to_torch().coalesce().indices().tolist() == [[5, 5, 2**29 - 1], [2**31, 2**32, 7]]
    assert a.values().tolist() == [3.0, 1.0, 2.0]
    assert a.sum() == 6.0


def test_more_places_than_64_bits_number_are_refused() -> None:
    with pytest.raises(FormatError, match="more places than 64 bits can number"):
        SparseTensor.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), size=2**32)


@pytest.mark.parametrize("at", [0, 6, 7, 8, 14, 18])
def test_order_is_checked_across_the_parts(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_AT_ONCE", 7)
    positions = torch.tensor([0, 0, 9, 9, 20])
    columns = torch.cat([torch.arange(9), torch.arange(11)])
    values = torch.ones(20)
    make = lambda crd: SparseTensor.from_parts(Format.CSR, (4, 20), positions, crd, values)
    assert make(columns).nnz == 20
    if at != 8:  # there another row begins
        wrong = columns.clone()
        wrong[at], wrong[at + 1] = columns[at + 1], columns[at]
        place = f"entry {at} is at .{int(wrong[at])}., entry {at + 1} at .{int(columns[at])}."
        with pytest.raises(FormatError, match=f"not in order: {place}"):
            make(wrong)
        wrong[at] = wrong[at + 1]
        with pytest.raises(FormatError, match=f"entries {at} and {at + 1} of .* have the same coordinate {int(columns[at])}"):
            make(wrong)
