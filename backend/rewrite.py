"""The rewriting of an inference or joint graph, as Inductor calls it and as caches see it.

Where torch has the rewritten graph in its cache on disk, no graph comes by here, and nothing is loaded of what rewrites and
compiles them: `compile_graph.py` is the door to that.
"""

import warnings

import torch
from torch import fx

from gossamer.backend import graph_cache
from gossamer.backend.devices.budget import Budget
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs, Unmatched, density, zero_heavy
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision, record
from gossamer.dialects.errors import GossamerError
from gossamer.runtime.torch_internals import REGIONS, CustomGraphPass, disable_current_modes, off


class SparseRewrite(CustomGraphPass):
    """Rewrites the graphs of one compilation in place, and records the decisions about them.

    What is in doubt is measured, where that is allowed; with `measuring` (mode="max-autotune") all that promises something.
    """

    def __init__(self, inputs: Inputs, options: Options, measuring: bool = False) -> None:
        self._inputs: Inputs | None = inputs
        self._options, self._measuring = options, measuring
        self._dump = Dump(options.dump_ir) if options.dump_ir else None
        self._seen = False
        self._fingerprint: str | None = None
        self._called: list[object] = []

    def __call__(self, graph: fx.Graph) -> None:
        if off(REGIONS) or self._inputs is None or not self._inputs.is_whole(graph):
            return  # `finish` says so
        self._seen = True
        with disable_current_modes(), torch.no_grad():  # tracing's modes: here real and fake tensors meet
            self._rewrite(graph, self._inputs)

    def _rewrite(self, graph: fx.Graph, inputs: Inputs) -> None:
        from gossamer.backend.compile_graph import compile_graph  # with all of the compiler behind it

        try:
            inputs.match(graph)
        except Unmatched as problem:
            _give_up(inputs, str(problem))
            return
        budget = Budget.of(self._measuring)
        rewritten = compile_graph(graph, GraphContext(inputs, self._options, self._dump, budget))
        self._called += [*rewritten.regions.values(), *rewritten.structures.values()]
        record(rewritten.decisions, rewritten.kernels, rewritten.seconds)
        if self._fingerprint is not None and rewritten.lasting:
            if budget is None or budget.settled or graph_cache.is_last_try(self._fingerprint):
                graph_cache.remember(self._fingerprint, rewritten)
            else:
                graph_cache.try_again(self._fingerprint)

    def keep(self) -> bool:
        """Has torch keep the rewritten graph on disk, and keeps its regions there; False if that is not to be."""
        if self._inputs is not None and not self._measuring:  # a user who asks for measurements gets them
            self._fingerprint = graph_cache.fingerprint(self._inputs, self._options)
        return self._fingerprint is not None

    def done(self) -> bool:
        """Whether the graph has come by, or torch had it in its cache and its regions are known again."""
        if not self._seen and self._fingerprint is not None:
            called = graph_cache.recall(self._fingerprint)
            self._seen = called is not None
            self._called += called or ()
        return self._seen

    def finish(self) -> list[object]:
        """To be called after compilation: lets go of the tensors, and notices if the graph never came by.

        Returns what the rewritten graphs call, which is to be kept as long as they are.
        """
        inputs, self._inputs = self._inputs, None
        if inputs is not None and inputs.statics and not self._seen:
            _give_up(inputs, off(REGIONS) or "no traced graph has the inputs that Dynamo gave")
        called, self._called = self._called, []
        return called

    def give_up(self, error: GossamerError) -> None:
        """To be called instead of `finish` where compilation failed: says that the graph runs uncompiled."""
        inputs, self._inputs, self._called = self._inputs, None, []
        warnings.warn(
            f'gossamer: a graph runs as without torch.compile ({error}); options={{"strict": True}} raises this', stacklevel=2
        )
        if inputs is not None:
            _record_dense(inputs, f"the graph could not be compiled: {error}")

    def uuid(self) -> str:
        """Cache key of the pass: before it runs, a hash of what it decides by; then its decisions are in the graph, as region
        keys that hash the regions' content, and the version says how they are called."""
        return graph_cache.version() if self._seen or self._fingerprint is None else self._fingerprint


def _give_up(inputs: Inputs, problem: str) -> None:
    warnings.warn(f"gossamer leaves a graph dense: {problem}", stacklevel=2)
    _record_dense(inputs, f"the graph could not be read: {problem}")


def _record_dense(inputs: Inputs, reason: str) -> None:
    tensors = [(static.name, static.tensor) for static in inputs.statics.values() if zero_heavy(static.tensor)]
    record([Decision(name, "-", tuple(t.shape), density(t), None, None, False, reason, None) for name, t in tensors], [], {})
