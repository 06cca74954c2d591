"""Nodes of Dynamo's graphs that write to what they are given."""

import operator

from torch import fx


def writes(node: fx.Node) -> bool:
    """Whether a node may write to an argument; Python's and torch's functions that do so have names that say it."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    inplace = name.endswith("_") or (name.startswith("i") and getattr(operator, name, None) is node.target)
    mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    return inplace or mutable or name == "setitem" or "out" in node.kwargs or bool(node.kwargs.get("inplace"))
