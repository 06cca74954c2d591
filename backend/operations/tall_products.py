"""Runs products of tall dense matrices with narrow ones by our own kernel, in graphs with sparse operations. Such a product
multiplies the features of all nodes with a weight.

    %d = mm(%x, %w)                                              →    %d = gossamer::tall_product(%x, %w)
    %d = addmm(%b, %x, %w)                                       →    %d = add(gossamer::tall_product(%x, %w), %b)

Libraries that pack both factors are made for square ones. Here some take up to 2.5 times as long as the schedule `tall`, and as
long as all other operations of a graph neural network. Others are as fast, so both ways are measured
(see measuring/tall_times.py). Inductor computes the addition, and fuses it with the operations that follow.
"""

import torch
from torch import fx

from gossamer.backend.graph.einsum_calls import hint
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import arguments, equal_sizes, is_backward, is_ours
from gossamer.backend.measuring.tall_times import is_faster
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.spmm_region import GatheredRegion
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.operations.tall_product import tall_kernel

aten = torch.ops.aten

_ROWS = 1024  # least rows of the tall factor
_COLUMNS = 256  # most columns of the narrow factor
_BYTES = 256 << 10  # most bytes of the narrow factor: half of a second-level cache
_TYPES = (torch.float32, torch.float64)
_TURNS = (aten.permute.default, aten.t.default, aten.transpose.int)


class TallProducts:
    """Gives dense products in graphs with sparse operations the schedule for tall matrices."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces the products that are faster as measured, if the graph has an operation on sparse tensors or edge lists.
        Returns a decision for each tall product."""
        if not any(map(_is_sparse_operation, graph.nodes)):
            return []
        decisions = []
        for node in graph.nodes:
            factors = _factors(node)
            if factors is None or not _is_tall(*factors):
                continue
            x, w = factors
            dtype, size = w.meta["val"].dtype, w.meta["val"].shape
            try:
                schedule = tall_kernel(dtype).schedule
            except CompileError:
                continue
            rows, k, n = (hint(length) for length in (x.meta["val"].shape[0], *size))
            shape = f"{rows} rows times {k} x {n}"
            faster = is_faster(rows, k, n, dtype)
            how = f"by the schedule {schedule}" if faster else "measured: torch's own product is faster"
            reason = f"{shape}, {how}"
            named = _unturned(w)
            name, own = name_of(named, context.inputs), tuple(hint(length) or 0 for length in named.meta["val"].shape)
            op = "mm backward" if is_backward(node) else "mm"
            decisions.append(Decision(name, op, own, 1.0, None, schedule if faster else None, False, reason, None))
            if not faster:
                continue
            emit = Emitter(node, {})
            product = emit(torch.ops.gossamer.tall_product.default, x, w)
            if node.target is aten.addmm.default:
                product = emit(aten.add.Tensor, product, arguments(node)[0])
            node.replace_all_uses_with(product)
        if decisions:
            graph.eliminate_dead_code()
        return decisions


def _is_sparse_operation(node: fx.Node) -> bool:
    """Whether a node is an operation of ours on sparse tensors or edge lists, maybe with an epilogue. A region of a static
    weight is not."""
    if node.target is region_op.region:
        return isinstance(region_op.find(arguments(node)[1]), GatheredRegion)
    return is_ours(node)


def _unturned(factor: fx.Node) -> fx.Node:
    """Returns the tensor of which a factor is a transposed view, such as a weight. Gradients transpose such views again."""
    while factor.target in _TURNS:
        factor = arguments(factor)[0]
    return factor


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the factors of mm, or of addmm without scales; None for other nodes."""
    if node.target is aten.mm.default:
        x, w = arguments(node)
        return x, w
    if node.target is aten.addmm.default and not node.kwargs:
        _, x, w = arguments(node)
        return x, w
    return None


def _is_tall(x: fx.Node, w: fx.Node) -> bool:
    """Whether the schedule `tall` is made for a product of these factors."""
    tall, narrow = x.meta["val"], w.meta["val"]
    if not (tall.is_cpu and tall.dtype in _TYPES and tall.dtype is narrow.dtype):
        return False
    if not equal_sizes(tall.stride(), (tall.shape[1], 1)):  # `is_contiguous` would guard sizes, or ask for unknown ones
        return False
    k, n = (hint(size) for size in narrow.shape)
    return hint(tall.shape[0]) >= max(_ROWS, k) and 0 < n <= _COLUMNS and 0 < k * n * narrow.itemsize <= _BYTES
