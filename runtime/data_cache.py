"""Finds the size of the first-level data cache. Schedules choose panels of a weight that fit into it."""

from functools import cache
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL = 32 << 10
_POSSIBLE = range(4 << 10, (1 << 20) + 1)  # virtual machines have reported 0K


@cache
def first_level_bytes() -> int:
    """Returns the bytes of a core's first-level data cache as Linux reports it; 32 KiB if it reports none."""
    for entry in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((entry / name).read_text().strip() for name in ("level", "type", "size"))
            if level == "1" and kind != "Instruction" and (bytes_ := int(size.removesuffix("K")) << 10) in _POSSIBLE:
                return bytes_
        except (OSError, ValueError):
            continue
    return _USUAL
