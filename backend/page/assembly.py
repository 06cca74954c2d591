"""Finds the loops that multiply in a kernel's assembly, and counts what one iteration loads, multiplies and stores.

# broadcast: inner loop, 8 multiply-adds        the label that dumps have (labelled.py)
.LBB0_84:                                       {"label": ".LBB0_84", "first": 939, "last": 976, "depth": 5,
    vmovups (%r9,%rsi,4), %xmm8                  "loads": 13, "multiplies": 8, "stores": 0, "instructions": 34}
    ...
"""

import re
from typing import Any

_LABEL = re.compile(r"(?:#|//) [\w.-]+: inner loop, (\d+) multiply-adds")
_BLOCK = re.compile(r"(\.LBB\w+):")
_DEPTH = re.compile(r"Inner Loop Header: Depth=(\d+)")
_INSTRUCTION = re.compile(r"\t([a-z]\w*)(?:\s+([^#]*))?")
_MULTIPLY = re.compile(r"v?fn?m(?:add|sub)\w+|vdpbf16ps|vpdp\w+|tdp\w+|v?pmadd\w+|v?mulp[sdh]\b")
_STORE = re.compile(r"v?mov\w*|tilestored\w*|vpcompress\w*|vcvtps2ph|vpmov\w*")
_NO_READ = re.compile(r"lea\w*|prefetch\w*|nop\w*|j\w+|call\w*|ret\w*")


def hot_loops(assembly: str) -> list[dict[str, Any]]:
    """Returns the labelled loops: the deepest first, and among these the one with the most multiply-adds. Lines count from
    1."""
    lines, found = assembly.split("\n"), list[dict[str, Any]]()
    for at, line in enumerate(lines):
        if _LABEL.match(line):
            found.append(_loop(lines, at + 1))
    return sorted(found, key=lambda loop: (-loop["depth"], -loop["multiplies"], loop["first"]))


def _loop(lines: list[str], first: int) -> dict[str, Any]:
    """Returns the loop whose header begins at this index. It ends at the jump back to the header."""
    name = (_BLOCK.match(lines[first]) or [None, ""])[1]
    depth, last = 1, first
    counts = dict.fromkeys(("loads", "multiplies", "stores", "instructions", "vectors"), 0)
    for at in range(first, len(lines)):
        if at > first + 1 and (_LABEL.match(lines[at]) or lines[at].startswith(".Lfunc_end")):
            break
        if nest := _DEPTH.search(lines[at]):
            depth = max(depth, int(nest[1]))
        if instruction := _INSTRUCTION.match(lines[at]):
            _count(instruction[1], (instruction[2] or "").strip(), counts)
            last = at
            if instruction[1].startswith("j") and (instruction[2] or "").strip() == name:
                break
    return {"label": name or f"line {first + 1}", "first": first + 1, "last": last + 1, "depth": depth, **counts}


def _count(name: str, operands: str, counts: dict[str, int]) -> None:
    """Counts an instruction in AT&T syntax, where the destination comes last. A prefetch does not count as a load."""
    counts["instructions"] += 1
    counts["multiplies"] += bool(_MULTIPLY.fullmatch(name))
    counts["vectors"] += bool(re.search(r"%[xyz]mm", operands))
    if "(" not in operands or _NO_READ.fullmatch(name):
        return
    stored = operands.endswith(")") or re.search(r"\)\s*\{[^}]*\}$", operands) is not None
    if stored and "," in operands and _STORE.fullmatch(name):
        counts["stores"] += 1
    else:
        counts["loads"] += 1
