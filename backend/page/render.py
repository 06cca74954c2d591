"""Writes a report as one self-contained HTML file: styles, scripts, data and the code of every stage are in it.

The code of each stage is compressed separately. The page unpacks a stage when the user looks at it.
"""

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from gossamer.backend.page import saved
from gossamer.backend.page.advice import advice_for
from gossamer.backend.page.assembly import hot_loops
from gossamer.backend.page.families import family_notes
from gossamer.backend.page.pattern import BLOCKS
from gossamer.backend.page.stages import kernels_in

INDEX = "index.html"

_SCRIPTS = (
    "tools.js",
    "model.js",
    "weight.js",
    "flow.js",
    "sparsity.js",
    "listing.js",
    "kernel.js",
    "code.js",
    "run.js",
    "page.js",
)
_COMMON_JS = ("core", "python", "llvm")  # parts of highlight.js
_MOST_BYTES = 4_500_000
"""Most bytes of all code in a page. Beyond it, the largest stages between the first and the last are left out."""


def write_index(folder: Path) -> Path | None:
    """Writes index.html into the folder of a dump, from its content. Returns the path, or None if it has no report."""
    report = saved.read(folder)
    if report is None:
        return None
    path = folder / INDEX
    path.write_text(render(report, kernels_in(folder), str(folder)), encoding="utf-8")
    return path


def render(report: Mapping[str, Any], kernels: Sequence[dict[str, Any]], folder: str = "") -> str:
    """Returns the page for a report as `data_of` has it, and for kernels from `kernels_in`. Commands in it name `folder`."""
    blobs = [[_packed(stage) for stage in kernel["stages"]] for kernel in kernels]
    shown = _within(blobs, _MOST_BYTES)
    data = {
        **report,
        "advice": advice_for(report),
        "blocks": BLOCKS,
        "folder": folder,
        "families": family_notes({each["schedule"] for each in report["decisions"] if each["schedule"]}),
        "kernelList": [
            {
                "name": kernel["name"],
                "graph": kernel["graph"],
                "stages": [_stage(stage, at, number in shown) for number, stage, at in _numbered(kernels, kernel)],
            }
            for kernel in kernels
        ],
    }
    parts = {
        "STYLE": _text("page.css"),
        "DATA": json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "BLOBS": "\n".join(
            f'<script type="text/plain" id="code-{number}">{blob}</script>'
            for number, blob in enumerate(blob for group in blobs for blob in group)
            if number in shown
        ),
        "LIBRARIES": _libraries(),
        "SCRIPTS": "\n".join(_text(name) for name in _SCRIPTS),
        "LICENSES": html.escape(_text("vendor/LICENSES.txt")),
    }
    before, *rest = _text("page.html").split("{{")
    pieces = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def _finite(data: Any) -> Any:
    """Returns data without infinity and NaN, which JSON does not have: they are None."""
    if isinstance(data, Mapping):
        return {name: _finite(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(each) for each in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def _numbered(kernels: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> list[tuple[int, dict[str, Any], int]]:
    """Returns the stages of a kernel, each with the number of its code in the page."""
    start = 0
    for kernel in kernels:
        if kernel is wanted:
            return [(start + at, stage, start + at) for at, stage in enumerate(kernel["stages"])]
        start += len(kernel["stages"])
    return []


def _stage(stage: Mapping[str, Any], code: int, shown: bool) -> dict[str, Any]:
    loops = hot_loops(stage["text"]) if stage["kind"] == "s" else []
    lines = stage["text"].count("\n") + 1
    names = ("file", "stage", "before", "pass", "kind", "same")
    return {**{name: stage[name] for name in names}, "code": code if shown else None, "lines": lines, "loops": loops}


def _packed(stage: Mapping[str, Any]) -> str:
    """Returns the text and the origins of a stage, compressed with raw deflate, in base64."""
    text = json.dumps({"text": stage["text"], "origins": stage["origins"]}, separators=(",", ":"))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(text.encode()) + packer.flush()).decode()


def _within(blobs: Sequence[Sequence[str]], most: int) -> set[int]:
    """Returns the numbers of the stages that fit into `most` bytes. The first and the last stages take precedence, then small
    ones.
    """
    order, number = list[tuple[bool, int, int]](), 0
    for group in blobs:
        for at, blob in enumerate(group):
            order.append((1 < at < len(group) - 1, len(blob), number))
            number += 1
    kept, size = set[int](), 0
    for _, length, each in sorted(order):
        if size + length <= most:
            kept.add(each)
            size += length
    return kept


def _libraries() -> str:
    """Returns the code of the libraries. highlight.js is a CommonJS module, so it is wrapped."""
    texts = [_text(f"vendor/highlight-{name}.js") for name in _COMMON_JS]
    core, *languages = [f"(function(module) {{\n{text}\nreturn module.exports; }})({{}})" for text in texts]
    lines = [f"window.hljs = {core};"]
    lines += [f"hljs.registerLanguage('{name}', {code});" for name, code in zip(_COMMON_JS[1:], languages, strict=True)]
    return "\n".join([*lines, _text("vendor/diff.min.js"), _text("vendor/dagre.min.js")])


@cache
def _text(name: str) -> str:
    return (files("gossamer.backend.page") / name).read_text(encoding="utf-8")
