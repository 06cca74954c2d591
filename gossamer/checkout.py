"""Finds the packages of Gossamer: in this folder if it was installed from a wheel, beside it in a checkout.

Python finds a checkout that is the current folder before an installed package, so the checkout must be complete.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOMS = ("backend", "sparsity", "passes", "runtime", "dialects")


class Beside(MetaPathFinder):
    """Finds the packages in `ROOMS` in the folder of a checkout, and no other module that lies there."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, room = name.rpartition(".")
        if parent != __package__ or room not in ROOMS:
            return None
        folder = self._root / room
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def beside(folder: Path) -> list[str]:
    """Returns [the checkout] if the packages lie beside the folder of `gossamer`, [] if they lie in it.

    Raises ImportError for a checkout that nobody has installed for this Python.
    """
    root = folder.parent
    if (folder / ROOMS[-1]).is_dir() or not all((root / room / "__init__.py").is_file() for room in ROOMS):
        return []
    if not _elsewhere(root, (str(each.locate_file("")) for each in distributions(name="gossamer"))):
        raise ImportError(
            f"{root} is a checkout of Gossamer that is not installed for {sys.executable}. Run `make smoke` there and use "
            f"{root / '.venv/bin/python'}, or install it: {sys.executable} -m pip install --editable '{root}'"
        )
    return [str(root)]


def _elsewhere(root: Path, installed: Iterable[str]) -> bool:
    """Whether Gossamer is installed outside the checkout. Metadata inside do not count, because a build leaves them there."""
    return any(Path(place).resolve() != root.resolve() for place in installed)
