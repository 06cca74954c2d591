"""Finds cones: for a node, the nodes before it that one chain can compute together with it.

A cone is convex: no value that is computed from it outside comes back to it. In inference, products that multiply a matrix of
the cone join it as siblings, such as queries, keys and values of a layer. find_chains.py makes chains of cones.
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
from gossamer.backend.regions.low_rank import Inner, Product
from gossamer.runtime.torch_internals import OpOverload

_LOOKED_UP = {torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default}


def find_cone(
    output: fx.Node,
    products: Mapping[fx.Node, Product],
    attention: list[Attention],
    claimed: Mapping[fx.Node, set[fx.Node]],
    reorder: bool,
    several: bool,
) -> set[fx.Node]:
    """Returns the cone of `output` with these products and attention. Empty if there is none.

    `claimed` are the nodes of other chains, each with all nodes that its chain is computed from. `reorder` allows that tokens
    change their order inside. `several` allows that nodes outside use values of the cone.
    """
    usable, barred = list(attention), set[fx.Node]()
    while True:
        inside = {n: a for a in usable for n in a.members}
        cone = _convex(output, products, inside, claimed, barred, reorder, several)
        broken = [a for a in usable if a.node in cone and not cone.issuperset(a.members)]
        stray = [a for a in usable if a.node not in cone and not cone.isdisjoint(a.members)]
        others = (n for n in cone if n not in inside and n not in products)
        unreadable = {n for n in others if any(_holds_no_floats(x) for x in n.all_input_nodes if x not in cone)}
        if not broken and not stray and not unreadable:
            return _with_siblings(cone, output, products, inside, claimed) if several else cone
        usable = [a for a in usable if a not in broken and a not in stray]
        barred |= unreadable


def _holds_no_floats(operand: fx.Node) -> bool:
    """Whether an operand is a tensor of integers or bools, and no constant. A chain reads none from outside."""
    value = operand.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype not in DTYPES and constant_of(operand) is None


def without_first_sums(nodes: list[fx.Node], products: Mapping[fx.Node, Product], attention: list[Attention]) -> list[fx.Node]:
    """Returns the nodes of a cone, in order, without the elementwise nodes that Inductor had better compute.

    These read several matrices, all from outside, and Inductor computes one of them, for this node only, in an elementwise
    loop. It can compute this node in the same loop, and the chain then reads one matrix less.
    """
    inside, attending = set(nodes), {member for found in attention for member in found.members}
    for node in nodes:
        if node in products or node in attending or not is_elementwise(node) or not inside.isdisjoint(node.all_input_nodes):
            continue
        read = [n for n in node.all_input_nodes if kind_of(n, node.meta["val"].shape) in ("matrix", "position")]
        if len(read) > 1 and any(_computed_in_a_loop(n) and only_user(n) is node for n in read):
            inside.discard(node)
    return [node for node in nodes if node in inside]


def _computed_in_a_loop(node: fx.Node) -> bool:
    """Whether Inductor computes a value element by element, in a loop that can also compute its users."""
    target = node.target
    return isinstance(target, OpOverload) and (target in _LOOKED_UP or torch.Tag.pointwise in target.tags)


def _convex(
    output: fx.Node,
    products: Mapping[fx.Node, Product],
    attending: dict[fx.Node, Attention],
    claimed: Mapping[fx.Node, set[fx.Node]],
    barred: set[fx.Node],
    reorder: bool,
    several: bool,
) -> set[fx.Node]:
    """Returns the cone of `output` without siblings, and without nodes that are barred. See `find_cone` for `claimed`.

    A chain that reads one value of another chain has to wait for all of it.
    """
    cone: set[fx.Node] = set()
    before: set[fx.Node] = set()
    """The nodes outside that the cone is computed from."""
    rows = rows_of(output)
    if rows is None:
        return cone
    outside = barred | {node for a in attending.values() for node in a.outside}
    outside |= {arguments(node)[-1] for node, product in products.items() if isinstance(product, Inner)}
    node = output
    pending, wanted = {output}, {output}  # all nodes that `output` needs, and those that the cone itself reads
    while wanted:
        if node in pending:
            pending.discard(node)
            wanted.discard(node)
            free = node is output or all(user in cone for user in node.users)
            if not free and several:
                free = before.isdisjoint(node.users) and _may_leave(node, attending)
            usable = free and node not in claimed and node not in outside and node not in before
            if usable and (_fits(node, rows, products, attending, output) or (reorder and swaps_tokens(node))):
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
    products: Mapping[fx.Node, Product],
    attending: dict[fx.Node, Attention],
    claimed: Mapping[fx.Node, set[fx.Node]],
) -> set[fx.Node]:
    """Returns the cone with its siblings: products of its matrices whose other operands do not depend on the cone.

    It stays convex: neither the cone nor another operand of a sibling reads a value that is computed from the cone outside.
    """
    found, rows = set(cone), rows_of(output)
    for node, product in products.items() if cone else ():
        views = [product.x]
        while views[-1] not in cone and is_identity(views[-1]):
            views.append(views[-1].all_input_nodes[0])
        if node in cone or node in claimed or views[-1] not in cone:
            continue
        if not _fits(node, rows, products, attending, output):
            continue
        others = ancestors([each for each in node.all_input_nodes if each is not product.x])
        if found.isdisjoint(set[fx.Node]().union(*(_awaited(each, claimed) for each in others))):
            found.update(views, [node])
    return found


def _awaited(node: fx.Node, claimed: Mapping[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Returns a node and, if it is in a chain, all nodes that this chain has to wait for."""
    found, pending = {node}, [node]
    while pending:
        more = claimed.get(pending.pop(), set()) - found
        found |= more
        pending += more
    return found


