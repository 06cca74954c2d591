"""Records on disk: what comes back, what damage does, and several processes at once."""

import multiprocessing
import os
from pathlib import Path

import pytest

from gossamer.runtime import records
from tests.runtime.damage import CONTENT, IN_PLACE, oversized, put


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_document_comes_back_and_is_replaced() -> None:
    assert records.read("d") is None
    records.write("d", {"a": [1, 2.5]})
    records.write("d", {"a": 2})
    assert records.read("d") == {"a": 2}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_not_this_users_file_is_neither_read_nor_waited_for(directory: Path, kind: str) -> None:
    records.write("d", 1)
    records.append("j", 1)
    for name in ("d.json", "j.jsonl"):
        IN_PLACE[kind](directory / name)
    assert records.read("d") is None and records.lines("j") == []
    records.write("d", 2)
    records.append("j", 2)
    assert records.read("d") == (None if kind == "directory" else 2)
    assert records.lines("j") == [], "a journal is not replaced"
    assert not [*directory.glob("*.tmp")]


@pytest.mark.parametrize("content", CONTENT.values(), ids=CONTENT)
def test_damage_is_ignored(directory: Path, content: bytes) -> None:
    records.write("d", 1)
    records.append("j", 1)
    put(directory / "d.json", content)
    put(directory / "j.jsonl", content)
    assert records.read("d") in (None, {})
    records.append("j", 2)
    assert records.lines("j")[-1] == 2


def test_what_is_too_large_is_ignored_and_begun_anew(directory: Path) -> None:
    records.write("d", 1)
    records.append("j", 1)
    for name in ("d.json", "j.jsonl"):
        oversized(directory / name, 1 << 40)
    assert records.read("d") is None and records.lines("j") == []
    records.write("d", 2)
    records.append("j", 2)
    assert records.read("d") == 2 and records.lines("j") == [2]


def test_a_journal_keeps_its_order() -> None:
    for n in range(3):
        records.append("j", {"n": n})
    assert records.lines("j") == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_damaged_lines_of_a_journal_are_left_out(directory: Path) -> None:
    records.append("j", 1)
    with open(directory / "j.jsonl", "ab") as file:
        file.write(b'{"n": \xff\xfe torn')
    records.append("j", 2)
    assert records.lines("j") == [1, 2]


def test_without_a_cache_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    records.write("d", 1)
    records.append("j", 1)
    assert records.read("d") is None and records.lines("j") == []


def test_a_directory_that_others_may_write_is_not_read(directory: Path) -> None:
    records.append("j", 1)
    directory.chmod(0o777)
    assert records.lines("j") == []


def _append_many(directory: str, start: int) -> None:
    os.environ["GOSSAMER_CACHE_DIR"] = directory
    for n in range(start, start + 200):
        records.append("j", {"n": n, "text": "x" * 300})


def test_processes_append_whole_lines(directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append_many, args=(str(directory), 1000 * i)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    assert sorted(line["n"] for line in records.lines("j")) == [*range(200), *range(1000, 1200)]
