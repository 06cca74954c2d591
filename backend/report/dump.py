"""Text of every compilation stage, as numbered files: `0007_encoder.0.fc_fuse-epilogue.mlir`.

Numbers go on from the highest in the directory and are given out under a lock on it, so several compilations, threads or
processes can write into one directory. Beside them `stages.jsonl` says what each file is of, which pass made it from which
file, and where its lines come from.
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

from gossamer.backend.page.stages import STAGES


@dataclass
class Dump:
    """The dump directory during one compilation.

    written  the kernels whose stages are in it already, by what was asked for, each with the name of its region
    """

    directory: str
    written: dict[str, str] = field(default_factory=dict)

    def stages(self, region: str) -> Callable[[str, str, str], None]:
        """An observer for one region: called with a stage's name, file suffix and text, it writes a file."""
        safe = re.sub(r"[^\w.-]+", "-", region).strip("-.") or "region"
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
        """What the page has to know of a file besides its text, which may tell it (see StageText)."""
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
