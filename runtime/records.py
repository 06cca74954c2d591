"""Small records on disk, beside the kernel cache: what was measured on this machine.

A document is one JSON file, replaced as a whole; a journal is a file of one JSON value a line, appended to. Any number of
processes may read and write at once. What is damaged or larger than 16 MB, or may have been written by others, is ignored, and
a disk that cannot be written is no error. Where the kernel cache is off, nothing is kept.

Records can be read and edited by hand and lead to no code, so they are not signed. Who reads one checks that its values make
sense. Torch's portable cache takes them along, of journals the lines that a process has written or `used`. What is loaded
takes the place of an older document: graphs that come with it were compiled by it.
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
"""What json raises: RecursionError for a list in a list in a list …"""


def read(name: str) -> Any:
    """The document of this name, None if there is none that is whole."""
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
    """Keep a document in place of an older one."""
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
    used(name, value)
    line = f"\n{json.dumps(value)}\n".encode()  # a new line first, in case that the last one has no end
    try:
        cache_files.append(base / f"{name}.jsonl", line, _LARGEST)
    except OSError as problem:
        cache_files.warn_once(f"the journal {name} cannot be written ({problem})")


def used(name: str, value: Any) -> None:
    """Says that this process goes by a value of a journal."""
    take_along(_Artifact, f"{name}.jsonl", json.dumps(value).encode())


def loaded() -> int:
    """How many records have come by torch's portable cache: who keeps what it has read reads anew when there are more."""
    return _Artifact.loaded


@portable
class _Artifact(CacheArtifact):
    """A document, or a line of a journal, in torch's portable cache; its key is the name of the file."""

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
