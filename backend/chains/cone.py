"""The nodes before some node that one chain can compute, with those that belong beside them.

A cone is convex: nothing made of its values outside of it comes back to it. Products of the same matrix as one of the cone (the
queries, keys and values of a layer) join it where several of its values may be used elsewhere.
"""

import operator
from collections.abc import Mapping
from math import prod

import torch
from torch import fx

from gossamer.backend.chains.attention import Attention
from gossamer.backend.chains.token_order import swaps_tokens
from gossamer.backend.devices.device_kernel import DTYPES
from gossamer.backend.graph.fusable import constant_of, is_elementwise, is_identity, is_row_reduction, kind_of
from gossamer.backend.graph.layout import is_view, path
from gossamer.backend.graph.nodes import ancestors, arguments, equal, only_user, phase
from gossamer.backend.regions.contractions import Contraction
from gossamer.runtime.torch_internals import OpOverload

_LOOKED_UP = {torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default}


def find_cone(
    output: fx.Node,
    sparse: dict[fx.Node, Contraction],
    attention: list[Attention],
    claimed: Mapping[fx.Node, set[fx.Node]],
    reorder: bool,
    several: bool,
) -> set[fx.Node]:
    """The nodes that `output` needs, as far as a chain can compute them; others may use them too where `several`, and tokens
    change their order where `reorder`."""
    usable = list(attention)
    while True:
        inside = {n: a for a in usable for n in a.members}
        cone = _convex(output, sparse, inside, claimed, reorder, several)
        broken = [a for a in usable if a.node in cone and not cone.issuperset(a.members)]
        stray = [a for a in usable if a.node not in cone and not cone.isdisjoint(a.members)]
        if not broken and not stray:
            return _with_siblings(cone, output, sparse, inside, claimed) if several else cone
        usable = [a for a in usable if a not in broken and a not in stray]


def without_first_sums(nodes: list[fx.Node], sparse: dict[fx.Node, Contraction], attention: list[Attention]) -> list[fx.Node]:
    """The nodes of a cone, in order, but for what it begins with by elements of several matrices from outside, one of which is
    looked up or computed for that alone: Inductor's loop does it while it writes, and the chain reads a matrix less."""
    inside, attending = set(nodes), {member for found in attention for member in found.members}
    for node in nodes:
        if node in sparse or node in attending or not is_elementwise(node) or not inside.isdisjoint(node.all_input_nodes):
            continue
        read = [n for n in node.all_input_nodes if kind_of(n, node.meta["val"].shape) in ("matrix", "position")]
        if len(read) > 1 and any(_computed_in_a_loop(n) and only_user(n) is node for n in read):
            inside.discard(node)
    return [node for node in nodes if node in inside]


def _computed_in_a_loop(node: fx.Node) -> bool:
    """Whether Inductor computes a value element by element, so that what reads it belongs into the same loop."""
    target = node.target
    return isinstance(target, OpOverload) and (target in _LOOKED_UP or torch.Tag.pointwise in target.tags)


def _convex(
    output: fx.Node,
    sparse: dict[fx.Node, Contraction],
    attending: dict[fx.Node, Attention],
    claimed: Mapping[fx.Node, set[fx.Node]],
    reorder: bool,
    several: bool,
) -> set[fx.Node]:
    """Nodes such that nothing made of them outside comes back to them. `claimed` are the nodes of other chains, each with all
    that its chain is computed from; a chain waits for all of another that it reads from."""
    cone: set[fx.Node] = set()
    before: set[fx.Node] = set()
    """What the cone is computed from."""
    rows = rows_of(output)
    if rows is None:
        return cone
    outside = {node for a in attending.values() for node in a.outside}
    node = output
    pending, wanted = {output}, {output}  # of these, what the cone itself reads
    while wanted:
        if node in pending:
            pending.discard(node)
            wanted.discard(node)
            free = node is output or all(user in cone for user in node.users)
            if not free and several:
                free = before.isdisjoint(node.users) and _may_leave(node, attending)
            usable = free and node not in claimed and node not in outside and node not in before
            if usable and (_fits(node, rows, sparse, attending, output) or (reorder and swaps_tokens(node))):
                cone.add(node)
                wanted.update(node.all_input_nodes)
            else:
                before |= _awaited(node, claimed)
                if not cone.isdisjoint(before):
                    return set()
            pending.update(node.all_input_nodes)
        if node.op == "root":
            break
        node = node.prev
    return cone


