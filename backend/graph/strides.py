"""Restores the order of strides with which a graph was traced.

results         users see them, so they are restored for every graph
other values    restored only for graphs that run op by op, because Inductor chooses layouts by itself

A pass may replace a node by one whose result has other strides. Pointwise operations work with any strides, but others do not.
A view may raise an error. Kernels that expect two operands with the same strides, such as gradients of norms, read wrong
elements. So operands of such operations are copied to strides in the traced order.

torch's own traces may have wrong strides, too (softplus_backward). So views become reshapes, which copy if necessary.
"""

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import hint
from gossamer.runtime.torch_internals import OpOverload, tree_flatten, tree_unflatten

aten = torch.ops.aten

_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
)  # fmt: skip

Order = tuple[int, ...]
"""The dimensions of a tensor, from the largest stride to the smallest. Dimensions of size 1 are left out."""


def orders(graph: fx.Graph) -> dict[fx.Node, list[Order | None]]:
    """Returns the orders of each operation's operands. An order is None for other values than tensors, and unknown sizes."""
    return {node: [_order(each) for each in node.all_input_nodes] for node in graph.nodes if node.op == "call_function"}


def orders_of_results(graph: fx.Graph) -> list[Order | None]:
    """Returns the orders of a graph's results. An order is None for other values than tensors, and unknown sizes."""
    return [_order(each) if isinstance(each, fx.Node) else None for each in tree_flatten(graph.output_node().args)[0]]


def restore_results(graph: fx.Graph, traced: Sequence[Order | None], before: Collection[fx.Node], images: bool = True) -> None:
    """Gives results of a graph the traced order of strides, such as images with channels innermost.

    before  the nodes of the traced graph; new nodes, and views of them, may have other strides
    images  whether operations on images, such as pools, may have other strides, too; False if `restore` follows
    """
    _follow(graph, before, images)
    output = graph.output_node()
    given, structure = tree_flatten(output.args)
    found = [
        _laid_out(each, each, order, each.next) if isinstance(each, fx.Node) else each
        for each, order in zip(given, traced, strict=True)
    ]
    if any(each is not before for each, before in zip(found, given, strict=True)):
        output.args = tree_unflatten(found, structure)


def restore(graph: fx.Graph, traced: Mapping[fx.Node, Sequence[Order | None]]) -> None:
    """Gives the operands of traced operations, except pointwise ones, the traced order of strides."""
    moved = set[fx.Node]()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        anew = not moved.isdisjoint(given := node.all_input_nodes)
        if node not in traced:
            if anew and _lies_as_its_operands(node):
                node.meta["val"] = Emitter(node).evaluated(node)
            moved.add(node)
        elif not anew:
            continue
        elif _is_by_element(node):
            before, node.meta["val"] = _order(node), Emitter(node).evaluated(node)
            if _order(node) != before:
                moved.add(node)
        elif len(given) == len(traced[node]):
            for each, order in zip(given, traced[node], strict=True):
                if each in moved:
                    node.replace_input_with(each, _laid_out(node, each, order))


def _follow(graph: fx.Graph, before: Collection[fx.Node], images: bool) -> None:
    """Computes fake values again that have other strides now because of new nodes, if results of the graph depend on these.

    They are those of views, pointwise operations, and with `images` operations whose results lie as their images do.
    """
    follow, moved = set[fx.Node](), set[fx.Node]()
    reached = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in reached and (_lies_as_its_operands(node) or (images and _lies_as_its_images(node))):
            follow.add(node)
            reached.update(node.all_input_nodes)
    for node in [node for node in graph.nodes if node in reached and node.op == "call_function"]:
        if node in follow and not moved.isdisjoint(node.all_input_nodes):
            if node.target in (aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default  # copies if strides require it
            traced, node.meta["val"] = _orders(node), Emitter(node).evaluated(node)
            if node in before and _orders(node) == traced:
                continue
            moved.add(node)
        elif node not in before:
            moved.add(node)


def _lies_as_its_images(node: fx.Node) -> bool:
    """Whether an operation reads images, and all sizes of its results, which may be several, are known."""
    plain = isinstance(node.target, OpOverload) or node.target is operator.getitem
    known = plain and all("val" in each.meta for each in node.all_input_nodes) and None not in _orders(node)
    return known and any(max(_dims(each), default=0) >= 4 for each in node.all_input_nodes)


def _dims(node: fx.Node) -> list[int]:
    return [each.dim() for each in _tensors(node)]


def _orders(node: fx.Node) -> list[Order | None]:
    """Returns the orders of all results of an operation."""
    return [_order_of(each) for each in _tensors(node)]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [each for each in tree_flatten(node.meta.get("val"))[0] if isinstance(each, torch.Tensor)]


def _is_by_element(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _lies_as_its_operands(node: fx.Node) -> bool:
    return node.op == "call_function" and (_is_by_element(node) or node.target in _VIEWS)


def _order(node: fx.Node) -> Order | None:
    value = node.meta.get("val")
    return _order_of(value) if isinstance(value, torch.Tensor) else None


def _order_of(value: torch.Tensor) -> Order | None:
    if value.layout is not torch.strided:
        return None
    strides, sizes = ([hint(n) for n in each] for each in (value.stride(), value.shape))
    if None in strides or None in sizes:
        return None
    real = [d for d in range(value.dim()) if sizes[d] != 1]  # the stride of a dimension of size 1 has no meaning
    return tuple(sorted(real, key=lambda d: (-(strides[d] or 0), d)))


def _laid_out(reader: fx.Node, given: fx.Node, order: Order | None, before: fx.Node | None = None) -> fx.Node:
    """Returns `given`, or a copy of it if its strides have another order. The copy is before its reader, or before `before`."""
    if order is None or _order(given) in (order, None):
        return given
    emit, dims = Emitter(reader, before=before), given.meta["val"].dim()
    outside = [*(d for d in range(dims) if d not in order), *order]
    copied = emit(aten.clone.default, emit(aten.permute.default, given, outside), memory_format=torch.contiguous_format)
    return emit(aten.permute.default, copied, [outside.index(d) for d in range(dims)])
