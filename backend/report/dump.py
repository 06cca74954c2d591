"""Writes the text of every compilation stage to numbered files: `0007_encoder.0.fc_fuse-epilogue.mlir`.

Numbers continue from the highest one in the directory. A lock on the directory protects them, so several compilations, threads
or processes can write into one directory. `stages.jsonl` says for each file which region it belongs to, which pass made it from
which file, and where its lines come from.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from zlib import crc32

from gossamer.backend.page.stages import STAGES


@dataclass
class Dump:
    """The dump directory during one compilation.

    written  the kernels whose stages it has already: from the request for the kernel to the name of its region
    """

    directory: str
    written: dict[str, str] = field(default_factory=dict)

    def stages(self, region: str) -> Callable[[str, str, str], None]:
        """Returns an observer for one region. It is called with a stage's name, file suffix and text, and writes a file."""
        safe = _short(re.sub(r"[^\w.-]+", "-", region).strip("-.") or "region")
        last: dict[str, str] = {}

        def write(stage: str, suffix: str, text: str) -> None:
            name = f"{safe}_{re.sub(r'[^a-zA-Z0-9.-]+', '-', stage)}.{suffix}"
            with self._locked():
                file = f"{self._highest() + 1:04d}_{name}"
                with open(os.path.join(self.directory, file), "x", encoding="utf-8") as out:
                    out.write(text)
                self._note(file, region, stage, text, last.get(suffix, ""))
            last[suffix] = file

        return write

    def _note(self, file: str, region: str, stage: str, text: str, before: str) -> None:
        """Adds a line to stages.jsonl with the data that the page needs about a file. Some is in the text (see StageText)."""
        origins = [[len(list(run)), list(lines)] for lines, run in groupby(getattr(text, "origins", ()))]
        noted: dict[str, Any] = {"file": file, "region": region, "stage": stage, "before": before}
        noted |= {"pass": getattr(text, "label", ""), "origins": origins}
        with open(os.path.join(self.directory, STAGES), "a", encoding="utf-8") as out:
            out.write(json.dumps(noted) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _highest(self) -> int:
        numbers = (re.match(r"(\d{4,})_", name) for name in os.listdir(self.directory))
        return max((int(n.group(1)) for n in numbers if n), default=0)


def _short(name: str) -> str:
    """Returns the end of a name that is too long for a file, after a number that tells such names apart."""
    text = name.encode()
    return name if len(text) <= _LONGEST else f"{crc32(text):08x}-{text[-_LONGEST + 9 :].decode(errors='ignore')}"


_LONGEST = 160
"""Bytes of a region's name in the name of a file, which may have 255."""
