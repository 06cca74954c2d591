"""The kernel cache on disk: what comes back, and what is refused."""

import multiprocessing
import os
import resource
import stat
import time
from collections.abc import Callable
from itertools import chain
from multiprocessing.process import BaseProcess as Process
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

from gossamer.runtime import disk_cache
from gossamer.runtime.disk_cache import Entry
from tests.runtime.damage import CONTENT, IN_PLACE, oversized, put

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


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_not_this_users_file_is_neither_read_nor_waited_for(directory: Path, kind: str) -> None:
    disk_cache.write("k", ENTRY)
    IN_PLACE[kind](directory / "k.o")
    assert disk_cache.read("k") is None
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") == (None if kind == "directory" else ENTRY), "what is written takes its place"
    assert not [*directory.glob("*.tmp")]


@pytest.mark.parametrize("content", CONTENT.values(), ids=CONTENT)
def test_what_is_no_entry_is_ignored(directory: Path, content: bytes) -> None:
    disk_cache.write("k", ENTRY)
    put(directory / "k.o", content)
    assert disk_cache.read("k") is None
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") == ENTRY


def test_no_bit_of_an_entry_can_change_and_no_byte_be_lost(directory: Path) -> None:
    disk_cache.write("k", ENTRY)
    path = directory / "k.o"
    whole = path.read_bytes()
    flipped = (bytes([*whole[:i], whole[i] ^ 1 << bit, *whole[i + 1 :]]) for i in range(len(whole)) for bit in range(8))
    for changed in chain(flipped, (whole[:length] for length in range(len(whole))), (whole + b"x", whole + whole)):
        put(path, changed)
        assert disk_cache.read("k") is None
    put(path, whole)
    assert disk_cache.read("k") == ENTRY


def test_an_entry_under_another_name_is_ignored(directory: Path) -> None:
    disk_cache.write("k", ENTRY)
    disk_cache.write("other", Entry(b"other", {}))
    (directory / "k.o").rename(directory / "k")
    (directory / "other.o").rename(directory / "k.o")
    (directory / "k").rename(directory / "other.o")
    assert disk_cache.read("k") is None and disk_cache.read("other") is None


def test_an_oversized_entry_is_neither_read_nor_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.write("k", ENTRY)
    oversized(directory / "k.o", 1 << 40)
    assert disk_cache.read("k") is None
    monkeypatch.setattr(disk_cache, "_LARGEST", 1000)
    disk_cache.write("large", Entry(b"x" * 1000, {}))
    assert not (directory / "large.o").exists()


