"""Recognises a softmax by targets, in all spellings that weights of messages have.

    p / s[target]            p * (1 / s)[target]            exp(z - log(s)[target])            (sum of p * x) / s

Here p is exp(z), or exp(z - m[target]) for any m, and s is the sum of p by targets. If m is the maximum by targets, s is at
least 1. Then a small number may be added to s, against division by zero, without changing the result.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.spelling import Softmax, rows_of
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import ancestors, arguments, equal, same
from gossamer.backend.graph.patterns import Behind, Call, Found, Hole, Named, Number, Pattern, exp, log, match, one_of
from gossamer.backend.graph.refused import Refused
from gossamer.backend.messages.message_patterns import EdgeIndex, aggregation_at, gather_at, repeated, weighs

aten = torch.ops.aten

_LEAST = -1e30
"""Largest initial value of maxima that counts as below all scores. Masks may be lower, so they are checked."""


class Softmaxes:
    """Recognises softmaxes by the targets of an edge list."""

    def __init__(self, target: EdgeIndex, structure: Structure) -> None:
        self._target, self._structure = target, structure
        z, m, at, sums = Hole("z"), Hole("m"), self._at_targets, self._sums
        shifted = Named("shifted", one_of(z - at(m), z - Hole("level", _is_for_all_edges), z))
        p = Named("p", exp(shifted))
        s = _guarded(sums(p))
        self._weights = one_of(
            p / at(s),
            p / (at(s) + Number("more")),
            p * at(_reciprocal(s)),
            p * _reciprocal(at(s)),
            exp(shifted - at(log(s))),
            exp(z - at(log(_guarded(sums(exp(z - at(m))))) + m)),
        )
        self._quotient = Hole("y") / Behind(rows_of, s)

    def at(self, node: fx.Node) -> Softmax | None:
        """Returns the softmax that weights are, else None. Raises Refused if they only look like one."""
        found = match(self._weights, node)
        return None if found is None else self._checked(found, node)

    def of_quotient(self, result: fx.Node, p: fx.Node) -> tuple[Softmax, fx.Node] | None:
        """Returns the softmax of weights p if a user divides the sum of messages by s, and that quotient; else None."""
        for user in _users_of_rows(result):
            found = match(self._quotient, user)
            if found is None or not weighs(arguments(user)[1], found["y"]):  # otherwise it may divide columns
                continue
            if rows_of(found["y"]) is rows_of(result) and rows_of(found["p"]) is p:
                if not found.get("eps", 0) + found.get("floor", 0) > 0:
                    raise Refused("a target without edges divides zero by zero")
                return self._checked(found, user), user
        return None

    def _checked(self, found: Found, node: fx.Node) -> Softmax:
        z, shift = same(found["z"]), found.get("m", found.get("level"))
        added, floor = found.get("eps", 0) + found.get("more", 0), found.get("floor", 0)
        rounded_away = torch.finfo(node.meta["val"].dtype).eps / 2  # beside a sum of 1 or more
        if added or floor:
            small = 0 <= added <= rounded_away and 0 <= floor <= 1
            if not small or "m" not in found or not self._is_maximum(same(shift), z):
                raise Refused("a number beside the sums of its exponentials may not be negligible")
        return Softmax(z, shift)

    def _at_targets(self, of: Pattern) -> Pattern:
        """Returns the pattern of[target]."""

        def step(node: fx.Node) -> fx.Node | None:
            gather = gather_at(node, self._structure)
            return rows_of(gather.x) if gather is not None and self._target.is_(gather.index) else None

        return Behind(step, of)

    def _sums(self, of: Pattern) -> Pattern:
        """Returns the pattern for the sums of `of` by targets."""

        def step(node: fx.Node) -> fx.Node | None:
            sums = aggregation_at(same(node), self._structure)
            return rows_of(sums.message) if sums is not None and sums.plain and self._target.is_(sums.target) else None

        return Behind(step, of)

    def _is_maximum(self, node: fx.Node, of: fx.Node) -> bool:
        """Whether a node is the maximum by targets, so that the exponentials add up to 1 or more."""
        if node.target not in (aten.scatter_reduce.two, aten.index_reduce.default) or node.args[4] != "amax":
            return False
        base, dim, index, source = arguments(node)[:4]
        index = repeated(index)
        if dim != 0 or rows_of(source) is not rows_of(of) or index is None or not self._target.is_(index):
            return False
        if not node.kwargs.get("include_self", True):
            return True
        least: Any = base.args[1] if base.target is aten.full.default else 0
        if least <= torch.finfo(node.meta["val"].dtype).min:
            return True
        return least <= _LEAST and not any(number < least for each in ancestors([of]) for number in _numbers(each))


def _guarded(s: Pattern) -> Pattern:
    """Returns the pattern for sums, with or without a number against division by zero."""
    clamp = Call((aten.clamp.default, aten.clamp_min.default), (s, Number("floor")))
    return one_of(s + Number("eps"), clamp, s)


def _reciprocal(x: Pattern) -> Pattern:
    inverse = Call((aten.reciprocal.default,), (x,))
    return one_of(inverse, inverse * 1.0)


def _is_for_all_edges(value: Any) -> bool:
    """Whether a tensor has the same values for all edges, by broadcasting."""
    shape = value.meta["val"].shape if isinstance(value, fx.Node) else None
    return shape is not None and (len(shape) == 0 or equal(shape[0], 1))


def _users_of_rows(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of a node's rows, directly or through views."""
    for user in node.users:
        if rows_of(user) is rows_of(node):
            yield from _users_of_rows(user)
        else:
            yield user


def _numbers(node: fx.Node) -> Iterator[float]:
    """Returns the numbers among a node's arguments."""
    return (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float))
