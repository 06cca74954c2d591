"""Matches nodes of a graph against patterns: expressions with holes, written like the line of model code that they match.

    score, number = Hole("score"), Number("number")
    match(tanh(score / number), %t)   →   {"score": %s, "number": 50.0}   for   %d = div(%s, 50), %t = tanh(%d)

A table is a list of rules. A rule has a pattern and a function that is called with its match. `apply` takes the first rule
that matches:

    STEPS = [Rule(score * number, lambda to, score, number: to.scaled(number)), Rule(tanh(score), ...)]

Matching looks through copies of operands (`nodes.same`). The operands of sums and products match in any order. If a hole occurs
twice, both must be the same value. A tensor that is full of one number matches as that number.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import sqrt
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import COPIES, arguments, same

aten, prims = torch.ops.aten, torch.ops.prims

CONVERTS = {prims.convert_element_type.default, aten._to_copy.default}
"""Operations that return the same values in another type."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Found = dict[str, Any]
"""The values that match the holes, by the holes' names."""


class Pattern:
    """An expression. Operators and the functions below build it from other expressions and from numbers."""

    def __add__(self, other: Any) -> "Pattern":
        return Call((aten.add.Tensor, aten.add.Scalar), (self, other), in_any_order=True)

    def __sub__(self, other: Any) -> "Pattern":
        return Call((aten.sub.Tensor, aten.sub.Scalar), (self, other))

    def __rsub__(self, other: Any) -> "Pattern":
        return Either(Call((aten.sub.Tensor,), (other, self)), Call((aten.rsub.Scalar,), (self, other)))

    def __mul__(self, other: Any) -> "Pattern":
        return Call((aten.mul.Tensor, aten.mul.Scalar), (self, other), in_any_order=True)

    def __truediv__(self, other: Any) -> "Pattern":
        return Call((aten.div.Tensor, aten.div.Scalar), (self, other))

    def __neg__(self) -> "Pattern":
        return Call((aten.neg.default,), (self,))

    def __invert__(self) -> "Pattern":
        return Call((aten.logical_not.default, aten.bitwise_not.default), (self,))


@dataclass(frozen=True, eq=False)
class Hole(Pattern):
    """Matches any value that `fits`."""

    name: str
    fits: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True, eq=False)
class Number(Pattern):
    """Matches a number, or a tensor that is full of one number."""

    name: str


@dataclass(frozen=True, eq=False)
class Named(Pattern):
    """Matches an expression, and gives the value a name by which it may occur again."""

    name: str
    inner: Pattern


@dataclass(frozen=True, eq=False)
class Either(Pattern):
    """Matches either of two expressions."""

    first: Pattern
    second: Pattern


@dataclass(frozen=True, eq=False)
class Behind(Pattern):
    """Matches a value if the result of `step(value)` matches `inner`. If the step returns None, it does not match."""

    step: Callable[[Any], Any]
    inner: Any


@dataclass(frozen=True, eq=False)
class Last(Pattern):
    """Matches the number of the last dimension of a call's operand, by itself or in a list."""


@dataclass(frozen=True, eq=False)
class Call(Pattern):
    """Matches a call of one of some operations.

    operands      patterns of its operands; a tuple matches a list
    in_any_order  whether the operands may be in another order
    and_more      whether other arguments may follow
    """

    targets: Collection[Any]
    operands: tuple[Any, ...]
    in_any_order: bool = False
    and_more: bool = False


LAST = Last()


def one_of(first: Pattern, *others: Pattern) -> Pattern:
    """Matches the first of some expressions that matches."""
    return Either(first, one_of(*others)) if others else first


def _function(*targets: Any, and_more: bool = False) -> Callable[..., Pattern]:
    return lambda *operands: Call(targets, operands, and_more=and_more)


