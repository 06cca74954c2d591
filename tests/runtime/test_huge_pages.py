"""Large arrays move to huge pages, small ones stay where they are, and their numbers stay the same."""

import sys

import pytest
import torch

from gossamer.dialects.format import Format
from gossamer.runtime.memory.huge_pages import placed
from gossamer.runtime.packing import pack

MEGABYTE = 1 << 20


def test_small_arrays_stay_where_they_are() -> None:
    arrays = (torch.arange(100), torch.rand(1000))
    assert placed(arrays) is arrays


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other ways to get huge pages")
def test_large_arrays_lie_together_from_a_huge_page_on() -> None:
    arrays = (torch.arange(3, dtype=torch.int32), torch.rand(MEGABYTE), torch.zeros(0), torch.rand(5, dtype=torch.float64))
    moved = placed(arrays)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(arrays, moved, strict=True))
    assert moved[0].data_ptr() % (2 * MEGABYTE) == 0
    assert all(array.data_ptr() % 64 == 0 for array in moved)
    assert moved[-1].data_ptr() - moved[0].data_ptr() < 5 * MEGABYTE


def test_a_large_weight_is_renewed_where_it_lies() -> None:
    dense = torch.rand(900, 1000)
    packed = pack(dense, Format.CSR)
    address = packed.values.data_ptr()
    assert packed.matches(dense)
    assert packed.refresh(2 * dense)
    assert packed.matches(2 * dense)
    assert packed.values.data_ptr() == address
