"""Models that `explain`, `profile` and others call as examples: as nobody has compiled them, with names for their tensors."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from gossamer.backend.graph.names import paths


def tensor_names(function: Callable[..., Any]) -> dict[int, str]:
    """The names that tensors of a model, or of those that a function uses, have in graphs of their parts, too."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.parallel.DistributedDataParallel):
        owner = owner.module
    if isinstance(owner, nn.Module):
        return paths(owner)
    variables = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    used = {**variables.globals, **variables.nonlocals} if variables is not None else {}
    modules = {name: paths(value) for name, value in used.items() if isinstance(value, nn.Module)}
    return {tensor: f"{name}.{path}" for name, found in modules.items() for tensor, path in found.items()}


def uncompile(modules: list[nn.Module]) -> None:
    """Makes modules that are compiled in place, or hold a compiled forward, what they were. Not for good: see `unchanged`."""
    for module in modules:
        attributes = vars(module)  # beside torch's wrapper of compiled modules, which sets attributes of another one
        attributes.pop("_compiled_call_impl", None)
        if "forward" in attributes:
            attributes["forward"] = uncompiled(attributes["forward"])


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, if it was."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        model = getattr(model, attribute, model)
    return model
