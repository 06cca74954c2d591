"""Removes assertions about sizes that no other node needs after message passing or experts are rewritten.

%u = sym_size(index(%edge_index, [None, %mask]), 1), _assert_scalar(%u <= 1500)    the number of edges without self loops
"""

from collections.abc import Iterator

import torch
from torch import fx

from gossamer.backend.graph.nodes import ancestors

aten = torch.ops.aten

_ASSERTIONS = {aten._assert_scalar.default, aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default}


def drop_vain_assertions(graph: fx.Graph) -> None:
    """Removes such assertions from a graph, with all nodes that only they need."""
    asserted = [n for n in graph.nodes if n.target in _ASSERTIONS]
    kept = {n for n in graph.nodes if n.op == "output"}
    others = [n for n in graph.nodes if n in kept or (n.is_impure() and n not in asserted and n.op == "call_function")]
    needed = set(ancestors(others))
    vain = [n for n in asserted if any(i.op == "call_function" and i not in needed for i in _tensors_behind(n))]
    for node in reversed(vain):
        graph.erase_node(node)
    if vain:
        graph.eliminate_dead_code()


def _tensors_behind(assertion: fx.Node) -> Iterator[fx.Node]:
    """Yields the tensors whose sizes or values an assertion is about."""
    pending = list(assertion.all_input_nodes)
    while pending:
        node = pending.pop()
        if isinstance(node.meta.get("val"), torch.Tensor):
            yield node
        else:
            pending += node.all_input_nodes
