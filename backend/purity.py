"""Finds side effects: whether a graph may be computed twice."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.expressions import draws
from gossamer.backend.graph.inputs import Inputs, written_by
from gossamer.runtime.torch_internals import OpOverload

_KNOWN = ("aten", "prims", "prim", "gossamer", "quantized", "quantized_decomposed", "torchao", "torchvision", "transformers")
"""The namespaces of operators that do nothing but compute. Their tags tell if they draw random numbers."""


class Impure(Exception):
    """A graph must not be computed twice. The message says why."""


def impurity(graph: fx.Graph, inputs: Inputs) -> str | None:
    """Returns why an inference graph must not be computed twice, or None if it may be. The reasons are:

    - It draws random numbers.
    - It calls an operator of the user's own, which may draw random numbers or count its calls.
    - It writes to an input.
    - It returns a view of an input with gradients.
    - It returns two views of one value, so that writes to one result change the other.
    """
    for node in _with_bodies(graph):
        if draws(node):
            return f"{node.target} draws random numbers"
        if isinstance(node.target, OpOverload) and node.target.namespace not in _KNOWN:
            return f"{node.target} may have side effects"
    for node in written_by(graph):
        return f"it writes to its input {node.name}"
    returned: Any = graph.output_node().args[0]
    seen = set[object]()
    for result in dict.fromkeys(returned):
        source = _viewed(result)
        if isinstance(source, fx.Node) and source in seen:
            return f"two of its results are views of {source.name}"
        seen.add(source)
        if isinstance(source, fx.Node) and source.op == "placeholder" and _has_gradients(inputs.value(source)):
            return f"it returns a view of its input {source.name}"
    return None


def _with_bodies(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the nodes of a graph, and those of the branches and loops in it."""
    for node in graph.nodes:
        yield node
        body = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from _with_bodies(body.graph)


def _viewed(node: object) -> object:
    """Returns the source of a chain of views."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]
    return node


def _has_gradients(value: torch.Tensor | None) -> bool:
    return value is not None and value.requires_grad
