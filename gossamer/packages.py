"""`gossamer.load_package` loads a package of AOTInductor, and needs no compiler to find out what the processor can do.

    model = gossamer.load_package("model.pt2")
    y = model(x)

`torch._inductor.aoti_load_package` compiles programs for that, and compares the answer with a note in the package. A package of
gossamer.export asks the processor itself when it is loaded. Each call checks its inputs.
"""

import os
import zipfile
from typing import Any

import torch

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.packages.package_inputs import KEY, PackageInputs
from gossamer.runtime.torch_internals import package_loader, tree_flatten, tree_unflatten, treespec_loads


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
        flat, _ = tree_flatten((args, {name: kwargs[name] for name in names}))
        tensors = [each for each in flat if isinstance(each, torch.Tensor)]
        found = self._loader.boxed_run(tensors if self._inputs is None else self._inputs.checked(tensors))
        return tree_unflatten(found, self._gives)


def load_package(path: str | os.PathLike[str]) -> Package:
    """Loads a package that `torch._inductor.aoti_compile_and_package` has made, from a file that ends in .pt2.

    A call of the result raises ArgumentError if sizes or types of tensors are not those of the exported program. If the program
    is not of `gossamer.export`, the package does not list these sizes and types, so Gossamer checks nothing.

    Raises FileNotFoundError, ArgumentError if the file is no package, and RuntimeError if this processor lacks a feature that
    the package needs.
    """
    file = os.fspath(path)
    if not os.path.isfile(file):
        raise FileNotFoundError(f"there is no file {file}")
    if not zipfile.is_zipfile(file):
        raise ArgumentError(f"{file} is no package. Make one by gossamer.export and aoti_compile_and_package of AOTInductor")
    return Package(file)
