"""Finds the users' names of tensors in a Dynamo graph: their paths in the module, as in its state_dict.

L['self']._modules['fc']._parameters['weight']              → fc.weight
L['args'][0].__dict__['model'].fc.weight                    → model.fc.weight
L['self'].fc.parametrizations.weight.original               → fc.weight
G['adjacency']                                              → adjacency
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gossamer.backend.report.graph_breaks import compiled_frame

_HIDDEN = {"_modules", "_parameters", "_buffers", "__dict__", "_orig_mod", "__self__"}
"""Parts of a path that come from torch and Python, not from the user."""

_TOP = ("self", "fn")
"""Usual names of the variable that has the compiled module: in methods, and in torch's wrappers."""


class Names:
    """Finds names for the inputs of the graph that Dynamo is compiling now.

    The name of a tensor that is in no module is its variable.
    """

    def __init__(self) -> None:
        frame = compiled_frame()
        self._code = getattr(frame, "f_code", None)
        self._scope = {"G": getattr(frame, "f_globals", {}), "L": getattr(frame, "f_locals", {})}
        self._values: dict[Any, Any] = {}
        self._paths: dict[int, dict[int, str]] = {}

    def of(self, source: Any, tensor: object) -> str:
        """Returns the name of a tensor that Dynamo read from a source."""
        variable, module = self._outermost_module(source)
        if module is None:
            return user_name(source.name)
        path = self._path(module, tensor) or user_name("L['self']" + source.name.removeprefix(variable))
        prefix = self._prefix(variable, module)
        return f"{prefix}.{path}" if prefix else path

    def _outermost_module(self, source: Any) -> tuple[str, torch.nn.Module | None]:
        """Returns the outermost module on the path to a source, and the text of that module's source."""
        for each in reversed(list(outward(source))):
            if (module := module_of(each, self._scope, self._values)) is not None:
                return each.name, module
        return "", None

    def _path(self, module: torch.nn.Module, tensor: object) -> str | None:
        if id(module) not in self._paths:
            self._paths[id(module)] = paths(module)
        return self._paths[id(module)].get(id(tensor))

    def _prefix(self, variable: str, module: torch.nn.Module) -> str:
        """Returns the variable that has a module. Returns "" for the module whose method Dynamo compiles, and for a module
        that Dynamo reached through a function's attributes."""
        if "." in variable:
            return ""
        name = re.match(r"[LG]\['([^']*)'\]", variable)
        called = re.sub(r"^torch_dynamo_resume_in_(\w+)_at_\d+$", r"\1", getattr(self._code, "co_name", ""))
        codes = [getattr(getattr(type(module), each, None), "__code__", None) for each in (called, "forward")]
        methods = [code for code in codes if code is not None and code.co_name == called]
        own = any(name is not None and method.co_varnames[:1] == (name[1],) for method in methods)
        prefix = user_name(variable)
        return "" if own or prefix in _TOP else prefix


def paths(module: torch.nn.Module) -> dict[int, str]:
    """Returns the names of the parameters and buffers of a module, by the tensors' `id`.

    A name keeps the part that parametrizations add if another tensor has the name without it."""
    found: dict[int, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    own = dict(tensors)
    for name, tensor in tensors:
        plain = _plain(name.split("."))
        found.setdefault(id(tensor), plain if own.get(plain, tensor) is tensor else name)
    return found


def user_name(source: str) -> str:
    """Returns a user's name from the text of a source, or from a qualified name."""
    names = _parts(source)
    if len(names) > 1 and names[0] in _TOP:
        names = names[1:]
    if names and names[0].startswith("___stack"):
        return "a value between two graphs"
    variable = re.fullmatch(r"[LG]\['(\w+)'\]", source)
    return variable[1] if variable else _plain(names) or source


def place_of(node: fx.Node) -> str:
    """Returns the path of the innermost module that a node of a traced graph belongs to.

    If the node belongs to the model itself or to a function, returns "attention" with the number in the node's name.
    """
    number = re.search(r"_\d+$", node.name)
    return module_path(node) or f"attention{number[0] if number else ''}"


def module_path(node: fx.Node) -> str:
    """Returns the path of the innermost module that a node of a traced graph belongs to; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _plain(_parts(stack[-1][0])[1:]) if stack else ""


def _parts(source: str) -> list[str]:
    """Splits a source into its parts, from the variable on, without those of torch and Python."""
    parts = re.findall(r"\['?([^'\]]*)'?\]|(\w+)", source)
    names = [a or b for a, b in parts if (a or b) not in _HIDDEN]
    return names[1:] if names and names[0] in ("L", "G") else names


def _plain(names: list[str]) -> str:
    """Joins a path, without the parts that compilation, parametrizations and torch.nn.utils.prune add."""
    name = ".".join(part for part in names if part not in _HIDDEN)
    name = re.sub(r"(^|\.)parametrizations\.(\w+)\.original\d*$", r"\1\2", name)
    return re.sub(r"_(orig|handle)$|(?<=weight)_mask$", "", name)


def module_of(source: Any, scope: dict[str, Any], known: dict[Any, Any]) -> torch.nn.Module | None:
    """Returns the value of a source if it is a module, or None."""
    try:
        value = source.get_value(scope, {}, known)
    except Exception:  # the look-up may run any code, and so raise any error
        return None
    return value if isinstance(value, torch.nn.Module) else None


def outward(source: Any) -> Iterator[Any]:
    """Yields a source and the sources that contain it, from the inside out."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)