def test_an_entry_of_somebody_else_is_not_believed(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it got into the directory as this user's file: it has another key's signature."""
    disk_cache.write("k", ENTRY)
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / "theirs"))
    disk_cache.write("k", Entry(b"forged", {}))
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(directory))
    put(directory / "k.o", (tmp_path / "theirs" / "k.o").read_bytes())
    assert disk_cache.read("k") is None


def test_the_key_is_for_this_user_only(directory: Path) -> None:
    disk_cache.write("k", ENTRY)
    status = (directory / "key").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_size) == (0o600, 32)


@pytest.mark.parametrize(
    "spoil",
    [
        *IN_PLACE.values(),
        Path.unlink,
        lambda path: path.chmod(0o640),
        lambda path: put(path, b""),
        lambda path: put(path, b"x" * 31),
        lambda path: put(path, b"x" * 33),
    ],
    ids=[*IN_PLACE, "lost", "readable for the group", "empty", "short", "long"],
)
def test_a_key_that_cannot_be_trusted_is_made_anew(directory: Path, spoil: Callable[[Path], None]) -> None:
    disk_cache.write("k", ENTRY)
    spoil(directory / "key")
    assert disk_cache.read("k") is None, "signed with the old one"
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") == (None if (directory / "key").is_dir() else ENTRY)


def test_a_file_system_without_hard_links_has_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    disk_cache.write("k", ENTRY)
    assert disk_cache.read("k") == ENTRY


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
    assert sorted(p.name for p in directory.iterdir()) == ["k.o", "k.o.new.tmp", "key"]


def test_a_write_that_fails_leaves_nothing_behind(directory: Path) -> None:
    disk_cache.write("k", ENTRY)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # for a full disk
    try:
        disk_cache.write("k", Entry(b"x" * 100_000, {}))
        disk_cache.write("other", Entry(b"x" * 100_000, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert sorted(p.name for p in directory.iterdir()) == ["k.o", "key"]
    assert disk_cache.read("k") == ENTRY, "the old one stays"


def test_what_is_no_file_does_not_keep_the_rest_from_being_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.write("k", Entry(b"x" * 1000, {}))
    (directory / "b.tmp").touch()
    for name in ("a.o", "a.tmp"):
        (directory / name).mkdir()
    for path in directory.iterdir():
        os.utime(path, (1000, 1000))
    monkeypatch.setattr(disk_cache, "_CHECKED", 0)
    monkeypatch.setattr(disk_cache, "_LARGEST", 2000)
    disk_cache.write("l", Entry(b"x" * 1000, {}))
    assert sorted(p.name for p in directory.iterdir()) == ["a.o", "a.tmp", "key", "l.o"]


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


@pytest.mark.parametrize("key", ["../k", "/tmp/k", "", "k\0", "k\n", "x" * 1000])
def test_an_artifact_cannot_leave_the_directory(directory: Path, key: str) -> None:
    content = disk_cache._encoded(key, ENTRY)
    CacheArtifactFactory.create("gossamer", key, content).populate_cache()
    assert not [*directory.parent.rglob("*.o")]


def test_a_damaged_artifact_is_left_out(directory: Path) -> None:
    whole = disk_cache._encoded("k", ENTRY)
    for content in (whole[:-1], whole[1:], b"", b"[" * 10_000, disk_cache._encoded("other", ENTRY)):
        CacheArtifactFactory.create("gossamer", "k", content).populate_cache()
        assert disk_cache.read("k") is None
    CacheArtifactFactory.create("gossamer", "k", whole).populate_cache()
    assert disk_cache.read("k") == ENTRY


def test_a_directory_that_others_may_write_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk_cache.write("k", ENTRY)
    directory.chmod(0o777)
    assert disk_cache.read("k") is None
    disk_cache.write("other", ENTRY)
    assert not (directory / "other.o").exists()
    assert [r.getMessage() for r in caplog.records if "other users may write to it" in r.getMessage()] == [
        f"the cache {directory} is not used, because other users may write to it (chmod go-w {directory})"
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


def _write(number: int, start: Barrier, times: int) -> None:
    start.wait()
    for i in range(times):
        disk_cache.write("k", ENTRY)
        disk_cache.write(f"k{number}", Entry(bytes([number]) * (i % 100_000), {}))


def _started(number: int, times: int) -> list[Process]:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(number)
    processes = [context.Process(target=_write, args=(i, start, times)) for i in range(number)]
    for process in processes:
        process.start()
    return processes


def test_eight_processes_make_one_key_and_write_the_same_entry(directory: Path) -> None:
    processes = _started(8, 50)
    while any(process.is_alive() for process in processes):
        assert disk_cache.read("k") in (None, ENTRY)
    assert all(process.exitcode == 0 for process in processes)
    assert disk_cache.read("k") == ENTRY
    assert [disk_cache.read(f"k{i}") for i in range(8)] == [Entry(bytes([i]) * 49, {}) for i in range(8)]
    assert {p.suffix for p in directory.iterdir()} == {".o", ""}


def test_processes_that_are_killed_while_they_write(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        processes = _started(8, 10**9)
        time.sleep(0.1)
        for process in processes:
            process.kill()
            process.join()
    for path in directory.glob("*.o"):
        assert disk_cache.read(path.stem) is not None
    assert not [r for r in caplog.records if "cannot be read" in r.getMessage()]
    for path in directory.glob("*.tmp"):
        os.utime(path, (1000, 1000))
    monkeypatch.setattr(disk_cache, "_CHECKED", 0)
    disk_cache.write("k", ENTRY)
    assert {p.suffix for p in directory.iterdir()} == {".o", ""}
