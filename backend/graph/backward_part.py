"""Finds the backward part of a forward pattern in a joint graph, by sequence numbers and not by a second pattern.

    %s = mul(%x, 0.125)         41                  %g = _softmax_backward_data(%u, %p)       42, backward
    %p = softmax(%s)            42                  %h = mul(%g, 0.125)                       41, backward

    forward {%s, %p} from %x to %p   →   upstream %u, nodes {%g, %h}, gradients {%x: [%h]}

AOTAutograd numbers the operations that autograd records. Every node, forward or backward, has the number of its operation in
`meta["seq_nr"]`. All nodes of a decomposed operation share it. Four facts (torch 2.13) limit what a number means:
- A forward node without a gradient has the number of the last operation before it. The first node with a number owns it.
- An addition that sums the gradients of several uses has a stale number, and `meta["is_gradient_acc"]`.
- The backward nodes of a custom autograd function are not marked as backward. So its operations have no backward nodes.
- An in-place write to a view has backward nodes whose numbers no forward node has. They follow the numbers of the write.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import (
    COPIES,
    SPREADS,
    ancestors,
    arguments,
    escapes,
    is_backward,
    is_tangent,
    same,
    same_shape,
)
from gossamer.backend.graph.refused import Refused

aten = torch.ops.aten

_PASSING = SPREADS | {aten.add.Tensor, aten.sub.Tensor, aten.addmm.default, aten.baddbmm.default}
"""Operations that may pass a gradient on unchanged. So they may have no backward node."""
_FACTORS: dict[Any, tuple[int, ...]] = {
    aten.mul.Tensor: (0, 1), aten.mm.default: (0, 1), aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2), aten.baddbmm.default: (1, 2),
}  # fmt: skip
"""The indices of each product's factors among its arguments."""
_SPARSE = {"gossamer.einsum.default", "gossamer.sample.default"}
"""Products of all their arguments. The gradient of each argument is computed only from the others."""


@dataclass(frozen=True)
class BackwardPart:
    """The backward nodes of a forward pattern.

    nodes      the backward nodes that differentiate it
    upstream   the gradient of its output, which they read; None if the graph has none
    gradients  for each input, its gradients: one for each use if autograd adds them up outside the pattern. An input may have
               none. Two inputs may share one, such as the terms of a sum
    """

    nodes: frozenset[fx.Node]
    upstream: fx.Node | None
    gradients: dict[fx.Node, tuple[fx.Node, ...]]


