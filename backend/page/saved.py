"""Keeps the reports of a dump folder. Each compilation adds a line of JSON; all lines together are one report.

{"training": false, "decisions": [...], "patterns": {...}, ...}       reports.jsonl, a line for each graph or `explain`
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

REPORTS = "reports.jsonl"


def add(folder: Path, report: Mapping[str, Any]) -> None:
    """Adds a report to the folder of a dump."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open(folder / REPORTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    finally:
        os.close(descriptor)


def read(folder: Path) -> dict[str, Any] | None:
    """Returns all reports of a folder as one; None if there are none. Of decisions about the same use of a weight, the last
    counts.
    """
    reports = list(_lines(folder / REPORTS))
    if not reports:
        return None
    decisions = {(d["name"], d["op"], *d["shape"]): d for each in reports for d in each["decisions"]}
    names = {d["name"]: False for d in decisions.values()}
    names |= {d["name"]: True for d in decisions.values() if d["sparse"]}
    fields = ("name", "format", "dense_bytes", "packed_bytes")
    dense_bytes, packed_bytes = sizes(tuple(d[each] for each in fields) for d in decisions.values() if d["sparse"])
    return {
        **reports[-1],
        "dense_bytes": dense_bytes,
        "packed_bytes": packed_bytes,
        "training": any(each["training"] for each in reports),
        "decisions": list(decisions.values()),
        "patterns": {name: pattern for each in reports for name, pattern in each["patterns"].items()},
        "flows": [flow for each in reports for flow in each["flows"]],
        "breaks": list(dict.fromkeys(reason for each in reports for reason in each["breaks"])),
        "off": list(dict.fromkeys(sentence for each in reports for sentence in each["off"])),
        "seconds": _added(each["seconds"] for each in reports),
        "kernels": max(each["kernels"] for each in reports) if len(reports) == 1 else _kernels(decisions.values()),
        "sparse": sum(names.values()),
        "dense": len(names) - sum(names.values()),
    }


def sizes(uses: Iterable[tuple[Any, ...]]) -> tuple[int, int]:
    """Returns the dense and the packed bytes of weights with sparse kernels. Each weight counts once, packed once a format.

    uses  their uses, each with the weight's name and format, and its dense and packed bytes
    """
    listed = list(uses)
    dense = {name: size for name, _, size, packed in listed if packed}
    return sum(dense.values()), sum({(name, format): packed for name, format, _, packed in listed}.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        yield json.loads(line)


def _kernels(decisions: Any) -> int:
    """Returns the number of regions and operations that kernels run. Several may share a kernel."""

    def key(d: Mapping[str, Any]) -> Any:
        return (d["details"] or {}).get("region") or tuple(d["kernels"]) or (d["op"], d["format"], d["schedule"])

    return len({key(decision) for decision in decisions if decision["sparse"]})


def _added(seconds: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in seconds:
        for name, taken in each.items():
            total[name] = total.get(name, 0.0) + taken
    return total
