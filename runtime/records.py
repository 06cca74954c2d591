"""Keeps small records on disk, in the directory of the kernel cache: what was measured on this machine.

document  one JSON file, which is replaced as a whole
journal   a file with one JSON value on each line, to which lines are appended

Any number of processes may read and write at once. Records that are damaged, larger than 16 MB, or writable by other users are
ignored. It is no error if the disk cannot be written. If the kernel cache is off, nothing is kept.

Users may read and edit records by hand. Records lead to no code, so they are not signed, and their readers check the values.
Torch's portable cache includes documents, and those lines of journals that a process has written or `used`. A loaded document
replaces an older one, because the graphs that come with it were compiled with it.
"""

import json
import logging
from typing import Any, ClassVar

from gossamer.runtime import cache_files
from gossamer.runtime.disk_cache import is_name, portable, take_along
from gossamer.runtime.torch_internals import CacheArtifact

log = logging.getLogger("gossamer")

_LARGEST = 16 << 20

_DAMAGED = (ValueError, RecursionError)
"""The errors that json raises; RecursionError for deeply nested lists."""


def read(name: str) -> Any:
    """Returns the document with this name; None if there is none or it is damaged."""
    content = _content(f"{name}.json")
    try:
        document = json.loads(content) if content else None
        if document is not None:
            take_along(_Artifact, f"{name}.json", content)
        return document
    except _DAMAGED:
        log.warning("the record %s is damaged, it is ignored", name)
        return None


def write(name: str, document: Any) -> None:
    """Writes a document in place of an older one."""
    base = cache_files.directory()
    if base is None:
        return
    content = json.dumps(document).encode()
    take_along(_Artifact, f"{name}.json", content)
    try:
        cache_files.replace(base / f"{name}.json", content)
    except OSError as problem:
        log.warning("the record %s cannot be written (%s)", name, problem)


def lines(name: str) -> list[Any]:
    """Returns the values of a journal, oldest first, without damaged lines."""
    found = []
    for line in _content(f"{name}.jsonl").split(b"\n"):
        try:
            found.append(json.loads(line))
        except _DAMAGED:
            continue  # an empty line, or one that a process did not finish when it died
    return found


def append(name: str, value: Any) -> None:
    """Appends a value to a journal. First empties a journal that has become too large."""
    base = cache_files.directory()
    if base is None:
        return
    used(name, value)
    line = f"\n{json.dumps(value)}\n".encode()  # a line break first, in case the last line has none
    try:
        cache_files.append(base / f"{name}.jsonl", line, _LARGEST)
    except OSError as problem:
        cache_files.warn_once(f"the journal {name} cannot be written ({problem})")


def used(name: str, value: Any) -> None:
    """Notes that this process relies on a value of a journal, so that torch's portable cache includes it."""
    take_along(_Artifact, f"{name}.jsonl", json.dumps(value).encode())


def loaded() -> int:
    """Returns how many records torch's portable cache has loaded. Readers that keep values read again when it grows."""
    return _Artifact.loaded


@portable
class _Artifact(CacheArtifact):
    """A document, or a line of a journal, in torch's portable cache. Its key is the name of the file."""

    loaded: ClassVar[int] = 0

    def populate_cache(self) -> None:
        name, _, kind = self.key.rpartition(".")
        if not is_name(name) or len(self.content) > _LARGEST:
            return
        try:
            value = json.loads(self.content)
        except _DAMAGED:
            log.warning("the artifact %s is damaged, it is left out", self.key)
            return
        _Artifact.loaded += 1
        if kind == "json":
            write(name, value)
        elif kind == "jsonl" and value not in lines(name):
            append(name, value)

    @staticmethod
    def type() -> str:
        return "gossamer_records"


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
