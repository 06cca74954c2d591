"""Object code on disk, so that the next process starts without LLVM.

An entry is one file, named by the hash of all that the code depends on: kernel IR, target, versions. It holds a line of
JSON (what is needed to call the code, and the hash of the rest) and the object code. Entries are written to a temporary
file and renamed, so that any number of processes may read and write at once; what is damaged or foreign is ignored.

The directory is $GOSSAMER_CACHE_DIR, by default ~/.cache/gossamer; an empty value turns the cache off. Code is loaded from
it into the process, so a directory that others may write to is not used.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("gossamer")


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
        header, _, code = path.read_bytes().partition(b"\n")
        call = json.loads(header)
        if call.pop("sha256") == hashlib.sha256(code).hexdigest():
            return Entry(code, call)
        log.warning("kernel cache: %s is damaged, it is compiled anew", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        log.warning("kernel cache: %s cannot be read (%s), it is compiled anew", path, problem)
    return None


def write(key: str, entry: Entry) -> None:
    """Store an entry; a disk that cannot be written is no error."""
    base = directory()
    if base is None:
        return
    header = json.dumps({**entry.call, "sha256": hashlib.sha256(entry.code).hexdigest()})
    try:
        replace(base / f"{key}.o", header.encode() + b"\n" + entry.code)
    except OSError as problem:
        log.warning("kernel cache: %s cannot be written (%s)", base, problem)


def replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: who reads it meanwhile finds the old content or the new one. OSError if that fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def directory() -> Path | None:
    """The cache directory, made if need be; None if the cache is off or the directory is not ours alone to write."""
    given = os.environ.get("GOSSAMER_CACHE_DIR")
    if given == "":
        return None
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
    except OSError as problem:
        log.warning("kernel cache: %s cannot be made (%s)", base, problem)
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("kernel cache: %s may be written by others, it is not used (chmod go-w)", base)
        return None
    return base
