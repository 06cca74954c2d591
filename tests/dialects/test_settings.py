"""Environment variables: what they mean, and that there are no others."""

import re
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


def test_a_setting_has_another_text_within_a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_DUMP_IR", raising=False)
    with pytest.raises(ZeroDivisionError), DUMP_IR.set_to("here"):
        assert DUMP_IR.get() == "here"
        raise ZeroDivisionError
    assert DUMP_IR.text is None
    monkeypatch.setenv("GOSSAMER_DUMP_IR", "there")
    with DUMP_IR.set_to(""):
        assert DUMP_IR.get() is None
    assert DUMP_IR.get() == "there"
