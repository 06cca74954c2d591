"""The kernel cache on disk: what comes back, and what is refused."""

import multiprocessing
import os
from pathlib import Path

import pytest

from gossamer.runtime import disk_cache
from gossamer.runtime.disk_cache import Entry

ENTRY = Entry(b"\x7fELF\n\x00code", {"words": [[0], []], "workspace": 64})


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_entry_comes_back_as_it_was() -> None:
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") == ENTRY


def test_an_unknown_key_is_none() -> None:
    assert disk_cache.read("unknown") is None


@pytest.mark.parametrize("damaged", [b"", b"{}\n", b"not json\ncode", b"[1]\nx", None])
def test_a_damaged_entry_is_ignored(directory: Path, damaged: bytes | None) -> None:
    disk_cache.write("k", ENTRY)
    path = directory / "k.o"
    path.write_bytes(path.read_bytes()[:-1] if damaged is None else damaged)
    assert disk_cache.read("k") is None


def test_a_directory_that_others_may_write_is_not_used(directory: Path) -> None:
    disk_cache.write("k", ENTRY)
    directory.chmod(0o777)
    assert disk_cache.read("k") is None
    disk_cache.write("other", ENTRY)
    assert not (directory / "other.o").exists()


def test_an_empty_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.write("k", ENTRY)
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    assert disk_cache.read("k") is None


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") is None


def _write_many(directory: str) -> None:
    os.environ["GOSSAMER_CACHE_DIR"] = directory
    for _ in range(50):
        disk_cache.write("k", ENTRY)


def test_several_processes_write_the_same_entry(directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_many, args=(str(directory),)) for _ in range(2)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert disk_cache.read("k") in (None, ENTRY)
    assert all(process.exitcode == 0 for process in processes)
    assert disk_cache.read("k") == ENTRY
    assert [p.name for p in directory.iterdir()] == ["k.o"]
