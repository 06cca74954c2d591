"""Reads and writes the files of the cache safely, in a directory that only this user may write to.

Gossamer runs or trusts the content of these files. So it reads only regular files that this user owns and nobody else may write
to. It refuses a link, a pipe or a socket in place of a file, without waiting for it. All refusals are OSErrors.

Files are written under a temporary name and then renamed. So any number of processes may read and write at once, and a write
that fails leaves nothing behind.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from gossamer.dialects.settings import CACHE_DIR

log = logging.getLogger("gossamer")

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ANYTHING = stat.S_IRWXG | stat.S_IRWXO

TEMPORARY = ".tmp"
"""The suffix of files that are being written, or that a process left behind when it died."""

_AT_ONCE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = stat.S_IRUSR | stat.S_IWUSR


def directory() -> Path | None:
    """Returns the cache directory, and makes it if needed. Returns None if the cache is off or other users may write to it."""
    base = None
    try:
        base = CACHE_DIR.get()
        if base is None:
            return None
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
    except (OSError, RuntimeError, ValueError) as problem:  # RuntimeError: no home; ValueError: a null in the name
        warn_once(f"the cache {base or 'directory'} cannot be created ({problem})")
        return None
    if status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
        warn_once(f"the cache {base} is not used, because other users may write to it (chmod go-w {base})")
        return None
    return base


def read(path: Path, largest: int, forbidden: int = OTHERS_WRITE) -> bytes:
    """Returns the content of a file. Raises OSError unless this user owns it, its mode has none of the `forbidden` bits, and it
    has at most `largest` bytes."""
    with _opened(path, os.O_RDONLY, forbidden) as (file, size):
        if size > largest:
            raise OSError(f"it has {size} bytes, more than {largest}")
        parts = []
        while size and (part := os.read(file, size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def replace(path: Path, content: bytes) -> None:
    """Writes a file as a whole. Another process that reads it meanwhile finds either the old or the new content."""
    with _written(path, content) as name:
        os.replace(name, path)


def create(path: Path, content: bytes) -> None:
    """Writes a file as a whole, unless it exists. If several processes do this at once, the content of the first one stays."""
    with _written(path, content) as name:
        try:
            os.link(name, path)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links: the content of the last process stays
            os.replace(name, path)


def append(path: Path, line: bytes, largest: int) -> None:
    """Appends a line in one write, so that lines of several processes do not mix. First empties a file that would get more than
    `largest` bytes."""
    with _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, OTHERS_WRITE) as (file, size):
        if size + len(line) > largest:
            os.ftruncate(file, 0)
        os.write(file, line)


@cache
def warn_once(message: str) -> None:
    """Logs a warning once for each message, not at every entry of the cache."""
    log.warning("%s", message)


@contextmanager
def _opened(path: Path, flags: int, forbidden: int) -> Iterator[tuple[int, int]]:
    """Opens a file after the checks above. Yields its descriptor and its size."""
    file = os.open(path, flags | _AT_ONCE, _PRIVATE)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"it belongs to user {status.st_uid}")
        if status.st_mode & forbidden:
            raise PermissionError(f"others may access it (mode {stat.S_IMODE(status.st_mode):o})")
        yield file, status.st_size
    finally:
        os.close(file)


@contextmanager
def _written(path: Path, content: bytes) -> Iterator[str]:
    """Yields the name of a temporary file beside `path`, and removes it afterwards unless it was renamed."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield name
    finally:
        with suppress(OSError):
            os.unlink(name)