class JointGraph:
    """The sequence numbers of a graph. They stay valid while patterns are replaced, until dead nodes are erased."""

    def __init__(self, graph: fx.Graph) -> None:
        self._backward, forward = (defaultdict[int, list[fx.Node]](list) for _ in range(2))
        self._sums: list[fx.Node] = []
        self._gradients: set[fx.Node] = set()
        for node in graph.nodes:
            if is_tangent(node) or not self._gradients.isdisjoint(node.all_input_nodes):
                self._gradients.add(node)
            if node.meta.get("is_gradient_acc"):
                if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2:  # others are additions of a hook
                    self._sums.append(node)
            elif is_backward(node):
                self._backward[_number(node)].append(node)
            elif node not in self._gradients:
                forward[_number(node)].append(node)
        self._operations = {number: found for number in self._backward if (found := _pieces(forward[number]))}

    def operation(self, node: fx.Node) -> list[fx.Node]:
        """Returns all forward nodes of the operation that a node belongs to."""
        pieces = self._operations.get(_number(node), ())
        return list(pieces) if node in pieces else [node]

    def backward_of(self, node: fx.Node) -> list[fx.Node]:
        """Returns the backward nodes of the operation that a forward node belongs to."""
        return self._backward[_number(node)] if node in self._operations.get(_number(node), ()) else []

    def part(self, forward: Collection[fx.Node], inputs: Sequence[fx.Node], output: fx.Node) -> BackwardPart:
        """Returns the backward part of the nodes `forward`, which compute `output` from `inputs`.

        If a node of `forward` is a piece of a decomposed operation, all pieces count. Raises Refused if autograd computed the
        gradients not only from these nodes, or if any other node reads an intermediate value.
        """
        forward = {piece for node in forward for piece in self.operation(node)}
        nodes, numbers = self._members(forward)
        entering = {same(n) for node in nodes for n in node.all_input_nodes if n not in nodes and self._is_gradient(n)}
        if len(entering) > 1:
            raise Refused("its gradient is computed in part by something else")
        self._check_chain(forward, output, set(numbers.values()))
        gradients: dict[fx.Node, list[fx.Node]] = {each: [] for each in inputs}
        leaving = [node for node in nodes if self._is_gradient(node) and any(user not in nodes for user in node.users)]
        for value in leaving:
            receivers = self._receivers(value, forward, gradients, numbers)
            if not receivers:
                raise Refused("its gradient is used elsewhere")
            for each in receivers:
                gradients[each].append(value)
        if any(escapes(node, {output, *leaving}) for node in forward if node is not output):
            raise Refused("an intermediate result is used elsewhere")
        return BackwardPart(
            frozenset(nodes), next(iter(entering), None), {each: tuple(found) for each, found in gradients.items()}
        )

    def _is_gradient(self, node: fx.Node) -> bool:
        return node in self._gradients or is_backward(node)

    def _members(self, forward: Collection[fx.Node]) -> tuple[set[fx.Node], dict[int, int]]:
        """Returns two values for some operations: a set and a dict.

        The set has their backward nodes, and the additions that sum only gradients of them. If a backward node's number differs
        from that of the forward nodes that it differentiates, the dict maps its number to theirs.
        """
        found = {each for node in forward for each in self.backward_of(node)}
        known, numbers = sorted({_number(node) for node in forward}), dict[int, int]()
        for number in sorted(self._backward.keys() - self._operations.keys(), reverse=True):  # in backward order
            nodes = self._backward[number]
            if known[0] < number < known[-1] and all(n in found or n in nodes for n in self._read_by(nodes)):
                found.update(nodes)
                numbers[number] = max(n for n in known if n < number)
        for total in self._sums:
            if found.issuperset(total.all_input_nodes):
                found.add(total)
        return found, numbers

    def _read_by(self, nodes: Collection[fx.Node]) -> Iterator[fx.Node]:
        return (n for node in nodes for n in node.all_input_nodes if self._is_gradient(n))

    def _check_chain(self, forward: Collection[fx.Node], output: fx.Node, written: Collection[int]) -> None:
        """Raises Refused if an operation has no backward nodes, but operations before it have some.

        written  the numbers of operations whose backward nodes have other numbers, which are not checked
        """
        pending, seen = [output], {output}
        while pending:
            node = pending.pop()
            if not _has_gradient(node) or stops_gradient(node):
                continue
            silent = node.target not in _PASSING and not self.backward_of(node) and _number(node) not in written
            for before in node.all_input_nodes:
                if before in forward and before not in seen:
                    behind = ancestors([before], lambda n: n not in forward) if silent else ()
                    if any(n in forward and self.backward_of(n) for n in behind):
                        raise Refused("autograd did not make its gradient: a custom function did")
                    seen.add(before)
                    pending.append(before)

    def _receivers(
        self, value: fx.Node, forward: Collection[fx.Node], inputs: Collection[fx.Node], numbers: dict[int, int]
    ) -> set[fx.Node]:
        """Returns the inputs that a value is the gradient of."""
        if value in self._sums:
            first, *others = (self._receivers(n, forward, inputs, numbers) for n in value.all_input_nodes)
            return first.intersection(*others)
        number, read = numbers.get(_number(value), _number(value)), set(self._saved(value))
        pieces = [n for n in forward if _number(n) == number and (self.backward_of(n) or _number(value) in numbers)]
        operands = {n for piece in pieces for n in piece.all_input_nodes if n not in pieces and _fits(n, value)}
        if len(operands) > 1 and len(pieces) == 1:
            operands = _factor(pieces[0], read, value) or operands
        if len(operands) > 1 and not all(piece.target in _PASSING for piece in pieces):
            raise Refused("its gradients cannot be told apart")
        return {each for operand in operands for each in self._handed_on(operand, value, forward, inputs)}

    def _handed_on(
        self, node: fx.Node, value: fx.Node, forward: Collection[fx.Node], inputs: Collection[fx.Node]
    ) -> Iterator[fx.Node]:
        """Yields the inputs that have the same gradient as a node, because the operations between them pass it on."""
        if node in inputs:
            yield node
        elif node in forward and node.target in _PASSING:
            factors = [node.args[n] for n in _FACTORS.get(node.target, ())]
            for before in node.all_input_nodes:
                if before not in factors and _fits(before, value):
                    yield from self._handed_on(before, value, forward, inputs)

    def _saved(self, value: fx.Node) -> Iterator[fx.Node]:
        """Yields the forward values that an operation's gradient is computed from."""
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
                        (before, *_) = arguments(before)
                        yield before


def _factor(product: fx.Node, read: set[fx.Node], value: fx.Node) -> set[fx.Node]:
    """Returns the operand of a product that a value is the gradient of. A factor's gradient is computed from the other one."""
    if str(product.target) in _SPARSE:
        return {n for n in product.all_input_nodes if n not in read and _fits(n, value)}
    factors = {product.args[n] for n in _FACTORS.get(product.target, ())}
    if not factors:
        return set()
    of_factor = {n for n in factors if isinstance(n, fx.Node) and _fits(n, value) and not read.isdisjoint(factors - {n} or {n})}
    added = {n for n in product.all_input_nodes if n not in factors and _fits(n, value)}
    return of_factor or added


def stops_gradient(node: fx.Node) -> bool:
    """Whether the user detached a value here."""
    return _origin(node) == "aten.detach.default"


def _number(node: fx.Node) -> int:
    """Returns the number of a node's operation; -1 for nodes that autograd does not record: inputs, and new nodes of earlier
    passes."""
    number: int = node.meta.get("seq_nr", -1)
    return number


def _pieces(alike: list[fx.Node]) -> list[fx.Node]:
    """Returns the pieces of the operation that owns a number, from all forward nodes with it. They come first, in a row.

    Autograd copies a value before an operation overwrites it, under the same number. Values without gradients own no number.
    A view that is made again after a write comes after the pieces.
    """
    alike = [*dropwhile(lambda n: n.target in COPIES or not _has_gradient(n), alike)] or [n for n in alike if _has_gradient(n)]
    if not alike:
        return []
    origin = _origin(first := alike[0])
    if str(first.target) == origin:  # it was not decomposed
        return [first, *(n for n in alike if n.args[:1] == (first,) and n.target is operator.getitem)]
    return list(takewhile(lambda n: _origin(n) == origin, alike))


def _origin(node: fx.Node) -> str:
    return str(node.meta.get("original_aten", node.name))  # a string, because torch copies the object, and copies are not equal


def _fits(node: fx.Node, value: fx.Node) -> bool:
    """Whether the shape of a value allows that it is the gradient of a node."""
    return isinstance(node.meta.get("val"), torch.Tensor) and _has_gradient(node) and same_shape(node, value)


def _has_gradient(node: fx.Node) -> bool:
    """Whether a value of this node's type can have a gradient."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in parts)
