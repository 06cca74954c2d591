"""Grows a region: a contraction and the elementwise operations after it, copied from the graph as a function on matrices.

    %mm = addmm(%bias, view(%x), permute(%w))         region(x, w, e0, e1):        [T, K], [M, K], [M], [T, M]
    %v  = view(%mm, [B, S, M])                   →      0 = mm(x, permute(w))
    %g  = gelu(%v)                                      1 = add(0, e0)
    %y  = add(%g, %residual)                            2 = gelu(1);  return add(2, e1)

A region is the largest sub-graph with one output: no other value inside it is used elsewhere. T is always dynamic, so that one
kernel serves every number of tokens.

In training, a region may have two outputs: an activation, and its derivative, which the backward pass multiplies by. The
operations after the usual output compute both, and read no other tensor. So the forward pass need not save that usual output.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.device_kernel import DTYPES
from gossamer.backend.graph.fusable import constant_of, is_elementwise, is_identity, kind_of
from gossamer.backend.graph.nodes import in_training, phase
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.matrix_functions import Extra, ProductBody

aten = torch.ops.aten

_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Types for which kernels have vectorized exponential functions."""


@dataclass(frozen=True)
class Region:
    """A function copied from a graph, and the nodes that it replaces.

    body     (x [T, K], w as stored, *extras) → [T, M]; see `matrix_functions` for the metadata of its nodes
    extras   the values of the graph that `body` takes after x and w
    members  the nodes of the graph that it computes; other nodes use only `output` and `second`
    output   the output
    second   the second output, or None
    """

    contraction: Contraction
    body: fx.GraphModule
    extras: tuple[Extra, ...]
    members: tuple[fx.Node, ...]
    output: fx.Node
    second: fx.Node | None = None

    @property
    def fused(self) -> int:
        """The number of elementwise operations in the epilogue."""
        nodes = [n for n in self.body.graph.nodes if n.op == "call_function" and n.target is not aten.full.default]
        product = next(number for number, n in enumerate(nodes) if n.target is aten.mm.default)
        return len(nodes) - product - 1


def grow(contraction: Contraction, claimed: Container[fx.Node]) -> Region:
    """Returns the largest region with a contraction that contains none of the `claimed` nodes of other regions."""
    members = [contraction.node]
    if contraction.axis != -2:
        members = epilogue(contraction.node, claimed, device_of(contraction.weight.device).dtypes, contraction.axis)
    output, second = members[-1], None
    if _may_have_two(contraction):
        more = _two_outputs(output, claimed)
        if more is not None:
            behind, output, second = more
            members += behind
    body = ProductBody(contraction)
    for node in members[1:]:
        body.append(node)
    finished = body.finish(output) if second is None else body.finish(output, second)
    return Region(contraction, finished, tuple(body.extras), tuple(members), output, second)


def _may_have_two(contraction: Contraction) -> bool:
    if contraction.axis != -1 or contraction.backward or not device_of(contraction.weight.device).chains:
        return False
    return in_training(contraction.node.graph)


def _two_outputs(output: fx.Node, claimed: Container[fx.Node]) -> tuple[list[fx.Node], fx.Node, fx.Node] | None:
    """Returns the elementwise nodes that compute values only from an output, and the two of them that other nodes use.

    Returns None unless other nodes use exactly two of these values, and not the output itself. The first of the two must be
    in the same phase as the output, forward or backward.
    """
    dtype = output.meta["val"].dtype
    if dtype not in _ACTIVATIONS:
        return None
    found, pending, node = dict[fx.Node, None](), set(output.users), output
    while pending:
        node = node.next
        if node in pending:
            pending.discard(node)
            if node not in claimed and _follows(node, {output, *found}):
                found[node] = None
                pending.update(node.users)
    while wrong := [end for end in _ends(found) if is_identity(end) or end.meta["val"].dtype != dtype]:
        left_out = {wrong[0]}
        for node in found:
            if not left_out.isdisjoint(node.all_input_nodes):
                left_out.add(node)
        found = {node: None for node in found if node not in left_out}
    ends = _ends(found)
    if len(ends) != 2 or any(user not in found for user in output.users) or phase(ends[0]) != phase(output):
        return None
    return list(found), ends[0], ends[1]


def _ends(nodes: Mapping[fx.Node, None]) -> list[fx.Node]:
    return [node for node in nodes if any(user not in nodes for user in node.users)]


def _follows(node: fx.Node, given: Container[fx.Node]) -> bool:
    """Whether a node is elementwise and reads only these matrices, and constants."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (*_ACTIVATIONS, torch.bool):
        return False
    if not (is_elementwise(node) or is_identity(node)):
        return False
    return all(
        kind_of(operand, value.shape) == "matrix" if operand in given else constant_of(operand) is not None
        for operand in node.all_input_nodes
    )


def epilogue(
    start: fx.Node, claimed: Container[fx.Node], dtypes: Container[torch.dtype] = DTYPES, axis: int = -1
) -> list[fx.Node]:
    """Returns a product and the elementwise nodes that it can fuse, in order. The last one is the output.

    dtypes  the types that the output may have
    axis    the dimension of the features

    For every fusable node, the function finds its ancestors from the product on. The output is the last node whose ancestors
    are used only by each other.
    """
    ancestors: dict[fx.Node, set[fx.Node]] = {start: {start}}
    best, pending, node = start, set(start.users), start
    while pending:
        node = node.next
        if node not in pending:
            continue
        pending.discard(node)
        if node in claimed or not _fusable(node, start, ancestors, axis):
            continue
        ancestors[node] = {node}.union(*(ancestors[n] for n in node.all_input_nodes if n in ancestors))
        pending.update(node.users)
        inside = ancestors[node]
        closed = all(user in inside for n in inside if n is not node for user in n.users)
        if closed and node.meta["val"].dtype in dtypes:
            best = node
    order = {n: i for i, n in enumerate(start.graph.nodes)} if best is not start else {start: 0}
    return sorted(ancestors[best], key=order.__getitem__)


def _fusable(node: fx.Node, start: fx.Node, region: Container[fx.Node], axis: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (*DTYPES, torch.bool, torch.int32):
        return False
    if is_identity(node, axis):
        return True
    if value.dtype is torch.int32:  # sums of a quantized product, before they become floats
        return False
    if not is_elementwise(node) or phase(node) != phase(start):  # the partitioner could not split a region of two phases
        return False
    for operand in node.all_input_nodes:
        if operand in region:
            if kind_of(operand, value.shape, axis) != "matrix":
                return False
        elif constant_of(operand) is None and not _readable(operand, value, axis):
            return False
    return True


def _readable(operand: fx.Node, value: torch.Tensor, axis: int) -> bool:
    """Whether a region can read an operand from outside to compute `value`. Unlike torch, kernels cannot read single numbers
    from another device."""
    given = operand.meta["val"]
    return kind_of(operand, value.shape, axis) is not None and given.dtype in DTYPES and given.device == value.device
