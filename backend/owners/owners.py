"""Finds the modules that own a graph's inputs.

Dynamo does not pass modules to a backend. But it tells the source of each parameter, such as `L['self'].fc.weight`. So Gossamer
looks up the modules in the same frame as Dynamo.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.names import module_of, outward
from gossamer.backend.report.graph_breaks import compiled_frame

Owner = tuple[Any, torch.nn.Module]
"""The source of a module, and the module."""


class Owners:
    """The modules that own inputs of a graph, at any depth. Make this while Dynamo compiles the frame of `graph`.

    all        all of these modules
    outermost  those that are in no other module
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._frame = compiled_frame()
        found = _modules(graph, self._frame)
        self.all = list(found.values())
        self.outermost = [owner for owner in self.all if not any(s.name in found for s in _outside(owner[0]))]

    def of_calls(self) -> Callable[[], list[torch.nn.Module]]:
        """Returns a function that finds the outermost modules of the call that runs, as other models may share the graph.

        The function keeps no module alive. It returns an empty list if its callers do not include the frame that Dynamo
        compiled.
        """
        return partial(_in_call, None if self._frame is None else _place(self._frame.f_code), [s for s, _ in self.outermost])


def _in_call(place: Any, sources: list[Any]) -> list[torch.nn.Module]:
    frame = sys._getframe(1)
    while _place(frame.f_code) != place:
        if frame.f_back is None:
            return []
        frame = frame.f_back
    scope = {"G": frame.f_globals, "L": frame.f_locals}
    found = [module_of(source, scope, {}) for source in sources]
    return [module for module in found if module is not None]


def _place(code: CodeType) -> tuple[str, int, str]:
    """Returns what a function's code shares with Dynamo's version of it. The code itself would keep the graph alive."""
    return code.co_filename, code.co_firstlineno, code.co_name


def _modules(graph: fx.Graph, frame: Any) -> dict[str, Owner]:
    """Returns the modules by their sources' names."""
    found, cache = dict[str, Owner](), dict[Any, Any]()
    if frame is None:  # the graph is not from Dynamo
        return found
    scope = {"G": frame.f_globals, "L": frame.f_locals}
    for node in graph.find_nodes(op="placeholder"):
        for outer in _outside(getattr(node.meta.get("grapharg"), "source", None)):
            if outer.name in found:
                break
            if (module := module_of(outer, scope, cache)) is not None:
                found[outer.name] = outer, module
    return found


def _outside(source: Any) -> list[Any]:
    """Returns the sources that contain a source, the innermost first. Of several with one name, returns the outermost."""
    return [list(same)[-1] for _, same in groupby(outward(source), attrgetter("name"))][1:]
