"""Traces a call with torch.profiler, and adds a track with the model's modules.

track "modules"     encoder ─ layer.0 ─ output.dense          from the first kernel call of a module to its last
                          ↘ an arrow
thread              0 to 2 + gelu, chain of 2                 the range of a kernel call
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gossamer.runtime.operations import OPERATIONS

_TRACK = "modules"
_GUARDS = "TorchDynamo Cache Lookup"

Event = Mapping[str, Any]


def traced(call: Callable[[], object], labels: Container[str]) -> list[Event]:
    """Returns the events of one call, with a track of modules for the operations that have these labels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler warns of things that this machine cannot trace
        for _ in range(2):  # the first call under a profiler takes longer
            with profile(activities=[ProfilerActivity.CPU]) as found:
                call()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            found.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                events: list[Event] = json.load(file)["traceEvents"]
    ranges = [each for each in events if each.get("ph") == "X" and each.get("name") in labels]
    return [*events, *_modules(sorted(ranges, key=lambda each: each["ts"]))]


def guards_us(events: Sequence[Event]) -> float:
    """Returns the time of Dynamo's checks before compiled code, in microseconds."""
    return float(sum(each["dur"] for each in events if each.get("ph") == "X" and each.get("name") == _GUARDS))


def module_path(label: str) -> list[str]:
    """Returns the path of the module in a label, outermost first; empty if the label has no module."""
    operation, _, rest = label.partition(" of ")
    named = rest if rest and " " not in operation else label
    return [] if operation == "region" or named in OPERATIONS else re.split("[:, ]", named)[0].split(".")


def _modules(ranges: Sequence[Event]) -> Iterator[Event]:
    """Yields the track: a slice for each module, nested like the modules, and an arrow from the innermost one to each range."""
    if not ranges:
        return
    yield {"ph": "M", "name": "process_name", "pid": _TRACK, "args": {"name": _TRACK}}
    paths = [(module_path(each["name"]), each) for each in ranges]
    for depth in range(1, max(len(path) for path, _ in paths) + 1):
        for path, group in groupby(((path[:depth], each) for path, each in paths), itemgetter(0)):
            own = [each for _, each in group]
            if len(path) == depth:
                start, end = own[0]["ts"], own[-1]["ts"] + own[-1]["dur"]
                yield _event("X", path[-1], start, dur=end - start, args={"module": ".".join(path)})
    for number, (path, each) in enumerate(paths):
        if path:
            yield _event("s", "module", each["ts"], id=number, cat=_TRACK)
            place = {"pid": each["pid"], "tid": each["tid"]}
            yield {**_event("f", "module", each["ts"], id=number, cat=_TRACK, bp="e"), **place}


def _event(phase: str, name: str, start: float, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": _TRACK, "tid": 0, "ts": start, "cat": _TRACK, **more}
