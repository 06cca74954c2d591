"""The rewriting of an inference or joint graph: sparse regions become `gossamer::region`, all else stays.

    %v = view(%x, [T, K])                             %v = view(%x, [T, K])
    %y = addmm(%bias, %v, permute(%w))           →    %r = gossamer::region(%v, [%w], [%bias], "3f2a…")
    %z = relu(view(%y, [B, S, M]))                    %z = view(%r, [B, S, M])

First everything is decided and compiled, then the graph is changed.
"""

import warnings
from operator import attrgetter

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._python_dispatch import _disable_current_modes

from gossamer.backend import contractions, graph_cache, message_ops, region_op
from gossamer.backend.chains import Chain
from gossamer.backend.decide import left_out, unmatched
from gossamer.backend.detect import Inputs, Unmatched, zero_heavy
from gossamer.backend.dump import Dump
from gossamer.backend.fold_values import fold_values
from gossamer.backend.fuse_attention import fuse_attention
from gossamer.backend.graph_cache import Rewritten
from gossamer.backend.message_passing import rewrite_messages
from gossamer.backend.options import Options
from gossamer.backend.permute import in_blocks
from gossamer.backend.plan import FAILED, fix_sizes, plan
from gossamer.backend.precision import may_round, with_rounded_weight
from gossamer.backend.product_order import order_products
from gossamer.backend.replace import replace, replace_chain
from gossamer.backend.report import record
from gossamer.backend.sparse_report import sparse_operations
from gossamer.backend.tune import tuned


class SparseRewrite(CustomGraphPass):
    """Rewrites the graphs of one compilation in place, and records the decisions about them.

    With `measuring` (mode="max-autotune"), decisions are made by measurement where the tuning database does not know better.
    """

    def __init__(self, inputs: Inputs, options: Options, measuring: bool = False) -> None:
        self._inputs: Inputs | None = inputs
        self._options, self._measuring = options, measuring
        self._dump = Dump(options.dump_ir) if options.dump_ir else None
        self._seen = False
        self._fingerprint: str | None = None

    def __call__(self, graph: fx.Graph) -> None:
        if self._inputs is None or not self._inputs.is_whole(graph):
            return
        self._seen = True
        with _disable_current_modes(), torch.no_grad():  # tracing's modes: here real and fake tensors meet
            self._rewrite(graph, self._inputs)

    def _rewrite(self, graph: fx.Graph, inputs: Inputs) -> None:
        try:
            statics = inputs.match(graph)
        except Unmatched as problem:
            _give_up(inputs, str(problem))
            return
        messages = rewrite_messages(graph, inputs, self._options)
        messages += fold_values(graph, inputs, self._options)
        messages += [*fuse_attention(graph, inputs), *order_products(graph, inputs)]
        for node, static in statics.items():
            if zero_heavy(static.tensor):
                fix_sizes(node)
        values = {node: static.tensor for node, static in statics.items()} | _constants(graph)
        names = {node: statics[node].name if node in statics else str(node.target) for node in values}
        contractions.split_addends(graph, values)
        found = contractions.find(graph, values)
        if self._options.schedule == "auto" and not contractions.in_training(graph):
            found = [in_blocks(contraction, [values[leaf] for leaf in contraction.weight.leaves]) for contraction in found]
        if may_round(self._options):
            found = [with_rounded_weight(contraction) for contraction in found]
        if self._measuring:
            found = tuned(found, values, self._options)
        decisions, plans = plan(found, names, values, self._options, self._dump)
        covered = {leaf for contraction in found for leaf in contraction.weight.leaves}
        decisions += left_out(statics, covered)
        replaced: dict[fx.Node, fx.Node] = {}
        for region, prepared in plans:
            (replace_chain if isinstance(region, Chain) else replace)(region, prepared.key, replaced)  # type: ignore[arg-type]
        graph.eliminate_dead_code()
        messages += sparse_operations(graph, inputs)
        decisions, kernels = messages + decisions, [kernel.key for _, prepared in plans for kernel in prepared.kernels]
        record(decisions, kernels)
        failed = any(FAILED in decision.reason for decision in decisions)
        if self._fingerprint is not None and not failed and not message_ops.used_in(graph):
            regions = {prepared.key: region_op.known(prepared.key) for _, prepared in plans}
            graph_cache.remember(self._fingerprint, Rewritten(regions, decisions, kernels))

    def keep(self) -> bool:
        """Has torch keep the rewritten graph on disk, and keeps its regions there; False if that is not to be."""
        if self._inputs is not None and not self._measuring:  # what is measured may turn out otherwise next time
            self._fingerprint = graph_cache.fingerprint(self._inputs, self._options)
        return self._fingerprint is not None

    def done(self) -> bool:
        """Whether the graph has come by, or torch had it in its cache and its regions are known again."""
        if not self._seen and self._fingerprint is not None:
            self._seen = graph_cache.recall(self._fingerprint)
        return self._seen

    def finish(self) -> None:
        """To be called after compilation: lets go of the tensors, and notices if the graph never came by."""
        inputs, self._inputs = self._inputs, None
        if inputs is not None and inputs.statics and not self._seen:
            _give_up(inputs, "no traced graph has the inputs that Dynamo gave")

    def uuid(self) -> str:
        """Cache key of the pass: before it runs, a hash of what it decides by; then its decisions are in the graph, as region
        keys that hash the regions' content."""
        return "gossamer-3" if self._seen or self._fingerprint is None else self._fingerprint


def _give_up(inputs: Inputs, problem: str) -> None:
    warnings.warn(f"gossamer leaves a graph dense: {problem}", stacklevel=2)
    record(unmatched(inputs.statics.values(), problem), [])


def _constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """The tensors that tracing has put into the graph itself."""
    found = {n: attrgetter(n.target)(graph.owning_module) for n in graph.nodes if n.op == "get_attr"}
    return {node: value for node, value in found.items() if type(value) is torch.Tensor}
