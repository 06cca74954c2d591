"""Notes how tensors are computed from the static inputs of a graph, so that they can be computed again when these change.

known = recipe.of(node)                              a weight, maybe masked, as Dynamo's graph computes it
small = recipe(torch.index_select, known, 0, rows)   computed at once, and noted
module, leaves = recipe.finish([small], zeros)       values of leaves → the small tensors, and whether `zeros` are zeros
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gossamer.backend.graph.modes import Modes
from gossamer.backend.graph.nodes import ancestors, depending
from gossamer.backend.graph.writes import written
from gossamer.backend.run.recomputed import leaf_without_hooks


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor that is computed from static inputs alone: its node in the recipe, and its present value."""

    node: fx.Node
    value: Tensor


class Recipe:
    """Notes how tensors are computed from static inputs.

    statics  placeholders of Dynamo's graph, with their values
    """

    def __init__(self, graph: fx.Graph, statics: Mapping[fx.Node, Tensor]) -> None:
        self._root, self._graph, self._constants = nn.Module(), fx.Graph(), 0
        self._known = dict[fx.Node, Known]()
        self._leaves = list[fx.Node]()
        # The analysis asks for gradients, in which hooks of the user must not run.
        self._statics = {node: leaf_without_hooks(each) if _is_trained(each) else each for node, each in statics.items()}
        modes = Modes.of(graph)
        self._constant = modes.without_gradients
        self._static = set(statics)
        for node in graph.nodes:
            inputs = node.all_input_nodes
            called = node.op in ("call_function", "call_method") and node not in modes.transformed
            if called and inputs and all(each in self._static for each in inputs):
                self._static.add(node)
        self._static -= depending(graph, written(graph) & self._static)

    def of(self, node: object) -> Known | None:
        """Returns the tensor of a node of Dynamo's graph; None if it depends on other inputs."""
        if not isinstance(node, fx.Node) or node not in self._static:
            return None
        if node not in self._known:
            if node.op == "placeholder":
                leaf = self._graph.placeholder(node.name)
                self._leaves.append(node)
                self._known[node] = Known(leaf, self._statics[node])
            else:
                inputs = {each: self.of(each) for each in node.all_input_nodes}
                if any(each is None for each in inputs.values()):
                    return None
                found = {each: known for each, known in inputs.items() if known is not None}
                value = self._run(node, {each: known.value for each, known in found.items()})
                if value is None:
                    self._static.remove(node)
                    return None
                made = Known(self._graph.node_copy(node, lambda each: found[each].node), value)
                constant = node in self._constant and value.requires_grad
                self._known[node] = self(Tensor.detach, made) if constant else made
        return self._known[node]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Known:
        """Calls a function and notes the call. Tensors among the arguments that are not Known are constants."""
        noted = [self.constant(each) if isinstance(each, Tensor) else each for each in args]
        nodes = [each.node if isinstance(each, Known) else each for each in noted]
        values = [each.value if isinstance(each, Known) else each for each in noted]
        return Known(self._graph.call_function(function, tuple(nodes), kwargs), function(*values, **kwargs))

    def constant(self, value: Tensor) -> Known:
        """Notes a tensor that never changes."""
        name = f"constant_{self._constants}"
        self._constants += 1
        self._root.register_buffer(name, value)
        return Known(self._graph.get_attr(name), value)

    def leaves_of(self, known: Known) -> list[fx.Node]:
        """Returns the static inputs that a tensor is computed from."""
        found = set(ancestors([known.node]))
        return [leaf for leaf in self._leaves if self._known[leaf].node in found]

    def main_leaf(self, known: Known) -> fx.Node | None:
        """Returns the static input that names a tensor in reports: the largest parameter, or else the largest input."""
        leaves = [(self._statics[leaf], leaf) for leaf in self.leaves_of(known)]
        return max(leaves, key=lambda each: (isinstance(each[0], nn.Parameter), each[0].numel()))[1] if leaves else None

    def value(self, leaf: fx.Node) -> Tensor:
        """Returns the value of a static input."""
        return self._statics[leaf]

    def finish(self, outputs: Sequence[Known], zeros: Sequence[Known]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Returns a module that computes (outputs, [whether each of `zeros` has a nonzero]), and the leaves that it takes."""
        nonzero = [self._graph.call_function(_has_nonzeros, (each.node,)) for each in zeros]
        self._graph.output(([each.node for each in outputs], nonzero))
        self._graph.eliminate_dead_code()
        for leaf in self._leaves:
            if not self._known[leaf].node.users:
                self._graph.erase_node(self._known[leaf].node)
        leaves = [leaf for leaf in self._leaves if self._known[leaf].node.users]
        return fx.GraphModule(self._root, self._graph), leaves

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Tensor]) -> Tensor | None:
        """Returns the value of a node; None if it is random, no tensor, or of another type, because the graph has autocast."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values[each])
        function: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        random = torch.get_rng_state()
        value = function(*(args[1:] if node.op == "call_method" else args), **kwargs)
        if not torch.equal(random, torch.get_rng_state()):
            torch.set_rng_state(random)
            return None
        alike = isinstance(value, Tensor) and value.dtype == node.meta["example_value"].dtype
        return value if alike else None


def _is_trained(value: Tensor) -> bool:
    return value.requires_grad and not value.is_inference()


def _has_nonzeros(value: Tensor) -> Tensor:
    return (value.detach() != 0).any()  # NaN counts as nonzero
