"""Environment variables: what they mean, and that there are no others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.dialects.settings import CACHE_DIR, DUMP_IR, SETTINGS

ROOT = Path(__file__).parents[2]
ROOMS = ("gossamer", "backend", "sparsity", "passes", "runtime", "dialects")


def test_the_environment_is_read_in_one_place() -> None:
    elsewhere = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.name != "settings.py" and re.search(r"os\.environ|getenv", path.read_text(encoding="utf-8"))
    ]
    assert elsewhere == []


def test_documents_speak_of_no_other_variables() -> None:
    documents = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    named = {name for path in documents for name in re.findall(r"GOSSAMER_\w+", path.read_text(encoding="utf-8"))}
    assert named == {each.name for each in SETTINGS}


def test_the_cache_is_in_the_home_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somebody")
    assert CACHE_DIR.get() == Path("/somebody/.cache/gossamer")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/me")
    assert CACHE_DIR.get() == Path("/var/me/gossamer")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "/elsewhere")
    assert CACHE_DIR.get() == Path("/elsewhere")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    assert CACHE_DIR.get() is None


def test_an_empty_dump_directory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_DUMP_IR", "")
    assert DUMP_IR.get() is None


def test_the_module_prints_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    (tmp_path / "k.o").write_bytes(bytes(1_200_000))
    run = subprocess.run([sys.executable, "-m", "gossamer"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert f"{tmp_path}, 1 files, 1.2 MB" in run.stdout
    assert [each.name for each in SETTINGS if each.name not in run.stdout] == []
