"""The modules that a graph's inputs lie in, as Dynamo finds them.

Dynamo does not hand modules to a backend. It does say where each parameter comes from: `L['self'].fc.weight`. So the modules
are looked up where Dynamo looks.
"""

from itertools import groupby
from operator import attrgetter
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
        found = _modules(graph)
        self.all = list(found.values())
        self.outermost = [owner for owner in self.all if not any(s.name in found for s in _outside(owner[0]))]


def _modules(graph: fx.Graph) -> dict[str, Owner]:
    """The modules by their sources' names."""
    frame = compiled_frame()
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
