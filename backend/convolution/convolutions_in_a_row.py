"""convolutions-in-a-row: regions of convolutions that read each other's results become one operation.

%a = gossamer::region([%x, %w0, %scale0, ...], "3f2a…")           %r = gossamer::chain([%x, %w0, %w1, ...], "77b1…")
%b = gossamer::region([%a, %w1, ...], "90cc…")               →    %b = %r[0]

Small images go through kernels in less time than torch takes from one operation to the next. What a region reads besides images
and weights, such as the scale of a batch norm, is computed from parameters: with them it is an operand of the row, and computed
when they are new.
"""

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import fx

from gossamer.backend.calls import region_op
from gossamer.backend.calls.convolved_region import ConvolvedRegion
from gossamer.backend.calls.convolved_row import ConvolvedRow
from gossamer.backend.calls.depthwise_region import DepthwiseRegion
from gossamer.backend.calls.row_of_kernels import Step
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.report.report import Decision


class ConvolutionsInARow:
    """Regions of convolutions in a row become one operation; of training, where gradients read what is between, they do not."""

    name: ClassVar[str] = "convolutions-in-a-row"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Nothing is decided that a report would tell."""
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
    """Regions, such that whatever reads one of a row and is not part of it comes after all of them."""
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
    if type(found) is ConvolvedRegion:
        return all(leaf in statics for leaf in given[1 : 1 + found.leaves])
    return type(found) is DepthwiseRegion and given[1] in known


def _call(node: fx.Node) -> tuple[list[fx.Node], str]:
    operands: Any = node.args[0]
    return list(operands), str(node.args[1])


def _join(row: Sequence[fx.Node], known: Container[fx.Node], statics: Mapping[fx.Node, Any]) -> None:
    """Puts one operation where the regions of a row were."""
    calls = [_call(node) for node in row]
    regions: list[Any] = [region_op.known(key) for _, key in calls]
    packed = [r.leaves if isinstance(r, ConvolvedRegion) else 0 for r in regions]
    read = [[given[0], *given[1 + n :]] for (given, _), n in zip(calls, packed, strict=True)]
    computed = list(dict.fromkeys(n for nodes in read for n in nodes if n in known))
    expression = cut(computed, statics)
    if expression.numbers:
        return
    images = list(dict.fromkeys(n for nodes in read for n in nodes if n not in known and n not in row))
    weights = [given[1 : 1 + n] for (given, _), n in zip(calls, packed, strict=True)]
    leaves = list(dict.fromkeys((*expression.leaves, *(leaf for each in weights for leaf in each))))
    numbers = {node: n for n, node in enumerate((*images, *row))}
    steps = list[Step]()
    for region, (x, *others), weight in zip(regions, read, weights, strict=True):
        places = [(n in known, computed.index(n) if n in known else numbers[n]) for n in others]
        own = None if isinstance(region, ConvolvedRegion) else places.pop(0)[1]
        steps.append(Step(region, numbers[x], tuple(map(leaves.index, weight)), own, tuple(places)))
    results = tuple(n for n, node in enumerate(row) if any(user not in row for user in node.users))
    found = ConvolvedRow(tuple(steps), len(images), len(expression.leaves), expression.evaluate, results)
    key = content_hash(*[key for _, key in calls], [step.places for step in steps], found.given, expression.key, results)
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
