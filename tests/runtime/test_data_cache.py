"""The size of the first-level data cache, read from a copy of what Linux shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.runtime import data_cache


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(data_cache, "_CACHES", tmp_path)
    data_cache.first_level_bytes.cache_clear()
    yield tmp_path
    data_cache.first_level_bytes.cache_clear()


def describe(directory: Path, level: str, kind: str, size: str) -> None:
    directory.mkdir()
    for name, text in (("level", level), ("type", kind), ("size", size)):
        (directory / name).write_text(text + "\n")


def test_neither_instructions_nor_other_levels_count(caches: Path) -> None:
    describe(caches / "index0", "1", "Instruction", "64K")
    describe(caches / "index1", "2", "Unified", "1024K")
    describe(caches / "index2", "1", "Data", "48K")
    assert data_cache.first_level_bytes() == 48 << 10


@pytest.mark.parametrize("size", ["", "large"])
def test_what_cannot_be_read_counts_as_usual(caches: Path, size: str) -> None:
    describe(caches / "index0", "1", "Data", size)
    assert data_cache.first_level_bytes() == 32 << 10


def test_where_nothing_is_described_it_is_as_usual() -> None:
    assert data_cache.first_level_bytes() == 32 << 10
