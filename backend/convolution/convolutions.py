"""convolutions: replaces convolutions with a static, sparse weight, and the elementwise work behind them, by sparse kernels.

%y = convolution(%x, %w, %bias, ...)         →    %z = gossamer::region([%x, %w, %bias], "3f2a…")
%z = relu(%y)

First, transposed convolutions and gradients of images become convolutions (transposed.py, gradients.py). find_convolutions.py
finds those with static weights. cost.py judges each alone, time_convolution.py measures those in doubt, and planar.py judges
all of a graph together. build.py then compiles kernels and packs weights.
"""

import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from gossamer.backend.convolution.build import REFERENCE, build
from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.convolution.cost import Judgement, details_of, gain_of, judged_by
from gossamer.backend.convolution.find_convolutions import find
from gossamer.backend.convolution.fold_scales import fold_scales
from gossamer.backend.convolution.gradients import ask_for_what_is_used, take_apart
from gossamer.backend.convolution.planar import together
from gossamer.backend.convolution.time_convolution import timed
from gossamer.backend.convolution.transposed import of_forward
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density, known_values, zero_heavy
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.regions.decide import refusal
from gossamer.backend.regions.grow_region import Region, grow
from gossamer.backend.report.details import Details
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.backend.run import region_op
from gossamer.dialects.errors import CompileError

aten = torch.ops.aten


class Convolutions:
    """Replaces convolutions with a sparse weight by regions."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each convolution whose weight has zeros, and for replaced convolutions between these."""
        statics = context.inputs.match(graph)
        values, names = known_values(graph, statics, context.reads_constants)
        static, training = computed_from(graph, values), in_training(graph)
        _spell_out(graph)
        instead = of_forward(graph, static)
        gradients, whole = take_apart(graph, static) if training else ([], {})
        instead += gradients
        candidates = find(graph, values, {each.convolution: each for each in instead})
        found = [each for _, each in candidates if isinstance(each, Convolution)]
        decisions = [*_refusals(candidates, statics), *(d for each in found for d in _left_whole(each, whole, names))]
        replacing = _Replacing(context, values, names, static, training)
        decisions += [d for each in _judged_together(graph, found, values, context) for d in replacing.decide(each)]
        if replacing.failures:
            warnings.warn(f"{replacing.failures[0]}\nThis convolution stays dense.", stacklevel=3)
        for other in instead:
            if other.convolution not in replacing.claimed:
                other.undo()
        if training:
            ask_for_what_is_used(graph)
        if replacing.claimed or instead:
            graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _Replacing:
    """Replaces convolutions by regions. `claimed` are the nodes of regions, `failures` errors of compilation."""

    context: GraphContext
    values: Mapping[fx.Node, torch.Tensor]
    names: Mapping[fx.Node, str]
    static: Container[fx.Node]
    training: bool
    claimed: set[fx.Node] = field(default_factory=set)
    failures: list[CompileError] = field(default_factory=list)

    def decide(self, judgement: Judgement) -> Iterator[Decision]:
        """Replaces a convolution if its judgement allows, and yields the decision. Raises CompileError if strict."""
        found, reason, gain = judgement.found, judgement.reason, judgement.gain
        name, details = self.names[found.weight.main], None if gain is None else details_of(found)
        if reason is None:
            try:
                yield self._replaced(name, found, gain, details)
                return
            except CompileError as error:
                if self.context.options.strict:
                    raise
                self.failures.append(error)
        elif found.density == 1:
            return
        yield Decision.dense(name, found.op, found.weight.shape, found.density, reason or FAILED, gain, details=details)

    def _replaced(self, name: str, found: Convolution, gain: float | None, details: Details | None) -> Decision:
        """Replaces a convolution by a region, and returns the decision. Raises CompileError."""
        plain = _without_bias(found)
        if not self.training:
            fold_scales(plain.node, self.static)
        region = grow(plain, self.claimed)
        key, taken = build(name, found, region, self.values, gain, self.context, details)
        self.claimed.update(region.members)
        _replace(plain, region, key)
        return taken


