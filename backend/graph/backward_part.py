"""The backward part of a forward pattern in a joint graph. It is found by sequence numbers and not by a pattern of its own.

    %s = mul(%x, 0.125)         41                  %g = _softmax_backward_data(%u, %p)       42, backward
    %p = softmax(%s)            42                  %h = mul(%g, 0.125)                       41, backward

    forward {%s, %p} from %x to %p   →   upstream %u, nodes {%g, %h}, gradients {%x: [%h]}

AOTAutograd numbers the operations that autograd records. Every node has the number of its operation in `meta["seq_nr"]`,
forward and backward, and all nodes of a decomposed operation share it. Three facts (torch 2.13) decide what a number says:
- A forward node that has no gradient carries the number of the last operation before it. The first node of a number owns it,
  copies aside.
- An addition that sums the gradients of several uses carries a stale number, and `meta["is_gradient_acc"]`.
- The backward nodes of a custom autograd function are not marked as backward. So its operations have no backward nodes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.graph.nodes import COPIES, SPREADS, ancestors, escapes, is_backward, is_tangent, same, same_shape
from gossamer.backend.graph.refused import Refused

aten = torch.ops.aten

_PASSING = SPREADS | {aten.add.Tensor, aten.sub.Tensor}
"""Operations that may hand on a gradient as it is, so that they need no backward node."""


@dataclass(frozen=True)
class BackwardPart:
    """What autograd made of a forward pattern.

    nodes      the backward nodes that differentiate it
    upstream   the gradient of its output, which they read; None if none is asked for
    gradients  by input: the values that leave for it, one for each use where autograd sums them afterwards. An input without a
               gradient has none; two inputs may share one, as the terms of a sum do
    """

    nodes: frozenset[fx.Node]
    upstream: fx.Node | None
    gradients: dict[fx.Node, tuple[fx.Node, ...]]


class JointGraph:
    """The numbers of a graph. It stays valid while patterns are replaced, until dead nodes are erased."""

    def __init__(self, graph: fx.Graph) -> None:
        self._backward = defaultdict[int, list[fx.Node]](list)
        self._forward = defaultdict[int, list[fx.Node]](list)
        self._sums: list[fx.Node] = []
        self._gradients: set[fx.Node] = set()
        for node in graph.nodes:
            if is_tangent(node) or not self._gradients.isdisjoint(node.all_input_nodes):
                self._gradients.add(node)
            number = _number(node)
            if node.meta.get("is_gradient_acc"):
                if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2:  # and is none of a hook
                    self._sums.append(node)
            elif is_backward(node):
                self._backward[number].append(node)
            elif node not in self._gradients:
                self._forward[number].append(node)

    def operation(self, node: fx.Node) -> list[fx.Node]:
        """All forward nodes of the operation that a node is, or is a piece of."""
        return [n for n in self._forward[_number(node)] if _alike(n, node)] or [node]

    def backward_of(self, node: fx.Node) -> list[fx.Node]:
        """The backward nodes of the operation that a forward node is, or is a piece of."""
        number = _number(node)
        owner = next((n for n in self._forward[number] if n.target not in COPIES), node)  # some first save what they overwrite
        owns = _alike(owner, node)
        return self._backward[number] if owns else []

    def part(self, forward: Collection[fx.Node], inputs: Sequence[fx.Node], output: fx.Node) -> BackwardPart:
        """What belongs to the nodes from some inputs to one output.

        Nodes of `forward` may be pieces of operations; the other pieces are taken along. Raises Refused if the gradients are
        not those that autograd makes of these nodes alone, or if anything else reads a value in between.
        """
        forward = {piece for node in forward for piece in self.operation(node)}
        nodes = self._members(forward)
        entering = {same(n) for node in nodes for n in node.all_input_nodes if n not in nodes and self._is_gradient(n)}
        if len(entering) > 1:
            raise Refused("its gradient is computed in part by something else")
        self._check_chain(forward, output)
        gradients: dict[fx.Node, list[fx.Node]] = {each: [] for each in inputs}
        leaving = [node for node in nodes if self._is_gradient(node) and any(user not in nodes for user in node.users)]
        for value in leaving:
            receivers = self._receivers(value, forward, gradients)
            if not receivers:
                raise Refused("its gradient is used elsewhere")
            for each in receivers:
                gradients[each].append(value)
        if any(escapes(node, {output, *leaving}) for node in forward if node is not output):
            raise Refused("what it computes on the way is used elsewhere")
        return BackwardPart(
            frozenset(nodes), next(iter(entering), None), {each: tuple(found) for each, found in gradients.items()}
        )

    def _is_gradient(self, node: fx.Node) -> bool:
        return node in self._gradients or is_backward(node)

    def _members(self, forward: Collection[fx.Node]) -> set[fx.Node]:
        """The backward nodes of some operations, and the sums of their gradients alone."""
        found = {each for node in forward for each in self.backward_of(node)}
        for total in self._sums:
            if found.issuperset(total.all_input_nodes):
                found.add(total)
        return found

    def _check_chain(self, forward: Collection[fx.Node], output: fx.Node) -> None:
        """Raises Refused if an operation has no backward nodes, but hands a gradient on to others that have."""
        pending, seen = [output], {output}
        while pending:
            node = pending.pop()
            silent = node.target not in _PASSING and not self.backward_of(node)
            for before in node.all_input_nodes:
                if before in forward and before not in seen:
                    if silent and any(self.backward_of(n) for n in _behind(before, forward)):
                        raise Refused("autograd did not make its gradient: it is of a custom function")
                    seen.add(before)
                    pending.append(before)

    def _receivers(self, value: fx.Node, forward: Collection[fx.Node], inputs: Collection[fx.Node]) -> set[fx.Node]:
        """The inputs of which a value is the gradient."""
        if value in self._sums:
            first, *others = (self._receivers(n, forward, inputs) for n in value.all_input_nodes)
            return first.intersection(*others)
        number, read = _number(value), set(self._saved(value))
        pieces = [n for n in forward if _number(n) == number and self.backward_of(n)]
        operands = {n for piece in pieces for n in piece.all_input_nodes if n not in pieces and _fits(n, value)}
        if len(operands) > 1:  # of a product: the gradient of one factor is computed from the other
            operands = {n for n in operands if n not in read} or operands
        if len(operands) > 1 and not all(piece.target in _PASSING for piece in pieces):
            raise Refused("its gradients cannot be told apart")
        return {each for operand in operands for each in self._handed_on(operand, value, forward, inputs)}

    def _handed_on(
        self, node: fx.Node, value: fx.Node, forward: Collection[fx.Node], inputs: Collection[fx.Node]
    ) -> Iterator[fx.Node]:
        """The inputs that have the gradient of a node, because the operations in between hand it on."""
        if node in inputs:
            yield node
        elif node in forward and node.target in _PASSING:
            for before in node.all_input_nodes:
                if _fits(before, value):
                    yield from self._handed_on(before, value, forward, inputs)

    def _saved(self, value: fx.Node) -> Iterator[fx.Node]:
        """The forward values that an operation's gradient is computed from."""
        number, pending, seen = _number(value), [value], {value}
        while pending:
            for before in pending.pop().all_input_nodes:
                if before in seen:
                    continue
                seen.add(before)
                if is_backward(before) and _number(before) == number:
                    pending.append(before)
                elif not self._is_gradient(before):
                    yield before
                    while before.target in COPIES:
                        before = before.args[0]  # type: ignore[assignment]
                        yield before


