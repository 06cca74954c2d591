"""The kernel cache on disk: what comes back, and what is refused."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

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
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") == ENTRY


@pytest.mark.parametrize("part", [b'\\"workspace\\": 64', b"code"])
def test_no_byte_of_an_entry_can_change(directory: Path, part: bytes) -> None:
    disk_cache.write("k", ENTRY)
    path = directory / "k.o"
    changed = path.read_bytes().replace(part, part[:-1] + b"x")
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert disk_cache.read("k") is None


def test_an_entry_under_another_name_is_ignored(directory: Path) -> None:
    disk_cache.write("k", ENTRY)
    (directory / "k.o").rename(directory / "other.o")
    assert disk_cache.read("other") is None


def test_the_entries_that_were_not_used_for_longest_make_room(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["a", "b", "c", "d"]
    for age, key in enumerate(keys):
        disk_cache.write(key, Entry(b"x" * 1000, {}))
        os.utime(directory / f"{key}.o", (1000 + age, 1000 + age))
    assert disk_cache.read("a") is not None, "so it is the last one used"
    (directory / "other.json").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(disk_cache, "_LARGEST", 5000)
    monkeypatch.setattr(disk_cache, "_CHECKED", 0)
    disk_cache.write("e", Entry(b"x" * 1000, {}))
    assert [key for key in [*keys, "e"] if disk_cache.read(key)] == ["a", "d", "e"]
    assert (directory / "other.json").exists()


def test_what_dying_processes_left_behind_is_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_CHECKED", 0)
    disk_cache.write("k", ENTRY)
    (directory / "k.o.old.tmp").touch()
    os.utime(directory / "k.o.old.tmp", (1000, 1000))
    (directory / "k.o.new.tmp").touch()
    disk_cache.write("k", ENTRY)
    assert sorted(p.name for p in directory.iterdir()) == ["k.o", "k.o.new.tmp"]


def test_torchs_portable_cache_takes_entries_along(directory: Path) -> None:
    with CacheArtifactManager.with_fresh_cache():
        disk_cache.write("k", ENTRY)
        disk_cache.write("unused", ENTRY)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    for path in directory.iterdir():
        path.unlink()
    found = torch.compiler.load_cache_artifacts(saved[0])
    assert found is not None and sorted(found.artifacts["gossamer"]) == ["k", "unused"]
    assert disk_cache.read("k") == ENTRY
    with CacheArtifactManager.with_fresh_cache():
        disk_cache.read("k")
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None and saved[1].artifacts["gossamer"] == ["k"], "what was read counts as used"


def test_an_artifact_cannot_leave_the_directory(directory: Path) -> None:
    CacheArtifactFactory.create("gossamer", "../k", b"x").populate_cache()
    assert not (directory.parent / "k.o").exists()


def test_a_directory_that_others_may_write_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk_cache.write("k", ENTRY)
    directory.chmod(0o777)
    assert disk_cache.read("k") is None
    disk_cache.write("other", ENTRY)
    assert not (directory / "other.o").exists()
    assert [r.getMessage() for r in caplog.records if "may be written by others" in r.getMessage()] == [
        f"kernel cache: {directory} may be written by others, it is not used (chmod go-w {directory})"
    ]


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
