"""Text of every compilation stage, as numbered files: `0007_encoder.0.fc_fuse-epilogue.mlir`.

Numbers go on from the highest in the directory and are given out under a lock on it, so several compilations, threads or
processes can write into one directory.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Dump:
    """The dump directory during one compilation; `written` are the kernels whose stages are in it already."""

    directory: str
    written: set[str] = field(default_factory=set)

    def stages(self, region: str) -> Callable[[str, str, str], None]:
        """An observer for one region: called with a stage's name, file suffix and text, it writes a file."""
        safe = re.sub(r"[^\w.-]+", "-", region).strip("-.") or "region"

        def write(stage: str, suffix: str, text: str) -> None:
            name = f"{safe}_{re.sub(r'[^a-zA-Z0-9.-]+', '-', stage)}.{suffix}"
            with self._locked():
                path = os.path.join(self.directory, f"{self._highest() + 1:04d}_{name}")
                with open(path, "x", encoding="utf-8") as file:
                    file.write(text)

        return write

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
