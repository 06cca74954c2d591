"""The door to the compiler: sparse regions of a graph become `gossamer::region`, all else stays.

    %v = view(%x, [T, K])                             %v = view(%x, [T, K])
    %y = addmm(%bias, %v, permute(%w))           →    %r = gossamer::region(%v, [%w], [%bias], "3f2a…")
    %z = relu(view(%y, [B, S, M]))                    %z = view(%r, [B, S, M])

First everything is decided and compiled, then the graph is changed. Passes, MLIR and LLVM are loaded with this module, which
is imported when the first graph is there to be compiled.
"""

from operator import attrgetter

import torch
from torch import fx

from gossamer.backend.calls import direct_call, message_ops
from gossamer.backend.chains.find_chains import Chain
from gossamer.backend.chains.replace_chain import replace_chain
from gossamer.backend.graph.inputs import Inputs, Static, zero_heavy
from gossamer.backend.graph_cache import Rewritten
from gossamer.backend.measuring.tune import tuned
from gossamer.backend.messages.message_passing import rewrite_messages
from gossamer.backend.operations.fold_values import fold_values
from gossamer.backend.operations.fuse_attention import fuse_attention
from gossamer.backend.operations.fuse_rows import fuse_rows
from gossamer.backend.operations.product_order import order_products
from gossamer.backend.operations.sparse_report import sparse_operations
from gossamer.backend.operations.tall_products import take_tall_products
from gossamer.backend.plan import fix_sizes, plan
from gossamer.backend.regions import contractions
from gossamer.backend.regions.decide import left_out
from gossamer.backend.regions.reorder_into_blocks import in_blocks
from gossamer.backend.regions.replace_region import replace
from gossamer.backend.regions.round_to_bf16 import may_round, with_rounded_weight
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED


@message_ops.kept()
def compile_graph(
    graph: fx.Graph, inputs: Inputs, statics: dict[fx.Node, Static], options: Options, dump: Dump | None, measuring: bool
) -> Rewritten:
    """Rewrites a graph in place. `measuring` (mode="max-autotune") has decisions made by measurement where the tuning database
    does not know better."""
    direct_call.enable()
    messages = rewrite_messages(graph, inputs, options)
    messages += fold_values(graph, inputs, options)
    messages += [*fuse_attention(graph, inputs), *order_products(graph, inputs)]
    fused = fuse_rows(graph, inputs, options, dump)
    for node, static in statics.items():
        if zero_heavy(static.tensor):
            fix_sizes(node)
    values = {node: static.tensor for node, static in statics.items()} | _constants(graph)
    names = {node: statics[node].name if node in statics else str(node.target) for node in values}
    contractions.split_addends(graph, values)
    found = contractions.find(graph, values)
    if options.schedule == "auto" and not contractions.in_training(graph):
        found = [in_blocks(contraction, [values[leaf] for leaf in contraction.weight.leaves]) for contraction in found]
    if may_round(options):
        found = [with_rounded_weight(contraction) for contraction in found]
    if measuring:
        found = tuned(found, values, options)
    decisions, plans = plan(found, names, values, options, dump)
    covered = {leaf for contraction in found for leaf in contraction.weight.leaves}
    decisions += left_out(statics, covered)
    replaced: dict[fx.Node, fx.Node] = {}
    for region, built in plans:
        (replace_chain if isinstance(region, Chain) else replace)(region, built.key, replaced)  # type: ignore[arg-type]
    graph.eliminate_dead_code()
    messages += [*fused.decisions, *sparse_operations(graph, inputs), *take_tall_products(graph, inputs)]
    decisions, kernels = messages + decisions, [kernel.key for _, built in plans for kernel in built.kernels]
    kernels += [region.kernel.key for region in fused.regions.values()]
    regions = {built.key: built.region for _, built in plans} | fused.regions
    lasting = not any(FAILED in decision.reason for decision in decisions)
    return Rewritten(regions, message_ops.used_in(graph), decisions, kernels, lasting)


def _constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """The tensors that tracing has put into the graph itself."""
    found = {n: attrgetter(n.target)(graph.owning_module) for n in graph.nodes if n.op == "get_attr"}
    return {node: value for node, value in found.items() if type(value) is torch.Tensor}
