"""Finds the channels that are needed of each value in Dynamo's graph.

    forward     each rule says where the channels of a result lie, and which are constant: a row of zeros gives its bias
    backward    each rule says which channels of its operands the needed channels of the result depend on

A node without a rule takes whole values. It needs all channels that are not constant, and the constants are filled in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.graph.modes import Modes
from gossamer.backend.graph.writes import seen_later, sharing, writes
from gossamer.backend.smaller.channels import Atoms, Channels
from gossamer.backend.smaller.recipe import Known, Recipe

Rule = Callable[["Analysis", fx.Node], "Step | None"]


@dataclass(frozen=True, eq=False)
class Product:
    """A product with a static weight [M, K, ...], for predictions and reports.

    name     the name of the weight, for reports
    op       "linear" or "convolution"
    rows     the channels that the rows of the weight make
    columns  the channels that the columns of the weight read
    tokens   the number of rows of x, or of pixels; None if dynamic
    taps     elements of the weight for each of M x K
    """

    name: str
    op: str
    weight: Tensor
    rows: Channels
    columns: Channels
    tokens: int | None
    taps: int = 1


@dataclass(frozen=True, eq=False)
class Step:
    """What a rule says about a node.

    result    the channels of the value, or of each of several values
    operands  the nodes whose smaller values the node takes
    back      takes the needed channels of the result (of each value) and asks for those of the operands by `Analysis.want`.
              None if each operand needs the same channels, without its constants
    build     `build.Builder` → the node for the smaller values; None for the same call on these
    zeros     channels, and which of their constants have to be zeros so that the step is valid
    product   set if the node is a product
    alias     whether the result may share the memory of its operand
    """

    result: Channels | list[Channels]
    operands: Sequence[fx.Node]
    back: Callable[[Any], None] | None = None
    build: Callable[[Any], fx.Node] | None = None
    zeros: Sequence[tuple[Channels, Tensor]] = ()
    product: Product | None = None
    alias: bool = False


@dataclass(eq=False)
class Analysis:
    """What the rules have found out about a graph.

    names      names of the static inputs, for the report
    gradients  whether the graph computes gradients
    training   whether it computes gradients of static inputs
    entries    the channels of whole values that products gather from, by node and dimension
    written    the nodes that may share memory with a value that changes and is read afterwards
    """

    graph: fx.Graph
    recipe: Recipe
    names: Mapping[fx.Node, str]
    gradients: bool
    training: bool
    atoms: Atoms = field(default_factory=Atoms)
    steps: dict[fx.Node, Step] = field(default_factory=dict)
    entries: dict[tuple[fx.Node, int], Channels] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    _wanted: dict[tuple[fx.Node, int], Tensor] = field(default_factory=dict)

    def channels(self, node: object) -> Channels | None:
        """Returns the channels of a value; None if no rule has found them."""
        step = self.steps.get(node) if isinstance(node, fx.Node) else None
        return step.result if step is not None and isinstance(step.result, Channels) else None

    def entry(self, node: fx.Node, dim: int, size: int) -> Channels:
        """Returns new channels of a value without a rule. A product gathers those that it needs from the whole value."""
        if (node, dim) not in self.entries:
            none = torch.zeros(size, dtype=torch.bool)
            self.entries[node, dim] = Channels((dim,), self.atoms.new(size), 0, none, None)
        return self.entries[node, dim]

    def want(self, node: fx.Node, mask: Tensor, piece: int = 0) -> None:
        """Says that these channels of a value are needed."""
        known = self._wanted.get((node, piece))
        self._wanted[node, piece] = mask if known is None else known | mask

    def is_zero(self, fill: Known | None, const: Tensor) -> Tensor:
        """Returns which constants are zeros and have no gradient."""
        if fill is None:
            return const
        trained = self.training and fill.value.requires_grad
        return torch.zeros_like(const) if trained else const & (fill.value.detach() == 0)

    def run(self, rules: Mapping[Any, Rule]) -> None:
        """Applies the rules to all nodes, and finds the needed channels."""
        live, memory, modes = _live(self.graph), sharing(self.graph), Modes.of(self.graph)
        self.written = seen_later(self.graph, memory)
        whole = self.written | modes.transformed | _views_beside(self.graph, memory)
        for node in self.graph.nodes:
            rule = rules.get(node.target) if node.op in ("call_function", "call_method") and node not in whole else None
            step = rule(self, node) if rule is not None and node in live and self.recipe.of(node) is None else None
            if step is not None and all(self._may_write(each) for each in writes(node)):
                self.steps[node] = self._detached(step) if node in modes.without_gradients or node.target == "detach" else step
        for node in reversed(self.graph.nodes):
            self._back(node)
        for (node, piece), mask in self._wanted.items():
            self.atoms.need(self.pieces(node)[piece].ids, mask)
        for node in self.steps:
            for each in self.pieces(node):
                self.atoms.tie_lines(each.ids, each.along)
        kept = self.atoms.kept()
        for each in self.all_channels():  # a value that no node needs keeps one line, so that no size is zero
            if not bool(kept[each.ids].any()):
                self.atoms.need(each.ids.flatten(), torch.arange(each.ids.numel()) == 0)
                kept = self.atoms.kept()

    def all_channels(self) -> list[Channels]:
        """Returns the channels of all values."""
        return [*self.entries.values(), *[each for node in self.steps for each in self.pieces(node)]]

    def products(self) -> list[Product]:
        """Returns all products with static weights."""
        return [step.product for step in self.steps.values() if step.product is not None]

    def pieces(self, node: fx.Node) -> list[Channels]:
        """Returns the channels of a value, or of each of several values, as a list."""
        result = self.steps[node].result
        return result if isinstance(result, list) else [result]

    def _back(self, node: fx.Node) -> None:
        step = self.steps.get(node)
        for each in node.all_input_nodes:
            if each in self.steps and (step is None or each not in step.operands):
                for piece, channels in enumerate(self.pieces(each)):
                    all_ = torch.ones_like(channels.const)
                    several = isinstance(self.steps[each].result, list)
                    self.want(each, all_ if several else ~channels.const, piece)
        if step is not None:
            masks = [self._wanted.get((node, n)) for n in range(len(self.pieces(node)))]
            found = [
                torch.zeros_like(channels.const) if mask is None else mask
                for mask, channels in zip(masks, self.pieces(node), strict=True)
            ]
            if step.back is not None:
                step.back(found if isinstance(step.result, list) else found[0])
            for operand in step.operands if step.back is None else ():
                self.want(operand, found[0] & ~self.pieces(node)[0].const)

    def _detached(self, step: Step) -> Step:
        """Returns a step whose constants have no gradient, for `detach` and for nodes under torch.no_grad()."""

        def without(channels: Channels) -> Channels:
            fill = channels.fill
            trained = fill is not None and fill.value.requires_grad
            return replace(channels, fill=self.recipe(Tensor.detach, fill)) if trained else channels

        result = step.result
        return replace(step, result=[without(each) for each in result] if isinstance(result, list) else without(result))

    def _may_write(self, node: fx.Node) -> bool:
        """Whether a write to a value is seen by no node but the one that writes."""
        step = self.steps.get(node)
        return len(node.users) == 1 and step is not None and not step.alias


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that results or writes depend on."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in found or writes(node):
            found.update([node, *node.all_input_nodes])
    return found


def _views_beside(graph: fx.Graph, memory: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
    """Returns the nodes that may be views, if the graph returns several values in their memory.

    Then these results share memory, because they are views of one whole value. Parts of one split do not overlap.
    """
    results = dict.fromkeys(graph.output_node().all_input_nodes)
    found = set[fx.Node]()
    for one in results:
        names = memory[one]
        others = [_sources(other, names) for other in names if other in results and other is not one]
        if any(_overlap(_sources(one, names), other) for other in others):
            found.update(each for each in names if not set(names).isdisjoint(each.all_input_nodes))
    return found


def _sources(node: fx.Node, names: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the node, what it is a view of, and so on. `names` share its memory."""
    found, inside = [node], set(names)
    while (source := next((each for each in found[-1].all_input_nodes if each in inside), None)) is not None:
        found.append(source)
    return found


def _overlap(one: Sequence[fx.Node], two: Sequence[fx.Node]) -> bool:
    """Whether two views may overlap, given their sources."""
    shared = next((each for each in one if each in two), None)
    return shared is None or isinstance(shared.meta.get("example_value"), Tensor)
