"""Remembers plans on disk. A region that some process has compiled finds its kernel again without MLIR.

    request (a region's body, types, hints; target; versions)   →   schedule, formats, key of the machine code

A note is an entry of the kernel cache without code. Losing it costs one compilation, as for any entry.
"""

import hashlib
from dataclasses import dataclass
from typing import Self

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, parse
from gossamer.runtime import disk_cache


@dataclass(frozen=True)
class Note:
    """The part of a plan that is needed to call its kernel. Its fields are explained in `pipelines.Plan` and `RegionKernel`."""

    key: str
    schedule: str
    formats: tuple[Format | Packing | None, ...]
    sized: tuple[bool, ...]
    numbers: tuple[bool, ...]

    @classmethod
    def read(cls, request: str) -> Self | None:
        """Returns the note on a request; None if there is none."""
        entry = disk_cache.read(_key(request))
        if entry is None:
            return None
        known = entry.call
        formats = tuple(_parse(text) for text in known["formats"])
        return cls(known["key"], known["schedule"], formats, tuple(known["sized"]), tuple(known["numbers"]))

    def write(self, request: str) -> None:
        """Stores the note for later processes."""
        formats = [_text(format) for format in self.formats]
        known = {
            "key": self.key, "schedule": self.schedule, "formats": formats,
            "sized": list(self.sized), "numbers": list(self.numbers),
        }  # fmt: skip
        disk_cache.write(_key(request), disk_cache.Entry(b"", known))


def _key(request: str) -> str:
    return f"plan-{hashlib.sha256(request.encode()).hexdigest()[:32]}"


def _text(format: Format | Packing | None) -> str | None:
    return f'"{format}"' if isinstance(format, Packing) else None if format is None else str(format)


def _parse(text: str | None) -> Format | Packing | None:
    return None if text is None else parse(text)
