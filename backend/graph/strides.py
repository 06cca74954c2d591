"""Strides that a graph was traced with, for running it op by op.

A pass may put nodes in the place of others whose results lie otherwise in memory. Operators by element do not mind. Others
were traced with what lay as it did: a view is refused, and kernels that expect two operands to be laid out alike (the
gradients of norms) read one as if it were. So what reaches those is copied to strides in the order that it had. Inductor lays
out by itself.

torch's own traces may be wrong, too (the strides of softplus_backward): views become reshapes, which copy where they have to.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import hint

aten = torch.ops.aten

Order = tuple[int, ...]
"""The dimensions of a tensor, that of the largest stride first."""


def orders(graph: fx.Graph) -> dict[fx.Node, list[Order | None]]:
    """For each operation, those of what it is given; None for what is no tensor, and for unknown sizes."""
    return {node: [_order(each) for each in node.all_input_nodes] for node in graph.nodes if node.op == "call_function"}


def restore(graph: fx.Graph, traced: Mapping[fx.Node, Sequence[Order | None]]) -> None:
    """Gives the operations of before, unless they are by element, what is laid out as it was."""
    moved = set[fx.Node]()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        if node not in traced:
            moved.add(node)
        elif moved.isdisjoint(given := node.all_input_nodes):
            continue
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            before, node.meta["val"] = _order(node), Emitter(node).evaluated(node)
            if _order(node) != before:
                moved.add(node)
        elif len(given) == len(traced[node]):
            for each, order in zip(given, traced[node], strict=True):
                if each in moved:
                    node.replace_input_with(each, _laid_out(node, each, order))


def _order(node: fx.Node) -> Order | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    strides, sizes = ([hint(n) for n in each] for each in (value.stride(), value.shape))
    if None in strides or None in sizes:
        return None
    real = [d for d in range(value.dim()) if sizes[d] != 1]  # the stride of a single element says nothing
    return tuple(sorted(real, key=lambda d: (-(strides[d] or 0), d)))


def _laid_out(before: fx.Node, given: fx.Node, order: Order | None) -> fx.Node:
    """A copy that lies in this order, if it does not yet."""
    if order is None or _order(given) == order:
        return given
    emit, dims = Emitter(before), given.meta["val"].dim()
    outside = [*(d for d in range(dims) if d not in order), *order]
    copied = emit(aten.clone.default, emit(aten.permute.default, given, outside), memory_format=torch.contiguous_format)
    return emit(aten.permute.default, copied, [outside.index(d) for d in range(dims)])