def _with_siblings(
    cone: set[fx.Node],
    output: fx.Node,
    sparse: dict[fx.Node, Contraction],
    attending: dict[fx.Node, Attention],
    claimed: Mapping[fx.Node, set[fx.Node]],
) -> set[fx.Node]:
    """The cone with the products of its matrices that need nothing else which depends on it. What comes of them does not come
    back: it would have to enter by a value that is computed from the cone."""
    found, rows = set(cone), rows_of(output)
    for node, contraction in sparse.items() if cone else ():
        views = [contraction.x]
        while views[-1] not in cone and is_identity(views[-1]):
            views.append(views[-1].all_input_nodes[0])
        if node in cone or node in claimed or views[-1] not in cone:
            continue
        if not _fits(node, rows, sparse, attending, output):
            continue
        others = ancestors([each for each in node.all_input_nodes if each is not contraction.x])
        if found.isdisjoint(set[fx.Node]().union(*(_awaited(each, claimed) for each in others))):
            found.update(views, [node])
    return found


def _awaited(node: fx.Node, claimed: Mapping[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """A node and, where it is part of a chain, all that this one has to wait for."""
    found, pending = {node}, [node]
    while pending:
        more = claimed.get(pending.pop(), set()) - found
        found |= more
        pending += more
    return found


def _may_leave(node: fx.Node, attending: dict[fx.Node, Attention]) -> bool:
    """Whether a value inside a chain, or what it is a view of, may be an output of it: a matrix, or heads cut out of one."""
    source = path(node)[0] if is_view(node) else node
    found = attending.get(source)
    if found is not None and source is not found.output and source not in [step.node for step in found.per_head]:
        return False
    value = source.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.dim() > 1 and not equal(value.shape[-1], 1)


def _fits(
    node: fx.Node, rows: object, sparse: dict[fx.Node, Contraction], attending: dict[fx.Node, Attention], output: fx.Node
) -> bool:
    """Whether a chain of so many rows can compute this node."""
    if node.op != "call_function" or phase(node) != phase(output) or constant_of(node) is not None:
        return False
    if node in attending:
        return equal(rows_of(attending[node].output), rows)
    if node in sparse:
        contraction = sparse[node]
        addend = contraction.addend
        plain = addend is None or kind_of(addend, node.meta["val"].shape) is not None
        return contraction.side == "right" and plain and equal(rows_of(node), rows)
    if is_row_reduction(node):
        return equal(rows_of(arguments(node)[0]), rows)
    if node.target is operator.getitem:
        return is_row_reduction(arguments(node)[0])
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not equal(rows_of(node), rows):
        return False
    if value.dtype is torch.int8 and not is_identity(node):  # what a quantized product multiplies
        return is_elementwise(node) and node.all_input_nodes[0].meta["val"].dtype in DTYPES
    if value.dtype not in (*DTYPES, torch.bool, torch.int8):
        return False
    if is_identity(node):
        return equal(rows_of(node.all_input_nodes[0]), rows)
    return is_elementwise(node) and all(_readable(operand, value.shape) for operand in node.all_input_nodes)


def _readable(operand: fx.Node, shape: torch.Size) -> bool:
    return constant_of(operand) is not None or kind_of(operand, shape) is not None


def rows_of(node: fx.Node) -> object:
    """Number of rows of a value seen as a matrix; None for what is no matrix."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    return prod(value.shape[:-1])
