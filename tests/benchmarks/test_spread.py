"""How far processes are apart that run the same code."""

import json
from pathlib import Path

import pytest

from benchmarks import spread


def test_the_record_has_each_process_but_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = iter([[9.0, 90.0], [1.0, 2.0], [1.2, 2.0], [1.1, 3.0]])
    monkeypatch.setattr(spread, "begun", lambda *tokens: json.dumps(next(runs)))
    monkeypatch.setattr(spread, "record", lambda name: tmp_path / f"{name}.json")
    spread.main(["3", "128", "1024"])
    first, second = json.loads((tmp_path / "spread.json").read_text())["cases"]
    assert first["median_ms"] == [1.0, 1.2, 1.1] and first["spread"] == pytest.approx(0.2 / 1.1)
    assert second["tokens"] == 1024 and second["spread"] == pytest.approx(0.5)
