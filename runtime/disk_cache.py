"""Keeps object code on disk, so that the next process starts without compiling.

An entry is one file. Its name is the hash of everything that the code depends on: kernel IR, target, versions.

    signature (32 bytes)   of the checksum, with the user's key (see `cache_key`)
    checksum (32 bytes)    SHA-256 of the name and of all that follows
    a line of JSON         the facts that a caller of the code needs
    object code            or a pickled graph, or nothing

Signature and checksum are checked before anything is parsed, unpickled or run. Damaged or foreign entries are ignored. When the
entries exceed 512 MB, those that were not used for the longest time are removed.

Torch's portable cache (`torch.compiler.save_cache_artifacts`) includes the entries that a process has used, without their
signatures. `torch.compiler.load_cache_artifacts` signs them with the key of the user who calls it. With this call, the user
trusts the bytes: whoever made them decides which code runs. The same holds for torch's own parts of the bytes.
"""

import hashlib
import json
import logging
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.runtime import cache_files
from gossamer.runtime.cache_key import SIGNATURE_BYTES, is_signature, signature
from gossamer.runtime.torch_internals import CacheArtifact, CacheArtifactFactory, CacheArtifactManager, off
from gossamer.runtime.torch_names import PORTABLE_CACHE

log = logging.getLogger("gossamer")

_LARGEST = 512 << 20
"""Most bytes of all entries. Beyond it, old entries are removed until three quarters are left. No single entry is larger."""

_CHECKED = 8 << 20
"""Bytes that a process writes before it checks the size of the cache again. It also checks at its first entry."""

_ABANDONED = 3600
"""Seconds after which a temporary file counts as left behind by a process that died."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size

_unchecked = _CHECKED


@dataclass(frozen=True)
class Entry:
    """Object code, and in `call` the facts that its caller needs, as JSON values."""

    code: bytes
    call: dict[str, Any]


def read(key: str) -> Entry | None:
    """Returns the entry of this key; None unless there is an undamaged one that this user wrote."""
    base = cache_files.directory()
    if base is None:
        return None
    path = base / f"{key}.o"
    try:
        content = _verified(base, cache_files.read(path, _LARGEST))
        entry = _decoded(key, content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        log.warning("kernel cache: %s cannot be read (%s), it is compiled anew", path, problem)
        return None
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)  # marks it as used now
    take_along(_Artifact, key, content)
    return entry


def write(key: str, entry: Entry) -> None:
    """Stores an entry. It is no error if the disk cannot be written."""
    base = cache_files.directory()
    if base is None:
        return
    content = _encoded(key, entry)
    take_along(_Artifact, key, content)
    _store(base, key, content)


def portable(kind: type[CacheArtifact]) -> type[CacheArtifact]:
    """Registers a kind of artifacts, so that torch's portable cache unpacks them. Returns the kind."""
    return kind if off(PORTABLE_CACHE) else CacheArtifactFactory.register(kind)


def take_along(kind: type[CacheArtifact], key: str, content: bytes) -> None:
    """Adds an artifact to those that torch's portable cache saves next."""
    if not off(PORTABLE_CACHE):
        CacheArtifactManager.record_artifact(kind.type(), key, content)


def is_name(key: str) -> bool:
    """Whether the key of an artifact is safe as a file name: it must not lead out of the cache directory."""
    return re.fullmatch(r"[\w-]{1,128}", key, re.ASCII) is not None


@portable
class _Artifact(CacheArtifact):
    """An entry in torch's portable cache. Its key depends on the machine that it is for."""

    def populate_cache(self) -> None:
        base = cache_files.directory()
        if base is None or not is_name(self.key):
            return
        try:
            _decoded(self.key, self.content)
        except (ValueError, RecursionError) as problem:  # RecursionError: deeply nested lists
            log.warning("kernel cache: the artifact %s is left out (%s)", self.key, problem)
        else:
            _store(base, self.key, self.content)

    @staticmethod
    def type() -> str:
        return "gossamer"


def _encoded(key: str, entry: Entry) -> bytes:
    """Returns the bytes of an entry, its checksum first."""
    stored = json.dumps(entry.call).encode() + b"\n" + entry.code
    return _checksum(key, stored) + stored


def _decoded(key: str, content: bytes) -> Entry:
    """Returns the entry in these bytes. Raises ValueError if they are damaged, or were stored under another key."""
    if content[:_CHECKSUM_BYTES] != _checksum(key, memoryview(content)[_CHECKSUM_BYTES:]):
        raise ValueError("it is damaged")
    end = content.index(b"\n", _CHECKSUM_BYTES)
    return Entry(content[end + 1 :], json.loads(content[_CHECKSUM_BYTES:end]))


def _checksum(key: str, stored: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(f"{key}\n".encode())
    checksum.update(stored)
    return checksum.digest()


def _verified(base: Path, signed: bytes) -> bytes:
    """Returns the bytes after the signature. Raises ValueError if this user's key did not sign them."""
    content = signed[SIGNATURE_BYTES:]
    if not is_signature(base, content[:_CHECKSUM_BYTES], signed[:SIGNATURE_BYTES]):
        raise ValueError("it is damaged, or not signed with this user's key")
    return content


def _store(base: Path, key: str, content: bytes) -> None:
    if len(content) + SIGNATURE_BYTES > _LARGEST:
        log.info("kernel cache: %s has %d bytes, which is too much to keep", key, len(content))
        return
    try:
        cache_files.replace(base / f"{key}.o", signature(base, content[:_CHECKSUM_BYTES]) + content)
        global _unchecked
        _unchecked += len(content)
        if _unchecked > _CHECKED:
            _unchecked = 0
            _make_room(base)
    except OSError as problem:
        log.warning("kernel cache: %s cannot be written (%s)", base / f"{key}.o", problem)


def _make_room(base: Path) -> None:
    """Removes temporary files of dead processes and, if the cache is too large, the entries not used for the longest time."""
    entries, now = [], time.time()
    with os.scandir(base) as files:
        for file in files:
            with suppress(OSError):  # another process was faster
                status = file.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    continue
                if file.name.endswith(".o"):
                    entries.append((status.st_mtime, status.st_size, file.path))
                elif file.name.endswith(cache_files.TEMPORARY) and now - status.st_mtime > _ABANDONED:
                    os.unlink(file.path)
    size = sum(entry[1] for entry in entries)
    if size <= _LARGEST:
        return
    for _, bytes_, path in sorted(entries):
        if size <= _LARGEST * 3 / 4:
            break
        with suppress(OSError):
            os.unlink(path)
        size -= bytes_
