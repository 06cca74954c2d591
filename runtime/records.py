"""Small records on disk, beside the kernel cache: what was measured on this machine.

A document is one JSON file, replaced as a whole; a journal is a file of one JSON value a line, appended to. Any number of
processes may read and write at once. What is damaged or larger than 16 MB, or may have been written by others, is ignored, and
a disk that cannot be written is no error. Where the kernel cache is off, nothing is kept.

Records can be read and edited by hand and lead to no code, so they are not signed. Who reads one checks that its values make
sense.
"""

import json
import logging
from typing import Any

from gossamer.runtime import cache_files

log = logging.getLogger("gossamer")

_LARGEST = 16 << 20

_DAMAGED = (ValueError, RecursionError)
"""What json raises: RecursionError for a list in a list in a list …"""


def read(name: str) -> Any:
    """The document of this name, None if there is none that is whole."""
    content = _content(f"{name}.json")
    try:
        return json.loads(content) if content else None
    except _DAMAGED:
        log.warning("the record %s is damaged, it is ignored", name)
        return None


def write(name: str, document: Any) -> None:
    """Keep a document in place of an older one."""
    base = cache_files.directory()
    if base is None:
        return
    try:
        cache_files.replace(base / f"{name}.json", json.dumps(document).encode())
    except OSError as problem:
        log.warning("the record %s cannot be written (%s)", name, problem)


def lines(name: str) -> list[Any]:
    """The values of a journal, oldest first, without lines that are damaged."""
    found = []
    for line in _content(f"{name}.jsonl").split(b"\n"):
        try:
            found.append(json.loads(line))
        except _DAMAGED:
            continue  # no line, or one that a dying process left behind
    return found


def append(name: str, value: Any) -> None:
    """Add a value to a journal, which starts anew where it has become too large."""
    base = cache_files.directory()
    if base is None:
        return
    line = f"\n{json.dumps(value)}\n".encode()  # a new line first, in case that the last one has no end
    try:
        cache_files.append(base / f"{name}.jsonl", line, _LARGEST)
    except OSError as problem:
        cache_files.warn_once(f"the journal {name} cannot be written ({problem})")


def _content(name: str) -> bytes:
    base = cache_files.directory()
    if base is None:
        return b""
    try:
        return cache_files.read(base / name, _LARGEST)
    except FileNotFoundError:
        return b""
    except OSError as problem:
        log.warning("the record %s is ignored (%s)", base / name, problem)
        return b""
