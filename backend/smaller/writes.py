"""Finds the values that nodes of Dynamo's graph write to, as in `relu(x, inplace=True)`, `x += y` and `x.mul_(2)`."""

import operator
from typing import Any

import torch.nn.functional as F
from torch import fx

_INTO = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem, operator.ipow, operator.imatmul}
INPLACE = {
    F.relu: 1, F.relu6: 1, F.silu: 1, F.mish: 1, F.selu: 1, F.hardswish: 1, F.hardsigmoid: 1, F.elu: 2, F.celu: 2,
    F.leaky_relu: 2, F.hardtanh: 3, F.dropout: 3, F.dropout1d: 3, F.dropout2d: 3, F.dropout3d: 3, F.alpha_dropout: 3,
}  # fmt: skip
"""The position of the argument `inplace`."""


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns the argument that a node passes for a parameter of its function."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def writes(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose values a node changes."""
    target: Any = node.target
    name = target if node.op == "call_method" else getattr(target, "__name__", "")
    changed: list[Any] = [node.kwargs.get("out")]
    if target is F.batch_norm:
        if argument(node, 5, "training", False):
            changed += [argument(node, 1, "running_mean"), argument(node, 2, "running_var")]
    elif node.op in ("call_function", "call_method"):
        underscored = name.endswith("_") and not name.endswith("__")
        inplace = argument(node, INPLACE[target], "inplace") if target in INPLACE else node.kwargs.get("inplace")
        if target in _INTO or underscored or inplace:
            changed.append(argument(node, 0, "input"))
    return [each for each in changed if isinstance(each, fx.Node)]


def written(graph: fx.Graph) -> set[fx.Node]:
    """Returns all nodes whose values are written to."""
    return {each for node in graph.nodes for each in writes(node)}
