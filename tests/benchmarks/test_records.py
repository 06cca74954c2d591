"""What the files of measurements keep."""

import json
from typing import Any

from benchmarks.records import recorded, text


def test_a_case_keeps_median_spread_and_samples_and_no_more() -> None:
    timed = {"median_ms": 1.23456789, "iqr_ms": 0.1, "samples": 20}
    own = {"compile_s": 2.0, "min_ms": 1.1, "inner": 3, "error_max": 1e-7, "speedup": {"dense": 2.0}, "cores_elsewhere": 0.25}
    notes = {"sparse": 1, "schedules": ["broadcast"], "weight_bytes": 7}
    case: dict[str, Any] = {"name": "a", "results": {"sparse": timed | own | {"notes": notes}, "peer": {"skipped": "not here"}}}
    found = recorded(case)
    expected = {"median_ms": 1.23457, "iqr_ms": 0.1, "samples": 20, "notes": {"sparse": 1, "schedules": ["broadcast"]}}
    assert found == {"name": "a", "cores_elsewhere": 0.25, "results": {"sparse": expected, "peer": {"skipped": "not here"}}}
    assert recorded(found) == found


def test_a_report_has_a_line_for_each_case() -> None:
    report = {"machine": {"cpu": "Some CPU"}, "cases": [{"name": name, "results": {}} for name in "abc"]}
    assert json.loads(text(report)) == report
    assert sum('"name"' in line for line in text(report).splitlines()) == 3
    assert json.loads(text({**report, "cases": []})) == {**report, "cases": []}
