"""Cuts a part out of a Dynamo graph that runs alone: compiled by Gossamer, and as torch runs it.

    def graph(x, w0, w1):                    nodes 1 to 2          def part(h, w1):
        h = linear(x, w0)                         →                    a = relu(h)
        a = relu(h)                                                    return linear(a, w1)
        y = linear(a, w1)
        return softmax(y)

Inputs of the whole graph, including static weights, stay inputs of the same kind. Other values become inputs; torch computes
them.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from gossamer.backend.checking.differences import apart, gradients_apart
from gossamer.backend.graph.kept_graph import copied, module_of
from gossamer.backend.report.options import Options
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

Values = Mapping[fx.Node, Any]
Compile = Callable[[fx.GraphModule, Sequence[Any], Options], Callable[..., Any]]
"""Compiles a Dynamo graph for inputs and options; with gradients if they are enabled at the call."""


@dataclass(frozen=True)
class Part:
    """A graph that computes one value, and its inputs."""

    module: fx.GraphModule
    inputs: Sequence[Any]

    @classmethod
    def of(cls, whole: fx.GraphModule, values: Values, nodes: Sequence[fx.Node]) -> "Part":
        """Returns the part that computes the last of these nodes. Values of other nodes, from `values`, become its inputs."""
        graph, made, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Any]()
        needed = _needed(nodes)

        def given(node: fx.Node) -> fx.Node:
            if node not in made:
                with graph.inserting_before(next((n for n in graph.nodes if n.op != "placeholder"), graph._root)):
                    made[node] = graph.placeholder(node.name)
                source = getattr(node.meta.get("grapharg"), "source", None)
                made[node].meta["grapharg"] = SimpleNamespace(source=source, example=values[node] if source else None)
                inputs.append(values[node])
            return made[node]

        for node in needed:
            made[node] = graph.node_copy(node, given)
        graph.output((made[needed[-1]],))
        return cls(module_of(graph, whole), inputs)

    def is_right(self, compile_: Compile, options: Options, gradients: bool) -> bool:
        """Whether the compiled part gives torch's result, or torch's gradients. A part that does not compile counts as
        right."""
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(()):
                warnings.simplefilter("ignore")
                return (self._gradients_are_right if gradients else self._result_is_right)(compile_, options)
        except Exception:  # torch cannot trace some parts, such as one that ends between a view and a write
            return True

    def _result_is_right(self, compile_: Compile, options: Options) -> bool:
        with torch.no_grad():
            compiled = compile_(copied(self.module), self.inputs, options)
            with torch.random.fork_rng(()):
                expected = self.module(*copies(self.inputs))
            return not apart("?", compiled(*self.inputs), expected)

    def _gradients_are_right(self, compile_: Compile, options: Options) -> bool:
        given, dense = copies(self.inputs), copies(self.inputs)
        leaves, expected_leaves = gradient_edges(given), gradient_edges(dense)
        with torch.enable_grad():
            compiled = compile_(copied(self.module), given, options)
            with torch.random.fork_rng(()):
                (expected,) = self.module(*dense)
            (found,) = compiled(*given)
        if not leaves or not found.requires_grad:
            return True
        tangent = torch.randn_like(expected)
        ours = torch.autograd.grad(found, list(leaves.values()), tangent, allow_unused=True)
        theirs = torch.autograd.grad(expected, list(expected_leaves.values()), tangent, allow_unused=True)
        return not gradients_apart(["?"] * len(ours), ours, theirs)


def calls(graph: fx.Graph) -> list[fx.Node]:
    """Returns all nodes of a graph that compute something, in their order."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def computed(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Returns the value of each node as torch computes it. They are copies, so later writes do not change them."""
    found = dict[fx.Node, Any]()

    class Kept(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            found[n] = value if n.op == "placeholder" else _apart(value)
            return value

    with torch.no_grad(), torch.random.fork_rng(()):
        Kept(module).run(*inputs)
    return found


def copies(values: Sequence[Any]) -> list[Any]:
    """Returns copies of tensors, which share memory where the tensors do; other values as they are."""
    tensors = [each.detach() if isinstance(each, Tensor) else each for each in values]
    found: list[Any] = deepcopy(tensors)
    for n, value in enumerate(values):
        if isinstance(value, nn.Parameter):
            found[n] = nn.Parameter(found[n], value.requires_grad)
        elif isinstance(value, Tensor) and value.requires_grad:
            found[n].requires_grad_()
            if not value.is_leaf and not is_traceable_wrapper_subclass(value):
                found[n] = _result_at(found[n])
    return found


def gradient_edges(values: Sequence[Any]) -> dict[int, Any]:
    """Returns where the gradients of values arrive, by their indices. Later writes to the values do not change these places."""
    return {n: _edge(each) for n, each in enumerate(values) if isinstance(each, Tensor) and each.requires_grad}


def _edge(tensor: Tensor) -> Any:
    plain = tensor.is_leaf or is_traceable_wrapper_subclass(tensor)
    return tensor if plain else torch.autograd.graph.get_gradient_edge(tensor)


def _result_at(leaf: Tensor) -> Tensor:
    """Returns a tensor in the memory of a leaf that is no leaf itself, so that operations may write to it."""
    with torch.enable_grad():
        result = leaf.clone()
    result.data = leaf.detach()
    return result


def _apart(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_(copy.is_floating_point())


def _needed(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the last node, the nodes that it depends on, and nodes without users, which may write in place."""
    wanted, found = {nodes[-1]}, list[fx.Node]()
    for node in reversed(nodes):
        if node in wanted or not node.users:
            found.append(node)
            wanted.update(node.all_input_nodes)
    return found[::-1]
