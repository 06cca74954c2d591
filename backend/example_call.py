"""Prepares models that `explain` and `profile` call: undoes an earlier torch.compile, and names their tensors."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from gossamer.backend.graph.names import paths
from gossamer.runtime.torch_internals import tree_flatten


def tensor_names(function: Callable[..., Any]) -> dict[int, str]:
    """Returns the full names of the tensors of a model, or of the models that a function uses, by the tensors' ids.

    With graph breaks, Dynamo names tensors relative to a part of the model. These names are the same in all graphs."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.parallel.DistributedDataParallel):
        owner = owner.module
    if isinstance(owner, nn.Module):
        return paths(owner)
    used = _variables(function) if isinstance(function, FunctionType) else {}
    modules = {name: paths(value) for name, value in used.items() if isinstance(value, nn.Module)}
    return {tensor: f"{name}.{path}" for name, found in modules.items() for tensor, path in found.items()}


def _variables(function: FunctionType) -> dict[str, Any]:
    """Returns the variables outside of a function that its code names."""
    return used_globals(function) | {name: cell.cell_contents for name, cell in filled_cells(function).items()}


def used_globals(function: FunctionType) -> dict[str, Any]:
    """Returns the global variables that the code of a function names, or the code of functions in it."""
    values, names, waiting = function.__globals__, dict[str, Any](), [function.__code__]
    while waiting:
        code = waiting.pop()
        names |= {name: values[name] for name in code.co_names if name in values}
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


def filled_cells(function: FunctionType) -> dict[str, CellType]:
    """Returns the variables that a function captures, without those that have no value yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def of_torch(options: Any) -> tuple[dict[str, Any] | None, Any]:
    """Splits options into those that torch.compile reads itself, for any backend, and those of the backend."""
    if not isinstance(options, Mapping):
        return None, options
    taken = {name: value for name, value in options.items() if name in _OF_TORCH}
    return taken or None, {name: value for name, value in options.items() if name not in _OF_TORCH}


_OF_TORCH = ("guard_filter_fn", "use_aoti")


def with_gradients(result: Any) -> list[Tensor]:
    """Returns the tensors of a result that have gradients. Looks into containers and dataclasses."""
    found = list[Tensor]()
    for each in tree_flatten(result)[0]:
        if isinstance(each, Tensor):
            found += [each] if each.requires_grad else []
        elif is_dataclass(each) and not isinstance(each, type):
            found += with_gradients([getattr(each, part.name) for part in fields(each)])
    return found


def uncompile(modules: list[nn.Module]) -> None:
    """Undoes in-place compilation of modules and of their forward methods. `unchanged` restores the compiled state later."""
    for module in modules:
        attributes = vars(module)  # not setattr: torch's wrapper of compiled modules sets attributes of the module inside
        attributes.pop("_compiled_call_impl", None)
        if "forward" in attributes:
            attributes["forward"] = uncompiled(attributes["forward"])


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or module that torch.compile was given, or `model` itself if it is not compiled.

    A function around a compiled one may have its attributes (functools.wraps), and a module those of a module inside. Torch
    compiles neither, so this returns the function without attributes, or the method that calls the module."""
    inside: Any = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
    if inside is not model or not hasattr(inside, "_torchdynamo_orig_callable"):
        return inside
    if getattr(inside, "_torchdynamo_wrapper_id", None) == id(inside):
        return inside._torchdynamo_orig_callable
    if not isinstance(inside, FunctionType):
        return inside.__call__ if isinstance(inside, nn.Module) else inside
    plain = FunctionType(inside.__code__, inside.__globals__, inside.__name__, inside.__defaults__, inside.__closure__)
    plain.__kwdefaults__ = inside.__kwdefaults__
    return plain
