"""Rewrites an inference or joint graph when Inductor calls it, and keeps the result in a cache on disk.

If torch has the rewritten graph in its own cache, it does not call this rewriting. Then `compile_graph.py`, and with it the
passes and the compiler, are not even imported.
"""

import warnings
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from gossamer.backend import graph_cache
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.trial import Trial
from gossamer.backend.devices.unproven import stays_dense
from gossamer.backend.flow import flow_of
from gossamer.backend.graph.emit import spell_out_numbers
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs, Unmatched, density, zero_heavy
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.graph.strides import orders_of_results, restore_results
from gossamer.backend.purity import Impure, impurity
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision, record
from gossamer.runtime.torch_internals import CustomGraphPass, disable_current_modes, free_unbacked_symbols, off
from gossamer.runtime.torch_names import REGIONS


class SparseRewrite(CustomGraphPass):
    """Rewrites the graphs of one compilation in place, and records the decisions about them.

    fingerprint  a hash of all that the decisions depend on, after a call of `keep`; None if they are not kept on disk
    planar       whether images must have pixels innermost: a convolution is sparse, or takes an unknown number of images
    by_operation whether the graph runs op by op, so that `strides.restore` gives operands of other operations their strides

    If the predicted gain of the convolutions is close to 1, the `trial` decides, unless the graph is of training or impure.
    Schedules whose predicted times are close are measured if that is allowed (see `Budget`). With `measuring`
    (mode="max-autotune"), all schedules that promise a gain are measured. With `pure`, raises Impure for a graph that must not
    be computed twice.
    """

    def __init__(
        self, inputs: Inputs, options: Options, measuring: bool = False, pure: bool = False, trial: Trial | None = None
    ) -> None:
        self._inputs: Inputs | None = inputs
        self._options, self._measuring, self._pure, self._trial = options, measuring, pure, trial
        self._dump = Dump(options.dump_ir) if options.dump_ir else None
        self._seen = False
        self._impurity: str | None = None
        self.fingerprint: str | None = None
        self.planar = self.by_operation = False
        self._called: list[object] = []

    def __call__(self, graph: fx.Graph) -> None:
        if off(REGIONS) or self._inputs is None or not self._inputs.is_whole(graph):
            return  # `finish` warns about it
        self._impurity = impurity(graph, self._inputs)
        if self._pure and self._impurity:
            raise Impure(self._impurity)
        self._seen = True
        with disable_current_modes(), torch.no_grad():  # the modes of tracing, which refuse real tensors beside fake ones
            spell_out_numbers(graph)
            traced, before = orders_of_results(graph), set(graph.nodes)
            self._rewrite(graph, self._inputs)
            restore_results(graph, traced, before, images=not self.by_operation)

    def _rewrite(self, graph: fx.Graph, inputs: Inputs) -> None:
        try:
            statics = inputs.match(graph)
        except Unmatched as problem:
            _give_up(inputs, str(problem))
            return
        budget = None
        if reason := stays_dense(inputs.values, self._options):
            rewritten = graph_cache.Rewritten({}, {}, [], _all_dense(inputs, reason), [], {}, True, in_training(graph))
        else:
            from gossamer.backend.compile_graph import compile_graph, region_op  # imports the whole compiler

            budget = Budget.of(self._measuring)
            trial = None if self._impurity or in_training(graph) else self._trial
            context = GraphContext(inputs, self._options, self._dump, budget, trial, reads_constants=self.by_operation)
            rewritten = compile_graph(graph, context)
            self.planar = region_op.takes_images(graph) or _convolves_any_number(graph)
        self._called += [*rewritten.regions.values(), *rewritten.structures.values()]
        names = {node: static.name for node, static in statics.items()}
        flow = partial(flow_of, graph, names, rewritten.regions)
        record(rewritten.decisions, rewritten.kernels, rewritten.seconds, rewritten.training, flow=flow)
        if self.fingerprint is not None and rewritten.lasting:
            settled = budget is None or budget.settled
            if settled or graph_cache.is_last_try(self.fingerprint):
                graph_cache.remember(self.fingerprint, replace(rewritten, impurity=self._impurity, tried=self._tried))
                if not settled:
                    graph_cache.doubt(self.fingerprint)
            else:
                graph_cache.try_again(self.fingerprint)

    def keep(self) -> bool:
        """Sets the fingerprint under which torch's cache and ours keep the graph. Returns whether they may keep it."""
        if self._inputs is not None and not self._measuring:  # "max-autotune" always measures
            sparse = None if self._trial is None else self._trial.sparse
            self.fingerprint = graph_cache.fingerprint(self._inputs, self._options, sparse)
            if self.fingerprint is not None and graph_cache.is_to_be_decided_again(self.fingerprint):
                graph_cache.try_again(self.fingerprint)
                self.fingerprint = graph_cache.fingerprint(self._inputs, self._options, sparse)
        return self.fingerprint is not None

    def done(self) -> bool:
        """Whether this rewriting has seen the graph, or torch had it in its cache and our cache restored its regions."""
        if not self._seen and self.fingerprint is not None:
            found = graph_cache.recall(self.fingerprint)
            self._impurity = found.impurity if found is not None else None
            if self._pure and self._impurity:
                raise Impure(self._impurity)
            self._seen = found is not None
            if found is not None and self._trial is not None:
                self._trial.close = found.tried
            self._called += graph_cache.restore(found) if found is not None else ()
        return self._seen

    @property
    def _tried(self) -> bool:
        return self._trial is not None and self._trial.close

    @property
    def is_pure(self) -> bool:
        """Whether the graph is known to have no effects."""
        return self._seen and self._impurity is None

    def finish(self) -> list[object]:
        """Drops the tensors, and warns if torch never passed the graph to this rewriting. Call it after the compilation.

        Returns the objects that the rewritten graphs call. Keep them as long as these graphs.
        """
        inputs, self._inputs = self._inputs, None
        if inputs is not None and inputs.statics and not self._seen:
            _give_up(inputs, off(REGIONS) or "torch traced it with other inputs than those that Gossamer compiled it for")
        called, self._called = self._called, []
        return called

    def give_up(self, error: Exception) -> None:
        """Warns that the graph runs uncompiled. Call it instead of `finish` if the compilation failed."""
        inputs, self._inputs, self._called = self._inputs, None, []
        warnings.warn(
            f"gossamer: a graph could not be compiled and runs uncompiled: {error}. "
            'With options={"strict": True} this is an error',
            stacklevel=2,
        )
        if inputs is not None:
            _record_dense(inputs, f"the graph could not be compiled: {error}")

    def uuid(self) -> str:
        """Returns the cache key of this pass.

        Before the pass runs, the key is a hash of all that the decisions depend on. Afterwards the graph itself has the
        decisions, as keys that hash the content of regions. The key is then the version, which tells how graphs call regions.
        """
        return graph_cache.version() if self._seen or self.fingerprint is None else self.fingerprint


def _convolves_any_number(graph: fx.Graph) -> bool:
    """Whether a convolution takes an unknown number of images. With channels innermost, Inductor expects these in another order
    than torch's convolution gives them (torch 2.13)."""
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    return any(free_unbacked_symbols(node.meta["val"]) for node in found)


def _give_up(inputs: Inputs, problem: str) -> None:
    warnings.warn(f"gossamer leaves a graph dense: {problem}", stacklevel=2)
    _record_dense(inputs, f"the graph could not be read: {problem}")


def _record_dense(inputs: Inputs, reason: str) -> None:
    record(_all_dense(inputs, reason), [], {})


def _all_dense(inputs: Inputs, reason: str) -> list[Decision]:
    """Returns decisions that leave dense every static tensor with many zeros."""
    tensors = [(static.name, static.tensor) for static in inputs.statics.values() if zero_heavy(static.tensor)]
    return [Decision.dense(name, "-", t.shape, density(t), reason) for name, t in tensors]