def _may_leave(node: fx.Node, attending: dict[fx.Node, Attention]) -> bool:
    """Whether a value inside a chain may be an output of it: the value, or its source, is a matrix or heads cut out of one."""
    source = path(node)[0] if is_view(node) else node
    found = attending.get(source)
    if found is not None and source is not found.output and source not in [step.node for step in found.per_head]:
        return False
    value = source.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.dim() > 1 and not equal(value.shape[-1], 1)


def _fits(
    node: fx.Node, rows: object, products: Mapping[fx.Node, Product], attending: dict[fx.Node, Attention], output: fx.Node
) -> bool:
    """Whether a chain with so many rows that ends in `output` can compute this node."""
    if node.op != "call_function" or phase(node) != phase(output) or constant_of(node) is not None:
        return False
    if node in attending:
        return equal(rows_of(attending[node].output), rows)
    if node in products:
        product = products[node]
        addend = product.addend
        plain = addend is None or kind_of(addend, node.meta["val"].shape) is not None
        return (isinstance(product, Inner) or product.side == "right") and plain and equal(rows_of(node), rows)
    if is_row_reduction(node):
        return equal(rows_of(arguments(node)[0]), rows)
    if node.target is operator.getitem:
        return is_row_reduction(arguments(node)[0])
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not equal(rows_of(node), rows):
        return False
    if value.dtype is torch.int8 and not is_identity(node):  # the operand of a quantized product
        return is_elementwise(node) and node.all_input_nodes[0].meta["val"].dtype in DTYPES
    if value.dtype not in (*DTYPES, torch.bool, torch.int8):
        return False
    if is_identity(node):
        return equal(rows_of(node.all_input_nodes[0]), rows)
    return is_elementwise(node) and all(_readable(operand, value.shape) for operand in node.all_input_nodes)


def _readable(operand: fx.Node, shape: torch.Size) -> bool:
    return constant_of(operand) is not None or kind_of(operand, shape) is not None


def rows_of(node: fx.Node) -> object:
    """Returns the number of rows of a value seen as a matrix; None if it has fewer than two dimensions."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    return prod(value.shape[:-1])
