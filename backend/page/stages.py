"""Reads the dumped stages of each kernel, in order, from the folder that `dump_ir` names.

in     0013_weight_cse.mlir, 0014_weight_fuse-epilogue.mlir, ..., and stages.jsonl, which describes each file
out    the name of each kernel and its stages: file, pass, the file before, text, and the origins of its lines
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STAGES = "stages.jsonl"
"""The file of a dump with a line of JSON for each other file."""

_FIRST = ("before", "fx", "contract")
"""The stages that may be the first of a graph or a kernel."""


def kernels_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the graphs and kernels of a dump, in the order in which they were compiled."""
    groups = list[dict[str, Any]]()
    current = dict[str, dict[str, Any]]()
    for note in _notes(folder):
        region, stage = note["region"], note["stage"]
        group = current.get(region)
        if group is None or (stage in _FIRST and any(each["stage"] in (stage, "contract") for each in group["stages"])):
            group = current[region] = {"name": region, "graph": stage == "before", "stages": []}
            groups.append(group)
        text = (folder / note["file"]).read_text(encoding="utf-8")
        same = any(each["text"] == text for each in group["stages"][-1:])
        group["stages"].append({**note, "text": text, "same": same, "kind": note["file"].rpartition(".")[2]})
    return groups


def _notes(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / STAGES
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        note: dict[str, Any] = json.loads(line)
        if (folder / note["file"]).is_file():
            yield note
