"""Builds the smaller graph: a copy of Dynamo's nodes on smaller values, and a recipe that computes its new inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.graph.modes import changes_mode
from gossamer.backend.graph.writes import writes
from gossamer.backend.run.lines import inverse, outside_in, pick_lines, spread_lines
from gossamer.backend.smaller.analysis import Analysis
from gossamer.backend.smaller.channels import Channels
from gossamer.backend.smaller.recipe import Known


@dataclass(frozen=True, eq=False)
class SmallerGraph:
    """A graph that lacks some of Dynamo's inputs and has new inputs at the end.

    graph    the graph
    taken    the indices of Dynamo's inputs that it has
    leaves   the indices of Dynamo's inputs that the recipe takes
    recipe   values of leaves → (the new inputs, [whether a tensor that has to be zeros is not])
    inputs   for each new input, its value, its placeholder, and the placeholder of the static input that it replaces
    """

    graph: fx.Graph
    taken: Sequence[int]
    leaves: Sequence[int]
    recipe: fx.GraphModule
    inputs: Sequence[tuple[Tensor, fx.Node, fx.Node | None]]


class Builder:
    """Copies a graph node by node, without the channels that are not kept."""

    def __init__(self, analysis: Analysis, kept: Tensor) -> None:
        self.graph, self.recipe = fx.Graph(), analysis.recipe
        self._analysis, self._kept = analysis, kept
        self._env, self._full = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        self._gathered = dict[tuple[fx.Node, int], fx.Node]()
        self._zeros, self._inputs = list[Known](), list[tuple[Known, fx.Node]]()
        self._last: fx.Node | None = None

    def run(self) -> SmallerGraph:
        """Copies the whole graph."""
        placeholders = self._analysis.graph.find_nodes(op="placeholder")
        for node in self._analysis.graph.nodes:
            step = self._analysis.steps.get(node)
            for channels, which in step.zeros if step is not None else ():
                self.zero_constants(channels, which)
            self._env[node] = self.same(node) if step is None or step.build is None else step.build(self)
            if node.op == "placeholder":
                self._last = self._env[node]
            if changes_mode(node):  # what is computed under torch.no_grad() has no gradient
                self._full.clear()
                self._gathered.clear()
        effects = {self._env[node] for node in self._analysis.graph.nodes if not node.users}  # have side effects
        self.graph.eliminate_dead_code(lambda node: node in effects or node.is_impure() or bool(writes(node)))
        inputs = [known for known, _ in self._inputs]
        named = [self.recipe.main_leaf(known) for known in inputs]
        for node in placeholders:
            if not self._env[node].users and isinstance(node.meta.get("example_value"), Tensor):
                self.graph.erase_node(self._env.pop(node))
        recipe, leaves = self.recipe.finish(inputs, self._zeros)
        return SmallerGraph(
            self.graph,
            [n for n, node in enumerate(placeholders) if node in self._env],
            [placeholders.index(leaf) for leaf in leaves],
            recipe,
            [(known.value, made, leaf) for (known, made), leaf in zip(self._inputs, named, strict=True)],
        )

    def same(self, node: fx.Node) -> fx.Node:
        """Emits the same call on smaller values."""
        step = self._analysis.steps.get(node)
        small = step.operands if step is not None else ()
        made = self.graph.node_copy(node, lambda each: self._env[each] if each in small else self.full(each))
        if step is not None:
            made.meta.pop("example_value", None)
        return made

    def mapped(self, arguments: Any) -> Any:
        """Returns arguments of a node, such as dynamic sizes, in the smaller graph."""
        return fx.map_arg(arguments, self.full)

    def small(self, node: fx.Node) -> fx.Node:
        """Returns the smaller value of a node."""
        return self._env[node]

    def full(self, node: fx.Node) -> fx.Node:
        """Returns the whole value of a node, with constants in its missing channels."""
        channels = self._analysis.channels(node)
        if channels is None or bool((lines := self.kept(channels)).all()):
            return self._env[node]
        if node not in self._full:
            value = node.meta["example_value"]
            fill = None if channels.fill is None else self._spelled(channels, channels.fill, value)
            self._full[node] = self._spread(self._env[node], channels.dim, lines, fill, outside_in(value))
        return self._full[node]

    def _spelled(self, channels: Channels, fill: Known, value: Tensor) -> fx.Node:
        """Returns the constants as a tensor that broadcasts to `value`."""
        order = sorted(range(len(channels.dims)), key=lambda n: channels.dims[n])
        sizes = dict(zip(channels.dims, channels.ids.shape, strict=True))
        turned = self.recipe(torch.permute, fill, order)
        turned = self.recipe(torch.reshape, turned, [sizes.get(n, 1) for n in range(value.dim())])
        return self.input(self.recipe(Tensor.to, turned, value.dtype))

    def _spread(self, small: fx.Node, dim: int, lines: Tensor, fill: fx.Node | None, order: list[int]) -> fx.Node:
        """Puts the lines of a smaller value where they belong, and constants elsewhere. See `_selected` for `order`."""
        if not self._analysis.gradients:  # `spread_lines` has no gradient
            index = self.input(self.recipe.constant(lines.nonzero().flatten()))
            return self.graph.call_function(spread_lines, (small, index, fill, len(lines), dim, order))
        index = self.input(self.recipe.constant((lines.cumsum(0) - 1).clamp(min=0)))
        mask = self.input(self.recipe.constant(lines.reshape([-1 if n == dim else 1 for n in range(len(order))])))
        whole = self._selected(small, dim, index, order)
        return self.graph.call_function(torch.where, (mask, whole, 0.0 if fill is None else fill))

    def _selected(self, value: fx.Node, dim: int, index: fx.Node, order: list[int]) -> fx.Node:
        """Selects some lines of a value. `order` lists the dimensions of the result in memory, outermost first."""
        call = self.graph.call_function
        selected = call(torch.index_select, (call(torch.permute, (value, order)), order.index(dim), index))
        return call(torch.permute, (selected, inverse(order)))

    def gathered(self, node: fx.Node, channels: Channels) -> fx.Node:
        """Returns the channels of a whole value that products take from it."""
        kept, dim = self.kept(channels), channels.dim
        if bool(kept.all()):
            return self.full(node)
        if (node, dim) not in self._gathered or node in self._analysis.written:
            index, whole = self.input(self.recipe.constant(kept.nonzero().flatten())), self.full(node)
            if self._analysis.gradients:
                made = self._selected(whole, dim, index, outside_in(node.meta["example_value"]))
            else:
                made = self.graph.call_function(pick_lines, (whole, index, dim))
            self._gathered[node, dim] = made
        return self._gathered[node, dim]

    def kept(self, channels: Channels) -> Tensor:
        """Returns which indices stay in the dimension that gets shorter."""
        return channels.lines(self._kept)

    def taken(self, known: Known, masks: Mapping[int, Tensor]) -> Known:
        """Returns a tensor with only the lines that masks keep, by dimension."""
        for dim, mask in masks.items():
            if not bool(mask.all()):
                known = self.recipe(torch.index_select, known, dim, mask.nonzero().flatten())
        return known

    def zeros(self, known: Known) -> None:
        """Makes the smaller graph valid only if this tensor is zeros."""
        if known.value.numel():
            self._zeros.append(known)

    def zero_constants(self, channels: Channels, which: Tensor) -> None:
        """Makes the smaller graph valid only if these constants of a value are zeros."""
        if channels.fill is not None and bool(which.any()):
            self.zeros(self.recipe(torch.where, which, channels.fill, 0.0))

    def finite(self, known: Known) -> None:
        """Makes the smaller graph valid only if this tensor is finite."""
        self.zeros(self.recipe(torch.logical_not, self.recipe(torch.isfinite, known)))

    def input(self, known: Known) -> fx.Node:
        """Adds a new input to the graph."""
        name = f"smaller_{len(self._inputs)}"
        if self._last is None:
            made = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._last):
                made = self.graph.placeholder(name)
        self._last = made
        self._inputs.append((known, made))
        return made
