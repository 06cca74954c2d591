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

from gossamer.backend import contractions
from gossamer.backend.contractions import Contraction
from gossamer.backend.decide import judge, left_out, stays_dense, unmatched
from gossamer.backend.detect import Inputs, Unmatched, zero_heavy
from gossamer.backend.dump import Dump
from gossamer.backend.options import Options
from gossamer.backend.prepare import Prepared, prepare
from gossamer.backend.regions import Region, grow
from gossamer.backend.replace import replace
from gossamer.backend.report import Decision, record
from gossamer.dialects.errors import CompileError


class SparseRewrite(CustomGraphPass):
    """Rewrites the graphs of one compilation in place, and records the decisions about them."""

    def __init__(self, inputs: Inputs, options: Options) -> None:
        self._inputs: Inputs | None = inputs
        self._options = options
        self._dump = Dump(options.dump_ir) if options.dump_ir else None
        self._seen = False

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
        for node, static in statics.items():
            if zero_heavy(static.tensor):
                _fix_sizes(node)
        values = {node: static.tensor for node, static in statics.items()} | _constants(graph)
        names = {node: statics[node].name if node in statics else str(node.target) for node in values}
        contractions.split_addends(graph, values)
        found = contractions.find(graph, values)
        decisions, plans = self._plan(found, names, values)
        covered = {leaf for contraction in found for leaf in contraction.weight.leaves}
        decisions += left_out(statics, covered)
        replaced: dict[fx.Node, fx.Node] = {}
        for region, prepared in plans:
            replace(region, prepared.key, replaced)
        graph.eliminate_dead_code()
        record(decisions, [kernel.key for _, prepared in plans for kernel in prepared.kernels])

    def finish(self) -> None:
        """To be called after compilation: lets go of the tensors, and notices if the graph never came by."""
        inputs, self._inputs = self._inputs, None
        if inputs is not None and inputs.statics and not self._seen:
            _give_up(inputs, "no traced graph has the inputs that Dynamo gave")

    def uuid(self) -> str:
        """Cache key of the pass; what it decided is in the graph, as region keys that hash the regions' content."""
        return "gossamer-1"

    def _plan(
        self, found: list[Contraction], names: dict[fx.Node, str], values: dict[fx.Node, torch.Tensor]
    ) -> tuple[list[Decision], list[tuple[Region, Prepared]]]:
        """Decides about every contraction, and compiles the regions of those that become sparse."""
        decisions: list[Decision] = []
        plans: list[tuple[Region, Prepared]] = []
        claimed: set[fx.Node] = set()
        failures: list[CompileError] = []
        for contraction in found:
            weight, name = contraction.weight, names[contraction.weight.main]
            if weight.density == 1 and self._options.min_gain > 0:
                continue
            refusal, gain = judge(contraction, self._options)
            if refusal is not None:
                decisions.append(stays_dense(contraction, name, refusal, gain))
                continue
            for leaf in weight.leaves:
                _fix_sizes(leaf)
            region = grow(contraction, claimed)
            try:
                prepared = prepare(region, name, [values[leaf] for leaf in weight.leaves], self._options, self._dump)
            except CompileError as error:
                if self._options.strict:
                    raise
                failures.append(error)
                decisions.append(stays_dense(contraction, name, "it failed to compile", gain))
                continue
            claimed.update(region.members)
            plans.append((region, prepared))
            reason = f"{region.fused} op{'s' * (region.fused > 1)} fused" if region.fused else "nothing to fuse"
            decisions.append(
                Decision(
                    name, contraction.op, weight.shape, weight.density, prepared.format,
                    prepared.schedule, True, reason, gain,
                )
            )  # fmt: skip
        if failures:
            others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            advice = "" if self._dump else " options={'dump_ir': DIR} writes every stage to files."
            warnings.warn(f"{failures[0]}\nIt{others} stays dense.{advice}", stacklevel=2)
        return decisions, plans


def _give_up(inputs: Inputs, problem: str) -> None:
    warnings.warn(f"gossamer leaves a graph dense: {problem}", stacklevel=2)
    record(unmatched(inputs.statics.values(), problem), [])


def _fix_sizes(node: fx.Node) -> None:
    """Makes Dynamo guard the sizes of a weight: another size is another kernel."""
    for size in node.meta["val"].shape if "val" in node.meta else ():
        int(size)


def _constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """The tensors that tracing has put into the graph itself."""
    found = {n: attrgetter(n.target)(graph.owning_module) for n in graph.nodes if n.op == "get_attr"}
    return {node: value for node, value in found.items() if type(value) is torch.Tensor}