def _refusals(candidates: Sequence[tuple[fx.Node, Convolution | str]], statics: Mapping[fx.Node, Static]) -> Iterator[Decision]:
    """Yields decisions about convolutions with many zeros that no kernel can compute."""
    for node, found in candidates:
        leaf = node.args[1]
        if isinstance(found, str) and isinstance(leaf, fx.Node) and leaf in statics and zero_heavy(statics[leaf].tensor):
            name, weight = statics[leaf].name, statics[leaf].tensor
            yield Decision.dense(name, "conv", weight.shape, density(weight), found)


def _judged_together(
    graph: fx.Graph, found: Sequence[Convolution], values: Mapping[fx.Node, torch.Tensor], context: GraphContext
) -> list[Judgement]:
    """Returns all judgements: first each by prediction, then measured within the budget, then as parts of the graph."""
    judged, least = [_judged(each, context.options) for each in found], context.options.min_gain
    if least > 0 and context.measuring is not None:
        judged = timed(judged, values, context.measuring, least)
    return together(graph, judged, least, context.trial) if least > 0 else judged


def _spell_out(graph: fx.Graph) -> None:
    """Repeats arguments that have one number for all dimensions, as with padding="valid", for each dimension."""
    for target, kernel in ((aten.convolution.default, 1), (aten.convolution_backward.default, 2)):
        for node in graph.find_nodes(op="call_function", target=target):
            given: list[Any] = list(node.args)
            dims, first = given[kernel].meta["val"].dim() - 2, kernel + 2
            for at in (first, first + 1, first + 2, first + 4):  # stride, padding, dilation, padding of the output
                given[at] = [*given[at]] * dims if len(given[at]) == 1 else given[at]
            node.args = tuple(given)


def _left_whole(found: Convolution, whole: Mapping[fx.Node, str], names: Mapping[fx.Node, str]) -> Iterator[Decision]:
    """Yields the decision about a gradient of images that could not become a convolution. `whole` has reasons by weight."""
    leaf, weight = found.node.args[1], found.weight
    if isinstance(leaf, fx.Node) and leaf in whole and found.density < 1:
        name = names[weight.main]
        yield Decision.dense(name, f"{found.op} backward", weight.shape, found.density, whole[leaf])


def _judged(found: Convolution, options: Options) -> Judgement:
    """Returns the judgement of a convolution by itself, by prediction."""
    reason = refusal(found)
    if reason is None and options.schedule not in ("auto", REFERENCE):
        reason = f"schedule {options.schedule} is not for convolutions"
    if reason is None and options.schedule == REFERENCE and (found.depthwise or found.window.groups != 1):
        reason = "schedule reference is not for convolutions with groups"
    if reason is not None:
        return Judgement(found, False, reason, None)
    if found.depthwise:
        return Judgement(found, True, None, None)
    return judged_by(found, gain_of(found), options.min_gain)


def _without_bias(found: Convolution) -> Convolution:
    """Adds the bias of a convolution in a node of its own, so that the region takes it into the epilogue."""
    node = found.node
    bias = node.args[2]
    if bias is None:
        return found
    rank = node.meta["val"].dim()
    emit = Emitter(node)
    plain = emit(node.target, *node.args[:2], None, *node.args[3:])
    shaped = emit(aten.reshape.default, bias, [found.m, *[1] * (rank - 2)])
    added = emit(aten.add.Tensor, plain, shaped)
    node.replace_all_uses_with(added)
    node.graph.erase_node(node)
    return replace(found, node=plain)


def _replace(found: Convolution, region: Region, key: str) -> None:
    """Replaces the nodes of a region by one call of `gossamer::region`."""
    output = region.output
    emit = Emitter(output)
    shapes = {"vector": [found.m], "scalar": list[int]()}
    extras = [
        emit(aten.reshape.default, extra.node, shapes[extra.kind]) if extra.kind in shapes else extra.node
        for extra in region.extras
    ]
    filters = found.node.args[1]
    weight = [emit(aten.reshape.default, filters, [found.m, found.k])] if found.depthwise else found.weight.leaves
    output.replace_all_uses_with(emit(region_op.region, [found.source, *weight, *extras], key))
