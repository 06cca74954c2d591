"""Object code on disk, so that the next process starts without compiling.

An entry is one file, named by the hash of all that the code depends on: kernel IR, target, versions. It holds a line of
JSON (what is needed to call the code, and a hash of that, of the name and of the code) and the object code. Entries are
written to a temporary file and renamed, so that any number of processes may read and write at once; what is damaged or
foreign is ignored. Beyond 512 MB the entries that were not used for longest are removed. Torch's portable cache
(`torch.compiler.save_cache_artifacts`) takes the entries along that a process has used.

The directory is $GOSSAMER_CACHE_DIR, by default ~/.cache/gossamer; an empty value turns the cache off. Code is loaded from
it into the process, so a directory that others may write to is not used.
"""

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gossamer.runtime.torch_internals import PORTABLE_CACHE, CacheArtifact, CacheArtifactFactory, CacheArtifactManager, off

log = logging.getLogger("gossamer")

_LARGEST = 512 << 20
"""Bytes of all entries from which on old ones are removed, down to three quarters of it."""

_CHECKED = 8 << 20
"""Bytes that a process writes before it looks again whether there is too much; it does so at its first entry, too."""

_ABANDONED = 3600
"""Seconds after which a temporary file belongs to a process that died."""


_unchecked = _CHECKED


@dataclass(frozen=True)
class Entry:
    """Object code, and `call`: what is needed to call it, as JSON can hold it."""

    code: bytes
    call: dict[str, Any]


def read(key: str) -> Entry | None:
    """The entry of this key, None if there is none that is whole."""
    base = directory()
    if base is None:
        return None
    path = base / f"{key}.o"
    try:
        content = path.read_bytes()
        entry = _decoded(key, content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        log.warning("kernel cache: %s cannot be read (%s), it is compiled anew", path, problem)
        return None
    with suppress(OSError):
        os.utime(path)  # it is used
    _take_along(key, content)
    return entry


def write(key: str, entry: Entry) -> None:
    """Store an entry; a disk that cannot be written is no error."""
    base = directory()
    if base is None:
        return
    content = _encoded(key, entry)
    _take_along(key, content)
    _store(base, key, content)


def replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: who reads it meanwhile finds the old content or the new one. OSError if that fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


class _Artifact(CacheArtifact):
    """An entry in torch's portable cache; its key says for which machine it is."""

    def populate_cache(self) -> None:
        base = directory()
        if base is not None and re.fullmatch(r"[\w-]+", self.key):
            _store(base, self.key, self.content)

    @staticmethod
    def type() -> str:
        return "gossamer"


def _take_along(key: str, content: bytes) -> None:
    if not off(PORTABLE_CACHE):
        CacheArtifactManager.record_artifact(_Artifact.type(), key, content)


if not off(PORTABLE_CACHE):
    CacheArtifactFactory.register(_Artifact)


def _encoded(key: str, entry: Entry) -> bytes:
    call = json.dumps(entry.call)
    return json.dumps({"call": call, "sha256": _digest(key, call, entry.code)}).encode() + b"\n" + entry.code


def _decoded(key: str, content: bytes) -> Entry:
    """ValueError, KeyError or TypeError if it is not whole, or not what was stored under this key."""
    header, _, code = content.partition(b"\n")
    found = json.loads(header)
    if found["sha256"] != _digest(key, found["call"], code):
        raise ValueError("it is damaged")
    return Entry(code, json.loads(found["call"]))


def _digest(key: str, call: str, code: bytes) -> str:
    return hashlib.sha256(f"{key}\n{call}\n".encode() + code).hexdigest()


def _store(base: Path, key: str, content: bytes) -> None:
    try:
        replace(base / f"{key}.o", content)
        global _unchecked
        _unchecked += len(content)
        if _unchecked > _CHECKED:
            _unchecked = 0
            _make_room(base)
    except OSError as problem:
        log.warning("kernel cache: %s cannot be written (%s)", base, problem)


def _make_room(base: Path) -> None:
    """Removes what dead processes left behind and, where there is too much, the entries that were not used for longest."""
    entries, now = [], time.time()
    with os.scandir(base) as files:
        for file in files:
            try:
                status = file.stat(follow_symlinks=False)
                if file.name.endswith(".o"):
                    entries.append((status.st_mtime, status.st_size, file.path))
                elif file.name.endswith(".tmp") and now - status.st_mtime > _ABANDONED:
                    os.unlink(file.path)
            except FileNotFoundError:
                continue  # another process was faster
    size = sum(entry[1] for entry in entries)
    if size <= _LARGEST:
        return
    for _, bytes_, path in sorted(entries):
        if size <= _LARGEST * 3 / 4:
            break
        Path(path).unlink(missing_ok=True)
        size -= bytes_


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def directory() -> Path | None:
    """The cache directory, made if need be; None if the cache is off or the directory is not ours alone to write."""
    given = os.environ.get("GOSSAMER_CACHE_DIR")
    if given == "":
        return None
    base = None
    try:
        base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
    except (OSError, RuntimeError) as problem:  # RuntimeError: there is no home
        _warn_once(f"kernel cache: {base or 'its directory'} cannot be made ({problem})")
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _warn_once(f"kernel cache: {base} may be written by others, it is not used (chmod go-w {base})")
        return None
    return base
