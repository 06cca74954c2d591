"""Prepares models that `explain` and `profile` call: undoes an earlier torch.compile, and names their tensors."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from gossamer.backend.graph.names import paths


def tensor_names(function: Callable[..., Any]) -> dict[int, str]:
    """Returns the full names of the tensors of a model, or of the models that a function uses, by the tensors' ids.

    With graph breaks, Dynamo names tensors relative to a part of the model. These names are the same in all graphs."""
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
    """Undoes in-place compilation of modules and of their forward methods. `unchanged` restores the compiled state later."""
    for module in modules:
        attributes = vars(module)  # not setattr: torch's wrapper of compiled modules sets attributes of the module inside
        attributes.pop("_compiled_call_impl", None)
        if "forward" in attributes:
            attributes["forward"] = uncompiled(attributes["forward"])


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or module that torch.compile was given, or `model` itself if it is not compiled."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        model = getattr(model, attribute, model)
    return model
