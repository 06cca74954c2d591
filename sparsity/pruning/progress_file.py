"""Writes finished layers of a long run of `prune` to disk, so that an interrupted run can go on."""

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.pruning.layers import Layer


class Done(NamedTuple):
    """A pruned layer: its weight [outputs, inputs], its bias, its line in the report, and both parameters before."""

    weight: Tensor
    bias: Tensor | None
    line: dict[str, Any]
    dense_weight: Tensor
    dense_bias: Tensor | None


class ProgressFile:
    """A folder with one file per stage, and the run's `settings`. OptionError if the folder holds a run with other settings."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise OptionError(f"resume is '{self._folder}', which is a file: give a folder, which may be new") from None
        self.done: dict[str, Done] = {}
        self._new: dict[str, Done] = {}
        self._number = 0
        head = self._folder / "settings.pt"
        if not head.exists():
            _write(head, settings)
        elif (found := _read(head)) != settings:
            differ = [name for name in settings if found.get(name) != settings[name]]
            raise OptionError(
                f"{self._folder} holds a run with other settings ({', '.join(differ)}): take another folder for `resume`"
            )
        for path in sorted(self._folder.glob("stage-*.pt")):
            self.done |= {name: Done(*parts) for name, parts in _read(path).items()}
            self._number += 1

    def start_again(self, layers: list[Layer]) -> None:
        """Gives finished layers their dense weights back, because the interrupted run may have left pruned ones.

        OptionError if the model has neither the dense nor the pruned weights of that run.
        """
        for layer in (each for each in layers if each.name in self.done):
            done, weight = self.done[layer.name], layer.weight.cpu()
            if not any(torch.equal(weight, each.cpu()) for each in (done.dense_weight, done.weight)):
                raise OptionError(
                    f"{self._folder} holds a run of another model, whose '{layer.name}' has other values: take another folder "
                    "for `resume`"
                )
        for layer in (each for each in layers if each.name in self.done):
            layer.write(self.done[layer.name].dense_weight, self.done[layer.name].dense_bias)

    def add(self, name: str, done: Done) -> None:
        """Remembers a finished layer, which the next `write` puts on disk."""
        self._new[name] = done

    def write(self) -> None:
        """Writes the layers of a finished stage to a file."""
        if self._new:
            _write(self._folder / f"stage-{self._number:04}.pt", {name: tuple(done) for name, done in self._new.items()})
            self._number += 1
            self._new = {}


def _write(path: Path, what: object) -> None:
    unfinished = path.with_suffix(".part")
    torch.save(what, unfinished)
    unfinished.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as problem:
        why = str(problem).partition("\n")[0]
        raise OptionError(f"{path} is broken ({why}): remove it, and its layers are pruned again") from None
    return found
