"""The modules that a graph's inputs lie in, as Dynamo finds them.

Dynamo does not hand modules to a backend. It does say where each parameter comes from: `L['self'].fc.weight`. So the modules
are looked up where Dynamo looks.
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
    """Modules with inputs of a graph in them, at any depth. To be made while Dynamo compiles the frame of `graph`.

    all        each of them
    outermost  those that lie in no other
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._frame = compiled_frame()
        found = _modules(graph, self._frame)
        self.all = list(found.values())
        self.outermost = [owner for owner in self.all if not any(s.name in found for s in _outside(owner[0]))]

    def of_calls(self) -> Callable[[], list[torch.nn.Module]]:
        """A function that finds the outermost modules in the call that runs: other models of a class may share the graph.
        It keeps no module alive. It finds none if the caller is not the frame that Dynamo compiled."""
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
    """What a function's code has in common with what Dynamo makes of it. To keep the code itself would keep the graph."""
    return code.co_filename, code.co_firstlineno, code.co_name


def _modules(graph: fx.Graph, frame: Any) -> dict[str, Owner]:
    """The modules by their sources' names."""
    found, cache = dict[str, Owner](), dict[Any, Any]()
    if frame is None:  # not a graph of Dynamo's
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
    """What a source is taken from, the innermost first; of those that only say more about another one, that other."""
    return [list(same)[-1] for _, same in groupby(outward(source), attrgetter("name"))][1:]
