"""convolutions-in-a-row: joins regions of convolutions that read each other's results into one operation.

%a = gossamer::region([%x, %w0, %scale0, ...], "3f2a…")           %r = gossamer::chain([%x, %w0, %w1, ...], "77b1…")
%b = gossamer::region([%a, %w1, ...], "90cc…")               →    %b = %r[0]

With small images, a kernel takes less time than torch takes from one operation to the next. Other operands of a region, such as
the scale of a batch norm, are computed from parameters. The row takes these parameters, and computes such operands only when
the parameters change (run/convolved_row.py).
"""

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.report.report import Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.convolved_row import ConvolvedRow
from gossamer.backend.run.layouts import Images
from gossamer.backend.run.row_of_kernels import Step


class ConvolutionsInARow:
    """Joins regions of convolutions, in inference only: in training, gradients read the values between them."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Joins regions. Returns no decisions, because nothing becomes sparse or dense."""
        statics = context.inputs.match(graph)
        if in_training(graph) or noticed(list(statics), context.options.verify) == "full":
            return []
        known = computed_from(graph, statics)
        for row in list(_rows(graph, known, statics)):
            if len(row) > 1:
                _join(row, known, statics)
        graph.eliminate_dead_code()
        return []


def _rows(graph: fx.Graph, known: Container[fx.Node], statics: Container[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yields rows of regions that can be joined: no region of a row depends on a row's result by way of other nodes."""
    row, behind = list[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        held = not behind.isdisjoint(node.all_input_nodes)
        if node in known or not _is_convolution(node, known, statics):
            if held or not set(row).isdisjoint(node.all_input_nodes):
                behind.add(node)
            continue
        if held:
            yield row
            row, behind = [], set()
        row.append(node)
    yield row


def _is_convolution(node: fx.Node, known: Container[fx.Node], statics: Container[fx.Node]) -> bool:
    if node.target is not region_op.region:
        return False
    given, key = _call(node)
    if given[0] in known:
        return False
    found = region_op.known(key)
    if not isinstance(found, CompiledRegion) or not isinstance(found.layout, Images):
        return False
    if found.weights:
        return all(leaf in statics for leaf in given[found.weights[0].statics])
    return given[1] in known


def _call(node: fx.Node) -> tuple[list[fx.Node], str]:
    operands: Any = node.args[0]
    return list(operands), str(node.args[1])


@dataclass(frozen=True)
class _Called:
    """The call of a region: its images x, the leaves of its weight if that is packed, and its other operands."""

    region: CompiledRegion
    key: str
    x: fx.Node
    leaves: list[fx.Node]
    others: list[fx.Node]

    @classmethod
    def at(cls, node: fx.Node) -> "_Called":
        (x, *given), key = _call(node)
        region: Any = region_op.known(key)
        count = region.variants[0].others.start - 1
        return cls(region, key, x, given[:count], given[count:])


def _join(row: Sequence[fx.Node], known: Container[fx.Node], statics: Mapping[fx.Node, Any]) -> None:
    """Replaces the regions of a row by one operation."""
    calls = [_Called.at(node) for node in row]
    read = list(dict.fromkeys(node for call in calls for node in (call.x, *call.others)))
    computed = [node for node in read if node in known]
    expression = cut(computed, statics)
    if expression.numbers:
        return
    images = [node for node in read if node not in known and node not in row]
    leaves = list(dict.fromkeys((*expression.leaves, *(leaf for call in calls for leaf in call.leaves))))
    numbers = {node: n for n, node in enumerate((*images, *row))}
    steps = list[Step]()
    for call in calls:
        places = [(node in known, computed.index(node) if node in known else numbers[node]) for node in call.others]
        own = None if call.leaves else places.pop(0)[1]
        steps.append(Step(call.region, numbers[call.x], tuple(map(leaves.index, call.leaves)), own, tuple(places)))
    results = tuple(n for n, node in enumerate(row) if any(user not in row for user in node.users))
    found = ConvolvedRow(tuple(steps), len(images), len(expression.leaves), expression.evaluate, results)
    key = content_hash(*[call.key for call in calls], [step.places for step in steps], found.given, expression.key, results)
    region_op.add(key, found)
    _replace(row, [*images, *leaves], key, results)


def _replace(row: Sequence[fx.Node], operands: list[fx.Node], key: str, results: Sequence[int]) -> None:
    graph, last = row[0].graph, row[-1]
    emit = Emitter(last)
    joined = emit(region_op.chain, operands, key)
    taken = [emit(operator.getitem, joined, at) for at in range(len(results))]
    behind, moved = {*row}, list[fx.Node]()
    for node in _between(row[0], last):
        if node not in behind and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            moved.append(node)
    for node in reversed(moved):
        last.append(node)
    for n, value in zip(results, taken, strict=True):
        row[n].replace_all_uses_with(value)
    for node in reversed(row):
        graph.erase_node(node)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first
    while node is not last:
        yield node
        node = node.next
