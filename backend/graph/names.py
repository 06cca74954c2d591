"""What a user calls the tensors of a Dynamo graph: by their path in the module, as in its state_dict.

L['self']._modules['fc']._parameters['weight']              → fc.weight
L['args'][0].__dict__['model'].fc.weight                    → model.fc.weight
L['self'].fc.parametrizations.weight.original               → fc.weight
G['adjacency']                                              → adjacency
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import fx

from gossamer.backend.report.graph_breaks import compiled_frame

_HIDDEN = {"_modules", "_parameters", "_buffers", "__dict__", "_orig_mod", "__self__"}
"""Parts of a path that belong to torch and Python."""

_TOP = ("self", "fn")
"""Variables of a compiled module: Python's habit, and torch's own name."""


class Names:
    """Names for the inputs of the graph that Dynamo is compiling now.

    A tensor that lies in no module has the name of its variable.
    """

    def __init__(self) -> None:
        frame = compiled_frame()
        self._code = getattr(frame, "f_code", None)
        self._scope = {"G": getattr(frame, "f_globals", {}), "L": getattr(frame, "f_locals", {})}
        self._values: dict[Any, Any] = {}
        self._paths: dict[int, dict[int, str]] = {}

    def of(self, source: Any, tensor: object) -> str:
        """The name of a tensor that Dynamo took from a source."""
        variable, module = self._outermost_module(source)
        if module is None:
            return user_name(source.name)
        path = self._path(module, tensor) or user_name("L['self']" + source.name.removeprefix(variable))
        prefix = self._prefix(variable, module)
        return f"{prefix}.{path}" if prefix else path

    def _outermost_module(self, source: Any) -> tuple[str, torch.nn.Module | None]:
        """The first module on the way to a source, and the text of its own."""
        for each in reversed(list(outward(source))):
            if (module := module_of(each, self._scope, self._values)) is not None:
                return each.name, module
        return "", None

    def _path(self, module: torch.nn.Module, tensor: object) -> str | None:
        if id(module) not in self._paths:
            self._paths[id(module)] = paths(module)
        return self._paths[id(module)].get(id(tensor))

    def _prefix(self, variable: str, module: torch.nn.Module) -> str:
        """The variable that a module is in; nothing for the module whose method is compiled, and for one behind a function."""
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
    """The names of the parameters and buffers of a module, by the tensors' `id`."""
    found: dict[int, str] = {}
    for name, tensor in chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        found.setdefault(id(tensor), _plain(name.split(".")))
    return found


def user_name(source: str) -> str:
    """The same of the text of a source, or of a qualified name, alone."""
    names = _parts(source)
    if len(names) > 1 and names[0] in _TOP:
        names = names[1:]
    if names and names[0].startswith("___stack"):
        return "a value between two graphs"
    return _plain(names) or source


def place_of(node: fx.Node) -> str:
    """The path of the innermost module that a node of a traced graph belongs to.

    A node that the model itself computes, or a function, is an "attention" with the number that its name has.
    """
    number = re.search(r"_\d+$", node.name)
    return module_path(node) or f"attention{number[0] if number else ''}"


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that a node of a traced graph belongs to; empty for what the model itself computes."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _plain(_parts(stack[-1][0])[1:]) if stack else ""


def _parts(source: str) -> list[str]:
    """A source from its variable on, without what belongs to torch and Python."""
    parts = re.findall(r"\['?([^'\]]*)'?\]|(\w+)", source)
    names = [a or b for a, b in parts if (a or b) not in _HIDDEN]
    return names[1:] if names and names[0] in ("L", "G") else names


def _plain(names: list[str]) -> str:
    """A path without what compilation, parametrizations and torch.nn.utils.prune put into it."""
    name = ".".join(part for part in names if part not in _HIDDEN)
    name = re.sub(r"(^|\.)parametrizations\.(\w+)\.original\d*$", r"\1\2", name)
    return re.sub(r"_(orig|handle)$|(?<=weight)_mask$", "", name)


def module_of(source: Any, scope: dict[str, Any], known: dict[Any, Any]) -> torch.nn.Module | None:
    """The module that a source is, if it is one."""
    try:
        value = source.get_value(scope, {}, known)
    except Exception:  # whatever looking it up may raise: it is none
        return None
    return value if isinstance(value, torch.nn.Module) else None


def outward(source: Any) -> Iterator[Any]:
    """A source and what it is taken from, from the inside out."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)
