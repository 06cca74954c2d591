"""`gossamer.load_package` loads a package of AOTInductor, and needs no compiler to find out what the processor can do.

    model = gossamer.load_package("model.pt2")
    y = model(x)

`torch._inductor.aoti_load_package` compiles programs for that, and compares the answer with a note in the package. A package of
gossamer.export asks the processor itself when it is loaded. Each call checks its inputs.
"""

import os
import zipfile
from contextlib import suppress
from typing import Any

import torch

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.packages.package_inputs import KEY, PackageInputs
from gossamer.runtime.torch_internals import package_loader, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads


class Package:
    """A loaded package. It takes the arguments of the exported model and returns its results. Its memory is freed with it."""

    def __init__(self, path: str) -> None:
        self._loader = package_loader(path, "model", False, 1, -1)  # one thread at a time, on the package's device
        self._takes, self._gives = map(treespec_loads, self._loader.get_call_spec())
        note = self._loader.get_metadata().get(KEY)
        self._inputs = None if note is None else PackageInputs(note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self._takes.child(1).context
        if kwargs.keys() != set(names):
            raise TypeError(f"the model was exported with the keywords {list(names)}, and is called with {list(kwargs)}")
        flat = self._leaves((args, kwargs))
        tensors = [each for each in flat if isinstance(each, torch.Tensor)]
        found = self._loader.boxed_run(tensors if self._inputs is None else self._inputs.checked(flat))
        return tree_unflatten(found, self._gives)

    def _leaves(self, given: Any) -> list[Any]:
        """Returns the inputs of a call in the order of the exported program. Raises ArgumentError for another structure."""
        leaves: list[Any]
        try:
            leaves = self._takes.flatten_up_to(given)
            return leaves
        except (TypeError, ValueError) as problem:
            leaves, structure = tree_flatten(given)
            with suppress(NotImplementedError, TypeError):  # of structures that torch cannot write as JSON
                if treespec_loads(treespec_dumps(structure)) == self._takes:  # JSON had turned tuples into lists
                    return leaves
            raise ArgumentError(f"the model was exported for arguments of another structure: {problem}") from None


def load_package(path: str | os.PathLike[str]) -> Package:
    """Loads a package that `torch._inductor.aoti_compile_and_package` has made, from a file that ends in .pt2.

    A call of the result raises ArgumentError if its arguments do not fit the exported program: the structure of lists and
    dictionaries, sizes and types of tensors, or the values of other arguments. If the program
    is not of `gossamer.export`, the package does not list sizes, types and values, so Gossamer checks only the structure.

    Raises FileNotFoundError, ArgumentError if the file is no package, and RuntimeError if this processor lacks a feature that
    the package needs.
    """
    file = os.fspath(path)
    if not os.path.isfile(file):
        raise FileNotFoundError(f"there is no file {file}")
    if not _is_package(file):
        raise ArgumentError(f"{file} is no package. Make one by gossamer.export and aoti_compile_and_package of AOTInductor")
    return Package(file)


def _is_package(file: str) -> bool:
    """Whether a file has compiled code. Files of torch.export.save have the same ending, but only a graph."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as found:
        return any("/data/aotinductor/" in name for name in found.namelist())
