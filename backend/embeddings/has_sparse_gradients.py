"""Tells whether a Dynamo graph looks up tables with `sparse=True`. It runs for each graph, so it imports nothing for these."""

from typing import Any

from torch import fx
from torch.nn import functional

_PLACES: dict[Any, int] = {functional.embedding: 6, functional.embedding_bag: 7}  # the place of `sparse` in the arguments


def has_sparse_gradients(graph: fx.Graph) -> bool:
    """Whether some look-up may have `sparse=True`."""
    nodes = (node for node in graph.nodes if node.op == "call_function" and node.target in _PLACES)
    return any(node.kwargs.get("sparse") or any(node.args[_PLACES[node.target] :][:1]) for node in nodes)
