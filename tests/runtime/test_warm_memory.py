"""Memory for results: on huge pages where the system has them."""

from pathlib import Path

import pytest
import torch

from gossamer.backend.run import few_rows
from gossamer.runtime.compiled_kernel import _Workspace
from gossamer.runtime.memory.huge_pages import large_empty
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


def test_memory_for_kernels_is_that_of_the_cpu_whatever_the_default_device_is() -> None:
    workspace = _Workspace()
    with torch.device("meta"):
        workspace.grow(100)
        made = [empty((2, 3), torch.float32), large_empty((0, 3)), *few_rows._others(2, 3)]
    assert workspace.address and {each.device.type for each in made} == {"cpu"}
