"""The rewriting of an inference or joint graph: sparse regions become `gossamer::region`, all else stays.

    %v = view(%x, [T, K])                             %v = view(%x, [T, K])
    %y = addmm(%bias, %v, permute(%w))           →    %r = gossamer::region(%v, [%w], [%bias], "3f2a…")
    %z = relu(view(%y, [B, S, M]))                    %z = view(%r, [B, S, M])

First everything is decided and compiled, then the graph is changed, so that a failure leaves it as it was.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from gossamer.backend import contractions, region_op
from gossamer.backend.contractions import Contraction
from gossamer.backend.decide import Verdict, judge, left_out
from gossamer.backend.detect import Inputs, Unmatched
from gossamer.backend.dump import Dump
from gossamer.backend.elementwise import kind_of
from gossamer.backend.options import Options
from gossamer.backend.prepare import Prepared, prepare
from gossamer.backend.regions import Extra, Region, grow
from gossamer.backend.report import Decision, log, record
from gossamer.dialects.errors import CompileError

aten = torch.ops.aten


class SparseRewrite(CustomGraphPass):
    """Rewrites the graphs of one compilation."""

    def __init__(self, inputs: Inputs, options: Options) -> None:
        self._inputs, self._options = inputs, options
        self._dump = Dump(options.dump_ir) if options.dump_ir else None

    def __call__(self, graph: fx.Graph) -> None:
        try:
            statics = self._inputs.match(graph)
        except Unmatched as problem:
            self._leave_dense(graph, problem)
            return
        values = {node: static.tensor for node, static in statics.items()}
        values |= _constants(graph)
        names = {node: statics[node].name if node in statics else str(node.target) for node in values}
        _split_addends(graph, values)
        plans, decisions = self._plan(contractions.find(graph, values), names, values)
        decisions += left_out(graph, statics, decisions_for={n for n in names for d in decisions if d.name == names[n]})
        replaced: dict[fx.Node, fx.Node] = {}
        for plan in plans:
            _replace(plan, replaced)
        graph.eliminate_dead_code()
        graph.lint()
        graph.owning_module.recompile()
        record(decisions, [plan.prepared.kernel.key for plan in plans])

    def uuid(self) -> str:
        """The cache key of what this pass does: region keys are content hashes and stand in the rewritten graph."""
        return "gossamer-region-1"
