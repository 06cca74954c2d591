"""Finds the nodes of Dynamo's graph that run in another mode than the graph, as under torch.no_grad() or torch.vmap.

y = linear(x, w)
_set_grad_enabled(False)        changes_mode(node)
largest = y.amax(-1)            in Modes.of(graph).without_gradients
_set_grad_enabled(True)
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

_AUTOCAST = {"_enter_autocast", "_exit_autocast"}
_INFERENCE = {"_enter_inference_mode", "_exit_inference_mode", "inference_mode"}
_UP, _DOWN = "_increment_nesting", "_decrement_nesting"
_REVERSE = {"_grad_increment_nesting", "grad"}
"""Begins of torch.func.grad, vjp and jacrev, and calls of autograd, which Dynamo traces if the user has configured it so."""


def changes_mode(node: fx.Node) -> bool:
    """Whether a node changes how the nodes after it compute."""
    name = _name(node)
    return name == "_set_grad_enabled" or name in _AUTOCAST or name in _INFERENCE or name.endswith((_UP, _DOWN))


def takes_gradients(module: fx.GraphModule) -> bool:
    """Whether a graph, or one that it calls, computes gradients by itself, as with torch.func.grad."""
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    return any(_name(node) in _REVERSE or node.target == "backward" for graph in graphs for node in graph.nodes)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


@dataclass
class Modes:
    """The nodes of a graph that run in other modes than at its begin.

    without_gradients  those that record no gradients, although the graph does
    with_gradients     those that record gradients, although the graph does not
    transformed        those under a transform of torch.func, such as torch.vmap
    cast               those under an autocast of their own
    """

    without_gradients: set[fx.Node] = field(default_factory=set)
    with_gradients: set[fx.Node] = field(default_factory=set)
    transformed: set[fx.Node] = field(default_factory=set)
    cast: set[fx.Node] = field(default_factory=set)

    @classmethod
    def of(cls, graph: fx.Graph) -> "Modes":
        """Returns the modes, for a graph that begins in the present grad mode."""
        found, begin = cls(), torch.is_grad_enabled()
        gradients, inference, level, casts = begin, False, 0, 0
        before = dict[Any, tuple[bool, bool]]()
        for node in graph.nodes:
            name = _name(node)
            if name == "_set_grad_enabled":
                gradients = bool(node.args[0])
            elif name == "_enter_inference_mode":
                before[node] = gradients, inference
                inference = bool(node.args[0])
                gradients = not inference
            elif name == "_exit_inference_mode":
                gradients, inference = before[node.args[0]]
            level += name.endswith(_UP) - name.endswith(_DOWN)
            casts += (name == "_enter_autocast") - (name == "_exit_autocast")
            if casts:
                found.cast.add(node)
            if level:
                found.transformed.add(node)
            recorded = gradients and not inference
            if recorded != begin:
                (found.with_gradients if recorded else found.without_gradients).add(node)
        return found