def _number(node: fx.Node) -> int:
    """That of its operation; -1 for what autograd does not record, as inputs and what earlier passes made without one."""
    number: int = node.meta.get("seq_nr", -1)
    return number


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes of one number are pieces of one operation."""
    origins = [str(n.meta.get("original_aten", n.name)) for n in (node, other)]  # of which torch makes copies
    return node is other or origins[0] == origins[1]


def between(inputs: Collection[fx.Node], output: fx.Node) -> list[fx.Node]:
    """The nodes that are computed from some inputs on the way to an output, which is one of them."""
    found: dict[fx.Node, None] = {}
    for node in ancestors([output], inputs.__contains__):
        if node not in inputs and any(n in inputs or n in found for n in node.all_input_nodes):
            found[node] = None
    return list(found)


def _behind(node: fx.Node, forward: Collection[fx.Node]) -> Iterator[fx.Node]:
    """A node of a pattern and all that it is computed from there."""
    pending, seen = [node], {node}
    while pending:
        yield (node := pending.pop())
        for before in node.all_input_nodes:
            if before in forward and before not in seen:
                seen.add(before)
                pending.append(before)


def _fits(node: fx.Node, value: fx.Node) -> bool:
    """Whether a value may be the gradient of a node by its shape."""
    return isinstance(node.meta.get("val"), torch.Tensor) and same_shape(node, value)
