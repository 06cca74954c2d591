"""Figures from a report: which there are, that equal reports give equal files, that they can be read on any ground."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

from benchmarks import plots  # noqa: E402


def written(report: dict[str, Any], folder: Path, name: str) -> dict[str, str]:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(report))
    return {path.name.removeprefix(name): path.read_text() for path in plots.write(file)}


def test_figures_of_a_race(report: dict[str, Any], tmp_path: Path) -> None:
    found = written(report, tmp_path, "linear")
    assert set(found) == {"-speedup-1T.svg", "-roofline-1T.svg", "-memory.svg"}  # with 2 threads only dense has a time
    speedup = found["-speedup-1T.svg"]
    assert "8 tokens" in speedup and "Sparse" in speedup and "Half" in speedup
    assert "dense product 100 GF/s" in found["-roofline-1T.svg"]
    assert "broadcast" in found["-memory.svg"]


def test_figures_of_prediction_and_startup(report: dict[str, Any], tmp_path: Path) -> None:
    prediction, startup = copy.deepcopy(report), copy.deepcopy(report)
    results = {
        "dense": {"median_ms": 2.0},
        "broadcast": {"median_ms": 1.0},
        "auto": {"median_ms": 1.0, "notes": {"schedules": ["broadcast"]}},
    }
    prediction["cases"] = [{**report["cases"][0], "workload": "prediction", "results": results}]
    assert "100% within 10 %" in written(prediction, tmp_path, "prediction")["-prediction-1T.svg"]
    seconds = {"cold_total_s": 9.0, "cold_own_s": 2.0, "warm_total_s": 3.0, "warm_own_s": 0.3}
    startup["cases"] = [{**report["cases"][0], "workload": "startup", "results": {"sparse": seconds}}]
    assert set(written(startup, tmp_path, "startup")) == {"-startup.svg"}


def test_equal_reports_give_equal_files(report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    assert written(report, tmp_path, "linear") == written(report, tmp_path / "again", "linear")


def luminance(colour: str) -> float:
    """WCAG 2, relative luminance of #rrggbb."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("ground", ["#ffffff", "#0d1117"])
@pytest.mark.parametrize("colour", sorted({plots.TEXT, plots.GRID, *plots.COLOURS.values(), *plots.SERIES}))
def test_colours_can_be_read_on_light_and_dark(colour: str, ground: str) -> None:
    low, high = sorted((luminance(colour), luminance(ground)))
    assert (high + 0.05) / (low + 0.05) >= 3  # WCAG's least for graphics
