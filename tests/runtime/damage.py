"""What may happen to a file of the cache: damage of every kind, and what others may put in its place."""

import math
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SOMEBODY_ELSE = 54321


def _link(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _socket(path: Path) -> None:
    path.unlink()
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name}")  # the path itself may be too long for a socket
    os.close(here)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, SOMEBODY_ELSE, -1)


IN_PLACE: dict[str, Callable[[Path], None]] = {
    "pipe": _pipe,
    "socket": _socket,
    "directory": _directory,
    "link": lambda path: _link(path, path.rename(path.with_name("real"))),
    "dangling link": lambda path: _link(path, "nowhere"),
    "link to itself": lambda path: _link(path, path.name),
    "link to an endless device": lambda path: _link(path, "/dev/zero"),
    "somebody else's": _foreign,
    "writable for the group": lambda path: path.chmod(0o620),
    "writable for all": lambda path: path.chmod(0o602),
}
"""What is no file of this user's alone."""

CONTENT: dict[str, bytes] = {
    "empty": b"",
    "no line": b"{",
    "an empty object": b"{}\n",
    "a list": b"[1]\nx",
    "not UTF-8": b'{"a": \xff\xfe}\n',
    "zeros": bytes(4096),
    "deep": b"[" * 1_000_000,
    "deep object": b'{"a":' * 200_000,
    "a long number": b"9" * 100_000,
}
"""What is none of our formats."""

NONSENSE: list[object] = [
    math.nan, math.inf, -math.inf, -1, 0, -0.0, 1e300, 5e-324, 10**400, "", "fast", "1", None, True, [], {}, [[]],
]  # fmt: skip
"""What is no speed, size, or number of anything."""


def variations(value: Any, other: object) -> Iterator[Any]:
    """A value of JSON with one of its parts, or the whole, replaced."""
    if isinstance(value, dict):
        yield from ({**value, name: changed} for name, part in value.items() for changed in variations(part, other))
    elif isinstance(value, list):
        yield from (
            [*value[:i], changed, *value[i + 1 :]] for i, part in enumerate(value) for changed in variations(part, other)
        )
    yield other


def put(path: Path, content: bytes) -> None:
    """Change a file as its owner could."""
    path.write_bytes(content)


def oversized(path: Path, size: int) -> None:
    """Make a file larger without filling the disk."""
    with open(path, "ab") as file:
        file.truncate(size)
