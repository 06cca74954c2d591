"""Runs products of a few rows with large dense weights by our own kernel, in graphs that have other operations of ours. These
are the dense layers of a model that generates text token by token.

    %y = mm(%x, permute(%w, [1, 0]))                             →    %y = gossamer::region([%x, %w], "9a41…")
    %y = addmm(%b, %x, permute(%w, [1, 0]))                      →    %y = add(gossamer::region(...), %b)

Reading the weight takes all the time of such a product. On some processors, libraries read it at half the memory's speed. So
both ways are measured (see measuring/few_rows_times.py). Inductor computes the addition.
"""

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import density
from gossamer.backend.graph.nodes import arguments, equal_sizes, in_training, is_ours
from gossamer.backend.measuring.few_rows_times import is_faster
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.report.report import Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.few_rows import FewRows
from gossamer.sparsity.experts.kernels import one_expert

aten = torch.ops.aten

MOST_ROWS = 8
_BYTES = 256 << 10  # least bytes of the weight; for smaller ones, our call takes longer than torch's
_TYPES = (torch.float32, torch.bfloat16)


class FewRowProducts:
    """Replaces dense products of a few rows by the kernel for experts."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces the products that are faster as measured, in inference. Returns a decision for each of these."""
        if in_training(graph) or not any(map(is_ours, graph.nodes)):
            return []
        statics = context.inputs.match(graph)
        decisions = []
        for node in graph.nodes:
            factors = _factors(node)
            if factors is None or factors[1] not in statics:
                continue
            x, weight = factors
            rows, (outputs, columns), dtype = x.meta["val"].shape[0], weight.meta["val"].shape, x.meta["val"].dtype
            if not is_faster(rows, columns, outputs, dtype):
                continue
            kernel = one_expert(dtype, columns)
            key = content_hash("few rows", kernel.key, rows)
            region_op.add(key, FewRows(kernel, rows))
            emit = Emitter(node)
            product = emit(region_op.region, [x, weight], key)
            if node.target is aten.addmm.default:
                product = emit(aten.add.Tensor, product, arguments(node)[0])
            node.replace_all_uses_with(product)
            static = statics[weight]
            reason = f"{rows} row{'s' * (rows > 1)}, by the kernel for few rows, measured: faster than torch's own product"
            share = density(static.tensor)
            decisions.append(Decision(static.name, "mm", (outputs, columns), share, None, "rows", False, reason, None))
        if decisions:
            graph.eliminate_dead_code()
        return decisions


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns x [rows, columns] and the weight [outputs, columns] of a product that the kernel can compute, else None."""
    if node.target is aten.mm.default:
        x, factor = arguments(node)
    elif node.target is aten.addmm.default and not node.kwargs:
        _, x, factor = arguments(node)
    else:
        return None
    if factor.target not in (aten.permute.default, aten.t.default, aten.transpose.int):
        return None
    weight = arguments(factor)[0]
    value, given = weight.meta["val"], x.meta["val"]
    if value.dim() != 2 or not equal_sizes(value.stride()[::-1], factor.meta["val"].stride()):
        return None
    if not (given.is_cpu and given.dtype in _TYPES and isinstance(given.shape[0], int) and 0 < given.shape[0] <= MOST_ROWS):
        return None
    large = value.is_contiguous() and value.numel() * value.itemsize >= _BYTES
    return (x, weight) if large and value.dtype == given.dtype else None
