"""What is done of a long run, on disk, so that it goes on where it was broken off."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import OptionError

Done = dict[str, tuple[Tensor, Tensor | None, dict[str, Any]]]
"""Of a layer: its weight [outputs, inputs], its bias, its line in the report."""


class ProgressFile:
    """A folder with a file a stage. `settings` say what the run is; those of another run are refused."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.done: Done = {}
        self._new: Done = {}
        self._number = 0
        head = self._folder / "settings.pt"
        if not head.exists():
            _write(head, settings)
        elif (found := torch.load(head)) != settings:
            differ = [name for name in settings if found.get(name) != settings[name]]
            raise OptionError(
                f"{self._folder} holds a run with other settings ({', '.join(differ)}): take another folder for `resume`"
            )
        for path in sorted(self._folder.glob("stage-*.pt")):
            self.done |= torch.load(path)
            self._number += 1

    def add(self, name: str, weight: Tensor, bias: Tensor | None, line: dict[str, Any]) -> None:
        """A layer is done; `write` puts it on disk."""
        self._new[name] = (weight, bias, line)

    def write(self) -> None:
        """A stage is done."""
        if self._new:
            _write(self._folder / f"stage-{self._number:04}.pt", self._new)
            self._number += 1
            self._new = {}


def _write(path: Path, what: object) -> None:
    unfinished = path.with_suffix(".part")
    torch.save(what, unfinished)
    unfinished.replace(path)
