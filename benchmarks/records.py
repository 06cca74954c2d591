"""A report as a file: what tables and plots read, on one line for each case.

Kept of each contender are its median, the interquartile range and the number of its samples, its place under the roof, how much
of the model became sparse and by which schedules, and why it has no time. Floats have six significant digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LEFT_OUT = {"compile_s", "cores_elsewhere", "error_max", "inner", "min_ms", "speedup"}  # of an outcome
_OF_ONE_RUN = {"weight_bytes"}  # notes that the race itself needs
_DIGITS = 6


def recorded(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case as the file holds it; `cores_elsewhere`, which is the same for all contenders of a case, stands beside them."""
    elsewhere = max((found.get("cores_elsewhere", 0.0) for found in case["results"].values()), default=0.0)
    results = {name: _kept(found) for name, found in case["results"].items()}
    return _rounded({**case, "cores_elsewhere": max(elsewhere, case.get("cores_elsewhere", 0.0)), "results": results})


def text(report: Mapping[str, Any]) -> str:
    """A report as JSON: a line for each of its parts, then one for each case."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in report.items() if key != "cases"]
    cases = ",\n ".join(json.dumps(case, separators=(",", ":")) for case in report["cases"])
    return "{\n" + ",\n".join([*parts, f'"cases": [\n {cases}\n]']) + "\n}\n"


def save(report: Mapping[str, Any], path: Path) -> None:
    """Writes a file that is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text(report))
    partial.replace(path)


def _kept(outcome: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in outcome.items() if key not in _LEFT_OUT}
    notes = {key: value for key, value in kept.pop("notes", {}).items() if key not in _OF_ONE_RUN}
    return {**kept, "notes": notes} if notes else kept


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
