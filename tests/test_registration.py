"""Whichever is imported first, torch or a part of Gossamer: torch knows afterwards what it needs to read Gossamer's files."""

import subprocess
import sys

import pytest

FIRST = [
    "import torch, gossamer",
    "import gossamer; gossamer.SparseTensor",
    "import gossamer.nn",
    "import gossamer.torchsparse",
    "from gossamer import prune",
    "import gossamer.runtime.cache_files",
    "import gossamer.dialects.format, torch",
]


@pytest.mark.parametrize("first", FIRST)
def test_torch_is_told_at_any_first_import(first: str) -> None:
    told = "import sys; assert {'gossamer.runtime.disk_cache', 'gossamer.runtime.records'} <= sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", f"{first}\n{told}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
