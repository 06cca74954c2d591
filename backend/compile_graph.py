"""Runs the graph passes over a graph, so that its sparse operations become operations of Gossamer. `rewrite.py` calls it.

    %v = view(%x, [T, K])                             %v = view(%x, [T, K])
    %y = addmm(%bias, %v, permute(%w))           →    %r = gossamer::region(%v, [%w], [%bias], "3f2a…")
    %z = relu(view(%y, [B, S, M]))                    %z = view(%r, [B, S, M])

If a pass raises an error, the graph is restored, and all passes run again without that pass. So a bug in one pass costs only
the gain of that pass. This file imports the passes, MLIR and LLVM. It is imported itself when the first graph is compiled.
"""

import time
import warnings
from collections.abc import Container

from torch import fx

from gossamer.backend.checking.reproducer import write_reproducer
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.graph.snapshot import Snapshot
from gossamer.backend.graph_cache import Rewritten
from gossamer.backend.graph_passes import GRAPH_PASSES, graph_pass
from gossamer.backend.report.report import FAILED, Decision, log
from gossamer.backend.run import computed, region_op
from gossamer.backend.run.lifetime import kept
from gossamer.runtime.direct_call import KERNELS, enable
from gossamer.runtime.operations import defined_in
from gossamer.runtime.torch_internals import OpOverload


@kept()
def compile_graph(graph: fx.Graph, context: GraphContext) -> Rewritten:
    """Runs all passes that are not disabled, in place. With the option `strict`, raises the error of a pass."""
    enable()
    before, left_out = Snapshot.of(graph), set(context.options.disable)
    while True:
        try:
            decisions, seconds = _run(graph, context, left_out)
            break
        except _PassFailed as failure:
            if context.options.strict:
                raise failure.error from None
            left_out.add(failure.name)
            before.restore(graph)
            _warn(failure, context)
    lasting = left_out == set(context.options.disable) and not any(FAILED in decision.reason for decision in decisions)
    regions = region_op.used_in(graph)
    kernels = [kernel.key for region in regions.values() for kernel in region.kernels]
    modules = sorted({defined_in(name) for name in _operations(graph) & KERNELS.keys()})
    return Rewritten(regions, computed.used_in(graph), modules, decisions, kernels, seconds, lasting, in_training(graph))


def _operations(graph: fx.Graph) -> set[str]:
    """Returns the names of Gossamer's operations in a graph."""
    targets = [node.target for node in graph.nodes if isinstance(node.target, OpOverload)]
    return {target.name().partition("::")[2] for target in targets if target.namespace == "gossamer"}


class _PassFailed(Exception):
    """A graph pass raised an error."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.error = name, error


def _run(graph: fx.Graph, context: GraphContext, left_out: Container[str]) -> tuple[list[Decision], dict[str, float]]:
    """Runs the passes. Returns all decisions, and the seconds that each pass took.

    Raises _PassFailed if a pass raises an error."""
    stages = context.dump.stages("graph") if context.dump is not None else None
    text = None
    if stages is not None:
        stages("before", "py", text := _text(graph))
    decisions, seconds = list[Decision](), dict[str, float]()
    for name in GRAPH_PASSES:
        if name in left_out:
            continue
        start = time.perf_counter()
        try:
            found = graph_pass(name).run(graph, context)
        except Exception as error:
            raise _PassFailed(name, error) from error
        seconds[name] = time.perf_counter() - start
        decisions += found
        log.debug("graph pass %s: %d decisions, %.1f ms", name, len(found), 1e3 * seconds[name])
        if stages is not None and (after := _text(graph)) != text:
            stages(name, "py", text := after)
    return decisions, seconds


def _text(graph: fx.Graph) -> str:
    return graph.python_code("self", verbose=True).src.lstrip()


def _warn(failure: _PassFailed, context: GraphContext) -> None:
    error = failure.error
    log.debug("graph pass %s failed", failure.name, exc_info=error)
    path = write_reproducer(failure.name, error, context)
    kept = f" {path} is a program that shows it." if path else ""
    warnings.warn(
        f"gossamer: the graph pass '{failure.name}' failed ({type(error).__name__}: {error}). The graph is compiled without "
        f"it; options={{'disable': ['{failure.name}']}} does so from the start.{kept}",
        stacklevel=2,
    )