tanh = _function(aten.tanh.default)
exp = _function(aten.exp.default)
log = _function(aten.log.default)
sigmoid = _function(aten.sigmoid.default)
rsqrt = _function(aten.rsqrt.default)
where = _function(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
masked_fill = _function(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
equals = _function(aten.eq.Scalar)
greater = _function(aten.gt.Scalar)
any_of = _function(aten.any.dim, and_more=True)  # x, dim
softmax = _function(aten._softmax.default, and_more=True)  # x, dim
safe_softmax = _function(aten._safe_softmax.default, and_more=True)
log_softmax = _function(aten._log_softmax.default, and_more=True)
native_dropout = _function(aten.native_dropout.default, and_more=True)  # x, share
converted = _function(*CONVERTS, and_more=True)
part = _function(operator.getitem)  # results, number of one of them


def square(x: Pattern) -> Pattern:
    """x ** 2, or x * x."""
    return Either(Call((aten.pow.Tensor_Scalar,), (x, 2)), x * x)


def side_by_side(*parts: Pattern) -> Pattern:
    """torch.cat(parts, -1)."""
    return Call((aten.cat.default,), (parts, LAST))


def in_any_type(x: Pattern) -> Pattern:
    """x, or x rounded to another type of floats."""
    return Behind(unrounded, x)


def is_rounding(node: fx.Node) -> bool:
    """Whether a node converts floats to floats that differ only in their precision, not to integers or to 8 bits.

    Torch's own compiler computes such values in the wider type, too.
    """
    return node.target in CONVERTS and all(each.meta["val"].dtype in _FLOATS for each in (node, arguments(node)[0]))


def unrounded(node: Any) -> Any:
    """Returns a value before copies and roundings to another type of floats."""
    while isinstance(node, fx.Node) and is_rounding(node := same(node)):
        node = arguments(node)[0]
    return node


def total(x: Any, dim: Any) -> Pattern:
    """x.sum(dim, keepdim=True)."""
    return Call((aten.sum.dim_IntList,), (x, dim, True))


def average(x: Any, dim: Any) -> Pattern:
    """x.mean(dim, keepdim=True)."""
    return Call((aten.mean.dim,), (x, dim, True))


def largest(x: Any, dim: Any) -> Pattern:
    """x.amax(dim, keepdim=True), or x.max(dim, keepdim=True).values."""
    return Either(Call((aten.amax.default,), (x, dim, True)), part(Call((aten.max.dim,), (x, dim, True)), 0))


def log_sum_exp(x: Any, dim: Any) -> Pattern:
    """x.logsumexp(dim, keepdim=True), or Inductor's decomposition of it."""
    top = Hole("top")
    return Either(Call((aten.logsumexp.default,), (x, dim, True)), log(total(exp(x - top), dim)) + top)


@dataclass(frozen=True, eq=False)
class Rule:
    """A pattern and its meaning.

    means  a function of the arguments `context` of `apply`, and of the values that match the holes, by name
    """

    pattern: Pattern
    means: Callable[..., Any]


def apply(rules: Sequence[Rule], value: Any, *context: Any, **known: Any) -> Any:
    """Calls `means` of the first rule that matches, or returns None. `known` has values for some holes, by their names."""
    for rule in rules:
        found = match(rule.pattern, value, **known)
        if found is not None:
            return rule.means(*context, **found)
    return None


def match(pattern: Pattern, value: Any, **known: Any) -> Found | None:
    """Returns the values that match the holes, or None if the value does not match."""
    return next(matches(pattern, value, **known), None)


def matches(pattern: Pattern, value: Any, **known: Any) -> Iterator[Found]:
    """Yields all matches. Operands in another order can give another match."""
    return _matches(pattern, value, known, None)


def _matches(pattern: Any, value: Any, found: Found, call: fx.Node | None) -> Iterator[Found]:
    if isinstance(pattern, Call):
        if isinstance(value, fx.Node) and (node := same(value)).target in pattern.targets:
            yield from _operands(pattern, node, found)
    elif isinstance(pattern, Either):
        yield from _matches(pattern.first, value, found, call)
        yield from _matches(pattern.second, value, found, call)
    elif isinstance(pattern, Behind):
        if isinstance(value, fx.Node) and (behind := pattern.step(value)) is not None:
            yield from _matches(pattern.inner, behind, found, None)
    elif isinstance(pattern, Named) and pattern.name not in found:
        for inner in _matches(pattern.inner, value, found, call):
            yield {**inner, pattern.name: value}
    elif isinstance(pattern, Hole | Named):
        if pattern.name in found:
            if _alike(found[pattern.name], value):
                yield found
        elif isinstance(pattern, Hole) and pattern.fits(value):
            yield {**found, pattern.name: value}
    elif isinstance(pattern, Number):
        number = number_of(value)
        if number is not None and found.get(pattern.name, number) == number:
            yield {**found, pattern.name: number}
    elif isinstance(pattern, Last):
        if call is not None and _is_last(value, call):
            yield found
    elif isinstance(pattern, tuple):
        if isinstance(value, list | tuple):
            yield from _in_order(pattern, value, found, call)
    elif number_of(value) == pattern:
        yield found


def _operands(pattern: Call, node: fx.Node, found: Found) -> Iterator[Found]:
    count = len(pattern.operands)
    more = len(node.args) > count or not {"alpha": 1, **node.kwargs}.items() <= {("alpha", 1), ("dtype", None)}
    if len(node.args) < count or (more and not pattern.and_more):
        return
    given = node.args[:count]
    for order in permutations(given) if pattern.in_any_order else (given,):
        yield from _in_order(pattern.operands, order, found, node)


def _in_order(patterns: Sequence[Any], values: Sequence[Any], found: Found, call: fx.Node | None) -> Iterator[Found]:
    pending = [found] if len(patterns) == len(values) else []
    for pattern, value in zip(patterns, values, strict=False):
        pending = [more for before in pending for more in _matches(pattern, value, before, call)]
    yield from pending


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        return same(one) is same(other)
    return type(one) is type(other) and bool(one == other)


def _is_last(dim: Any, call: fx.Node) -> bool:
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return len(dims) == 1 and dims[0] in (-1, call.all_input_nodes[0].meta["val"].dim() - 1)


_ZEROS, _ONES = {aten.zeros.default}, {aten.ones.default, aten.ones_like.default}
_FILLED: dict[Any, int] = {aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1}
"""Operations that fill a tensor with one of their arguments, and the index of that argument."""


def number_of(value: Any) -> float | None:
    """Returns a number, or the number that a tensor is full of. Returns None for other values."""
    if not isinstance(value, fx.Node):
        return float(value) if isinstance(value, int | float) else None
    found, dtype = _number_at(value), getattr(value.meta.get("val"), "dtype", None)
    if found is None or dtype is None or dtype in _FLOATS:
        return found
    return float(torch.tensor(found, dtype=torch.float64).to(dtype).to(torch.float64).item())


def _number_at(value: fx.Node) -> float | None:
    """Returns the number that a tensor is full of, before it is converted to integers or to 8 bits."""
    if value.target is aten.sqrt.default:
        square = number_of(value.args[0])
        return None if square is None or square < 0 else sqrt(square)
    if value.target in _FILLED:
        return number_of(value.args[_FILLED[value.target]])
    if value.target in _ZEROS | _ONES:
        return float(value.target in _ONES)
    if value.target in CONVERTS | COPIES:
        return number_of(value.args[0])
    held = getattr(value.graph.owning_module, str(value.target), None) if value.op == "get_attr" else None
    return float(held.item()) if isinstance(held, torch.Tensor) and held.numel() == 1 else None
