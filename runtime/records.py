"""Small records on disk, beside the kernel cache: what was measured on this machine.

A document is one JSON file, replaced as a whole; a journal is a file of one JSON value a line, appended to. Any number of
processes may read and write at once; what is damaged is ignored, and a disk that cannot be written is no error. Where the
kernel cache is off, nothing is kept.
"""

import json
import logging
import os
from typing import Any

from gossamer.runtime import disk_cache

log = logging.getLogger("gossamer")


def read(name: str) -> Any:
    """The document of this name, None if there is none that is whole."""
    content = _content(f"{name}.json")
    try:
        return json.loads(content) if content else None
    except ValueError:
        log.warning("the record %s is damaged, it is ignored", name)
        return None


def write(name: str, document: Any) -> None:
    """Keep a document in place of an older one."""
    base = disk_cache.directory()
    if base is None:
        return
    try:
        disk_cache.replace(base / f"{name}.json", json.dumps(document).encode())
    except OSError as problem:
        log.warning("the record %s cannot be written (%s)", name, problem)


def lines(name: str) -> list[Any]:
    """The values of a journal, oldest first, without lines that are damaged."""
    found = []
    for line in _content(f"{name}.jsonl").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # a line that a dying process left behind
    return found


def append(name: str, value: Any) -> None:
    """Add a value to a journal: one write, so that lines of several processes do not mix."""
    base = disk_cache.directory()
    if base is None:
        return
    line = f"\n{json.dumps(value)}\n".encode()  # a new line first, in case that the last one has no end
    try:
        file = os.open(base / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
        finally:
            os.close(file)
    except OSError as problem:
        log.warning("the journal %s cannot be written (%s)", name, problem)


def _content(name: str) -> str:
    base = disk_cache.directory()
    if base is None:
        return ""
    try:
        return (base / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as problem:
        log.warning("the record %s cannot be read (%s)", base / name, problem)
        return ""
