"""Writes FlexAttention out as products, its functions and a softmax, if Inductor cannot compute it on CPUs.

    %o, %l, %m = flex_attention(%q, %k, %v, @score, ...)   →   %s = bmm(%q, %kT); @score of it, softmax; %o = bmm(.., %v)

Torch itself runs this without torch.compile.
"""

import operator
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import constant, provenance
from gossamer.backend.graph.nodes import COPIES, arguments
from gossamer.runtime.torch_internals import (
    detect_fake_mode,
    flex_attention,
    flex_backward_in_full,
    flex_in_full,
    make_fx,
    select_decomp_table,
    tree_flatten,
    tree_unflatten,
)

_LOWERED = (torch.float32, torch.bfloat16, torch.float16)  # types that Inductor lowers
_JOINT, _SCORE_BUFFERS = 8, 12
"""Indices among the arguments of the backward operation: the joint graph of score_mod, and the buffers that it reads."""
_PLACES = 5  # score, batch, head, query and key: the results of the joint graph before those of buffers
_LOGARITHMS = "OUTPUT_LOGSUMEXP"


def write_out(node: fx.Node, backward: list[fx.Node], always: bool) -> str:
    """Writes the operation and its gradients out if Inductor does not lower it, or `always`. Returns a text for the report."""
    q, k, v = (argument.meta["val"] for argument in arguments(node)[:3])
    options: Any = node.args[6]
    lowered = q.dtype == k.dtype == v.dtype and q.dtype in _LOWERED and not options.get(_LOGARITHMS) and not backward
    if lowered and not always:
        return ""
    for each in (node, *backward):
        _inline(each)
    return "; Inductor does not compute it on CPUs, so it is written out"


def _inline(node: fx.Node) -> None:
    """Replaces the operation by the nodes that compute it."""
    module: Any = node.graph.owning_module
    arguments, structure = tree_flatten(node.args)
    given = [a for a in arguments if isinstance(a, fx.Node) and a.op != "get_attr"]
    values = {a: getattr(module, str(a.target)) for a in arguments if isinstance(a, fx.Node) and a.op == "get_attr"}

    def run(*of_given: Any) -> Any:
        known = values | dict(zip(given, of_given, strict=True))
        whole = [known[a] if isinstance(a, fx.Node) else a for a in arguments]
        return (flex_in_full if node.target is flex_attention else flex_backward_in_full)(*tree_unflatten(whole, structure))

    wanted = () if node.target is flex_attention else _with_gradients(node)
    examples = [a.meta["val"].detach().requires_grad_() if a in wanted else a.meta["val"] for a in given]
    with detect_fake_mode(examples), torch.no_grad():
        traced = make_fx(run, decomposition_table=select_decomp_table())(*examples)
    inner = [each for each in traced.graph.nodes if each.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(inner, given, strict=True))
    for each in traced.graph.nodes:
        if each.op == "get_attr":
            copies[each] = constant(node, getattr(traced, each.target))
        elif each.op == "call_function":
            with node.graph.inserting_before(node):
                copies[each] = node.graph.node_copy(each, copies.__getitem__)
            copies[each].meta = {**provenance(node), "val": each.meta.get("val")}
    (results,) = next(each for each in traced.graph.nodes if each.op == "output").args
    _give(node, fx.map_arg(results, copies.__getitem__))


def _with_gradients(node: fx.Node) -> list[Any]:
    """Returns the buffers of score_mod that get a gradient from the backward operation. Integers have none."""
    module: Any = node.graph.owning_module
    joint: Any = node.args[_JOINT]
    (results,) = next(each for each in getattr(module, joint.target).graph.nodes if each.op == "output").args
    read: Any = node.args[_SCORE_BUFFERS]
    return [each for each, result in zip(read, results[_PLACES:], strict=True) if result is not None]


def _give(node: fx.Node, results: Any) -> None:
    """Replaces the parts of a node's result by `results`."""
    for user in list(node.users):
        part = results[user.args[1]] if user.target is operator.getitem else None
        if isinstance(part, fx.Node):
            _replace(user, part)
        elif part is not None:
            _give(user, part)


def _replace(node: fx.Node, by: fx.Node) -> None:
    """Replaces uses of a node and of its copies. In float64, tracing gives logarithms another type than these have."""
    for user in list(node.users):
        if user.target in COPIES:
            _replace(user, by)
    node.replace_all_uses_with(by)
