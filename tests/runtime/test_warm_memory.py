"""Memory for results: on huge pages where the system has them."""

from pathlib import Path

import pytest
import torch

from gossamer.runtime.memory.warm_memory import empty

_SMAPS = Path("/proc/self/smaps")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_large_results_ask_for_huge_pages() -> None:
    large = empty([1024, 1023], torch.float32)
    at, asked = large.data_ptr(), None
    for line in _SMAPS.read_text().splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= at < end
        elif first == "VmFlags:" and inside:
            asked = "hg" in others
    assert asked
