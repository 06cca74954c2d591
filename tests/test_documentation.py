"""The documents say what is so: options are those of `Options`, figures those of the recorded runs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.tables import updated
from gossamer import Options

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text()


def test_the_table_of_options_is_complete_and_its_defaults_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_DUMP_IR", raising=False)
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", GUIDE, re.MULTILINE))
    assert documented == {f.name: repr(getattr(Options(), f.name)).replace("'", '"') for f in fields(Options)}


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_measured_tables_are_those_of_the_recorded_runs(document: str) -> None:
    text = (ROOT / document).read_text()
    assert "<!-- measured: " in text
    assert updated(text, (ROOT / document).parent) == text
