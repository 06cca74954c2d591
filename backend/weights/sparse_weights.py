"""sparse-weights: products with a static weight of many zeros, and the operations after them, become sparse kernels.

    %y = addmm(%bias, %x, permute(%w))           →    %z = gossamer::region([%x, %w, %bias], "3f2a…")
    %z = relu(%y)

The pass decides about all products and compiles them (plan.py) before it changes the graph.
"""

from torch import fx

from gossamer.backend.chains.find_chains import Chain
from gossamer.backend.chains.replace_chain import replace_chain
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import known_values, written_by, zero_heavy
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.measuring.tune import tuned
from gossamer.backend.regions import contractions
from gossamer.backend.regions.decide import left_out, overwritten, unknown
from gossamer.backend.regions.reorder_into_blocks import in_blocks
from gossamer.backend.regions.replace_region import replace
from gossamer.backend.regions.round_to_bf16 import may_round, with_rounded_weight
from gossamer.backend.report.report import Decision
from gossamer.backend.weights.plan import fix_sizes, plan


class SparseWeights:
    """Products with a sparse weight become regions and chains."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each product with a static weight, and for each other static tensor with many zeros."""
        statics, options = context.inputs.match(graph), context.options
        written = written_by(graph)  # KV caches, which begin as zeros
        lasting = {node: static for node, static in statics.items() if node not in written}
        for node, static in lasting.items():
            if zero_heavy(static.tensor):
                fix_sizes(node)
        values, names = known_values(graph, statics, context.reads_constants)
        contractions.split_addends(graph, values)
        found = contractions.find(graph, values)
        if options.schedule == "auto" and not in_training(graph):
            found = [in_blocks(contraction, [values[leaf] for leaf in contraction.weight.leaves]) for contraction in found]
        if may_round(options):
            found = [with_rounded_weight(contraction) for contraction in found]
        if context.measuring is not None:
            found = tuned(found, values, options, context.measuring)
        decisions, planned = plan(found, names, values, context)
        computed = computed_from(graph, values)
        covered = {leaf for contraction in found for leaf in contraction.weight.leaves}
        decisions += [*left_out(lasting, covered, computed), *overwritten(context.inputs, graph), *unknown(context.inputs)]
        replaced: dict[fx.Node, fx.Node] = {}
        for region, built in planned:
            if isinstance(region, Chain):
                replace_chain(region, built.key, replaced)
            else:
                replace(region, built.key, replaced)
        graph.eliminate_dead_code()
        return decisions
