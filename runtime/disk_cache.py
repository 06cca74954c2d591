"""Object code on disk, so that the next process starts without compiling.

An entry is one file, named by the hash of all that the code depends on: kernel IR, target, versions.

    signature (32 bytes)   of the checksum, with the user's key (see `cache_key`)
    checksum (32 bytes)    SHA-256 of the name and of all that follows
    a line of JSON         what is needed to call the code
    object code            or a pickled graph, or nothing

Nothing is parsed, unpickled or run before signature and checksum are right: what is damaged or foreign is ignored. Beyond
512 MB the entries that were not used for longest are removed.

Torch's portable cache takes the entries along that a process has used, without their signatures. What
`torch.compiler.load_cache_artifacts` is given is signed with the key of the user who calls it, which says that they trust it:
whoever made those bytes decides what code runs. That holds for torch's own parts of them just as well.
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
"""Bytes of all entries from which on old ones are removed, down to three quarters of it. No entry is larger."""

_CHECKED = 8 << 20
"""Bytes that a process writes before it looks again whether there is too much; it does so at its first entry, too."""

_ABANDONED = 3600
"""Seconds after which a temporary file belongs to a process that died."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size

_unchecked = _CHECKED


@dataclass(frozen=True)
class Entry:
    """Object code, and `call`: what is needed to call it, as JSON can hold it."""

    code: bytes
    call: dict[str, Any]


def read(key: str) -> Entry | None:
    """The entry of this key, None if there is none that is whole and written by this user."""
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
        os.utime(path, follow_symlinks=False)  # it is used
    take_along(_Artifact, key, content)
    return entry


def write(key: str, entry: Entry) -> None:
    """Store an entry; a disk that cannot be written is no error."""
    base = cache_files.directory()
    if base is None:
        return
    content = _encoded(key, entry)
    take_along(_Artifact, key, content)
    _store(base, key, content)


def portable(kind: type[CacheArtifact]) -> type[CacheArtifact]:
    """Has torch unpack artifacts of a kind."""
    return kind if off(PORTABLE_CACHE) else CacheArtifactFactory.register(kind)


def take_along(kind: type[CacheArtifact], key: str, content: bytes) -> None:
    """Puts an artifact into what torch's portable cache saves next."""
    if not off(PORTABLE_CACHE):
        CacheArtifactManager.record_artifact(kind.type(), key, content)


def is_name(key: str) -> bool:
    """Whether the key of an artifact can be the name of a file in the cache: it leads nowhere else."""
    return re.fullmatch(r"[\w-]{1,128}", key, re.ASCII) is not None


@portable
class _Artifact(CacheArtifact):
    """An entry in torch's portable cache; its key says for which machine it is."""

    def populate_cache(self) -> None:
        base = cache_files.directory()
        if base is None or not is_name(self.key):
            return
        try:
            _decoded(self.key, self.content)
        except (ValueError, RecursionError) as problem:  # RecursionError: a list in a list in a list …
            log.warning("kernel cache: the artifact %s is left out (%s)", self.key, problem)
        else:
            _store(base, self.key, self.content)

    @staticmethod
    def type() -> str:
        return "gossamer"


def _encoded(key: str, entry: Entry) -> bytes:
    """An entry with its checksum."""
    stored = json.dumps(entry.call).encode() + b"\n" + entry.code
    return _checksum(key, stored) + stored


def _decoded(key: str, content: bytes) -> Entry:
    """ValueError if it is not whole, or not what was stored under this key."""
    if content[:_CHECKSUM_BYTES] != _checksum(key, memoryview(content)[_CHECKSUM_BYTES:]):
        raise ValueError("it is damaged")
    end = content.index(b"\n", _CHECKSUM_BYTES)
    return Entry(content[end + 1 :], json.loads(content[_CHECKSUM_BYTES:end]))


def _checksum(key: str, stored: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(f"{key}\n".encode())
    checksum.update(stored)
    return checksum.digest()


def _verified(base: Path, signed: bytes) -> bytes:
    """What follows the signature. ValueError if that is not this user's."""
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
    """Removes what dead processes left behind and, where there is too much, the entries that were not used for longest."""
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
