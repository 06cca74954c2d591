"""max-pools: has torch's kernel compute maxima of windows, in graphs whose images have pixels innermost (see run/max_pool.py).

    %p = prims._low_memory_max_pool_with_offsets(%x, ...)         →    %p = gossamer::max_pool(%x, ..., True)
    %0, %1 = getitem(%p, 0), getitem(%p, 1)                            %0, %2 = getitem(%p, 0), getitem(%p, 1)
    %2 = prims._low_memory_max_pool_offsets_to_indices(%1, ...)

Inductor decomposes max pooling into the operations on the left.
"""

import operator
from math import prod
from typing import Any

from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import hint
from gossamer.backend.report.report import Decision
from gossamer.backend.run.max_pool import max_pool
from gossamer.backend.run.region_op import takes_images
from gossamer.runtime.elements import FLOATS
from gossamer.runtime.torch_internals import OpOverload

_POOL, _INDICES = "prims::_low_memory_max_pool_with_offsets", "prims::_low_memory_max_pool_offsets_to_indices"
_FEWEST = 1 << 14
"""Comparisons from which on the operation is faster: its call takes as long as Inductor's loops take for some thousand."""


class MaxPools:
    """Replaces max pooling beside sparse convolutions."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Rewrites the graph in place. There is nothing to decide about weights, so it returns no decisions."""
        found = [node for node in graph.nodes if _called(node) == _POOL] if takes_images(graph) else []
        for node in found:
            if not _is_large(node) or not _only_indices(node):
                continue
            indices = any(part.args[1] == 1 and part.users for part in node.users)
            pooled = Emitter(node)(max_pool, *node.args, indices)
            for part in list(node.users):
                instead = Emitter(part)(operator.getitem, pooled, part.args[1])
                for old in [part] if part.args[1] == 0 else list(part.users):
                    old.replace_all_uses_with(instead)
        graph.eliminate_dead_code()
        return []


def _called(node: fx.Node) -> str:
    return node.target.name().removesuffix(".default") if isinstance(node.target, OpOverload) else ""


def _is_large(node: fx.Node) -> bool:
    """Whether a pooling of images on the CPU makes enough comparisons. An unknown number counts as enough."""
    given: Any = node.args
    x, maxima = given[0].meta["val"], node.meta["val"][0]
    sizes = [hint(size) for size in maxima.shape]
    able = x.dim() == 4 and len(given[1]) == 2 and x.is_cpu and x.dtype in FLOATS
    return able and (None in sizes or prod(n or 0 for n in sizes) * prod(given[1]) >= _FEWEST)


def _only_indices(node: fx.Node) -> bool:
    """Whether the offsets within windows are read only to compute indices."""
    return all(
        part.target is operator.getitem and (part.args[1] == 0 or all(_called(user) == _INDICES for user in part.users))
        for part in node.users
    )
