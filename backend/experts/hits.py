"""Recognises the tokens of an expert in a loop over experts, and their scores.

token, slot = torch.where(chosen == e)          token = torch.where((chosen == e).any(-1))[0]
scores[token, slot, None]                       full[token, e], full = zeros.scatter(1, chosen, scores)

(scores * (chosen == e)).sum(-1, keepdim=True)  full[:, e : e + 1]        scores of all tokens, 0 if they chose others
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.layers import is_zeros
from gossamer.backend.experts.routes import INTEGERS, Routing, counts_up, in_order, same_dims
from gossamer.backend.graph.layout import Layout, follow, path, spans
from gossamer.backend.graph.nodes import arguments, equal, equal_sizes, same, same_shape
from gossamer.backend.graph.patterns import CONVERTS, LAST, Call, Hole, Pattern, converted, match, matches, one_of, unrounded

aten = torch.ops.aten


@dataclass(frozen=True)
class Scored:
    """The scores of the tokens of an expert.

    experts  the experts that tokens chose, [tokens, top], or [tokens] with one expert each
    scores   the scores of all pairs, in the same shape
    expert   the number of the expert
    """

    experts: fx.Node
    scores: fx.Node
    expert: int


def scored(weight: Any, token: fx.Node | None) -> Scored | None:
    """Returns the scores that a factor has, row by row: of the expert's tokens `token`, or of all tokens if that is None.

    Returns None for other factors, and for types that the operation does not take.
    """
    found = _scored(unrounded(weight), token) if is_tensor(weight) else None
    if found is None or found.experts.meta["val"].dtype not in INTEGERS:
        return None
    return found if all(each.meta["val"].is_floating_point() for each in (weight, found.scores)) else None


def _scored(weight: fx.Node, token: fx.Node | None) -> Scored | None:
    if token is None:
        return _of_all(weight) or _column(weight)
    whole = path(weight)
    root = whole[0]
    indices: Any = arguments(root)[1] if root.target is aten.index.Tensor else ()
    if not indices or indices[0] is not token or not in_order(whole):
        return None
    inner: Any = arguments(root)[0]
    if len(indices) == 2:
        return _of_slots(inner, token, indices[1])
    hit = _hit(token)
    if len(indices) != 1 or hit is None:
        return None
    chosen, expert = hit
    if chosen.meta["val"].dim() == 1:
        scores = _in_shape_of(inner, chosen)
        return None if scores is None else Scored(chosen, scores, expert)
    if not equal_sizes(inner.meta["val"].shape[:1], chosen.meta["val"].shape[:1]):
        return None
    found = _of_all(inner) or _column(inner)
    return found if found is not None and (found.experts, found.expert) == hit else None


def _of_slots(inner: Any, token: fx.Node, slot: Any) -> Scored | None:
    """Recognises scores[token, slot], the scores of pairs where a mask is true."""
    own, other = _coordinate(token), _coordinate(slot)
    if own is None or other is None or own[0] is not other[0] or own[1] == other[1]:
        return None
    hit = _chosen(own[0]) if own[1] == 0 else None
    hit = hit or _one_hot(own[0], own[1])
    scores = None if hit is None or hit[0].meta["val"].dim() != 2 else _in_shape_of(inner, hit[0])
    return None if hit is None or scores is None else Scored(hit[0], scores, hit[1])


def _in_shape_of(scores: Any, experts: fx.Node) -> fx.Node | None:
    """Returns the value before views that has a score for each pair, in the shape of the experts; None if its order differs."""
    if not is_tensor(scores):
        return None
    shape, steps = experts.meta["val"].shape, path(scores)
    for number, before in enumerate(steps):
        if equal_sizes(before.meta["val"].shape, shape):
            pairs = Layout.contiguous(shape)
            layout = follow(pairs, steps[number + 1 :])
            fits = layout is not None and not layout.offset and same_dims(layout.dims[: len(shape)], pairs.dims)
            return before if fits else None
    return None


def _of_all(weight: fx.Node) -> Scored | None:
    """Recognises (scores * (chosen == e)).sum(-1), with or without the summed dimension."""
    whole = path(weight)
    if not in_order(whole):
        return None
    for found in matches(_OWN_SCORES, whole[0]):
        hit = _chosen(found["mask"])
        if hit is not None and hit[0].meta["val"].dim() == 2 and same_shape(found["scores"], hit[0]):
            scores = _in_shape_of(found["scores"], hit[0])
            return None if scores is None else Scored(hit[0], scores, hit[1])
    return None


def _column(weight: fx.Node) -> Scored | None:
    """Recognises a column of a matrix [tokens, experts] that has the scores of the chosen experts, and zeros for others."""
    whole = path(weight)
    full, layout = whole[0], follow(Layout.contiguous(whole[0].meta["val"].shape), whole[1:])
    if full.target is not aten.scatter.src or layout is None or not isinstance(layout.offset, int):
        return None
    zeros, dim, experts, scores = arguments(full)
    tokens, count = full.meta["val"].shape
    column = spans(tuple(axis for dim in layout.dims for axis in dim), tokens, count)
    known = isinstance(count, int) and Routing(experts).all_exist(count)  # so that no expert is chosen twice
    if dim not in (1, -1) or not column or not known or not is_zeros(same(zeros)):
        return None
    fits = same_shape(scores, experts) and equal(experts.meta["val"].shape[0], tokens)
    return Scored(experts, scores, layout.offset) if fits else None


def _coordinate(index: Any) -> tuple[fx.Node, int] | None:
    """Returns (mask, dim) if an index has the coordinates along `dim` of the places where the mask is true, else None."""
    if not isinstance(index, fx.Node):
        return None
    if index.target is operator.getitem and arguments(index)[0].target is aten.unbind.int:
        places, number = arguments(index)[0], arguments(index)[1]
        if arguments(places)[1:] != (1,):
            return None
    elif index.target is aten.select.int and arguments(index)[1] in (1, -1):
        places, number = index, arguments(index)[2]
    elif index.target in (aten.squeeze.dim, aten.view.default):
        places, number = index, 0
    else:
        return None
    places = arguments(places)[0]
    if places.target is not aten.nonzero.default or number >= places.meta["val"].shape[1]:
        return None
    single = index.target in (aten.squeeze.dim, aten.view.default)
    return None if single and places.meta["val"].shape[1] != 1 else (arguments(places)[0], number)


def _hit(token: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns (experts, number) if these are the tokens that chose the expert with this number, by a mask with one value a
    token.
    """
    place = _coordinate(token)
    if place is None or place[1] != 0 or place[0].meta["val"].dim() != 1:
        return None
    mask = path(place[0])[0]
    found = match(_ANY, mask)
    hit = _chosen(mask) if found is None else _chosen(found["mask"])
    return hit if hit is not None and hit[0].meta["val"].dim() == (1 if found is None else 2) else None


def _chosen(mask: Any) -> tuple[fx.Node, int] | None:
    """Returns the experts, and the number that a mask compares them with, else None."""
    found = match(_EQUAL, _plain(mask))
    if found is None or not isinstance(found["number"], int) or found["experts"].meta["val"].dim() > 2:
        return None
    return found["experts"], found["number"]


def _one_hot(mask: Any, tokens: int) -> tuple[fx.Node, int] | None:
    """Returns the same for part `number` of one_hot(experts), permuted so that tokens lie along this dimension of the part."""
    mask = same(mask)
    if mask.target is not aten.select.int or arguments(mask)[1] != 0:
        return None
    turned = same(arguments(mask)[0])
    if turned.target is not aten.permute.default or list(arguments(turned)[1]) != [2, *((0, 1), (1, 0))[tokens]]:
        return None
    found = match(_ONE_HOT, arguments(turned)[0])
    if found is None or same(found["column"]).target is not aten.unsqueeze.default or not counts_up(found["count"]):
        return None
    experts: Any = same(found["column"]).args[0]
    return (experts, arguments(mask)[2]) if experts.meta["val"].dim() == 2 else None


def is_tensor(value: Any) -> bool:
    """Whether a factor is a tensor, not a number or a size."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _plain(mask: Any) -> Any:
    """Returns a mask before copies and conversions of its type, none of which changes what is zero."""
    while isinstance(mask, fx.Node) and (mask := same(mask)).target in CONVERTS:
        mask = arguments(mask)[0]
    return mask


_EQUAL: Pattern = Call((aten.eq.Scalar,), (Hole("experts"), Hole("number")))
_ANY: Pattern = Call((aten.any.dim,), (Hole("mask"), LAST), and_more=True)
_ONE_HOT: Pattern = one_of(
    converted(Call((aten.eq.Tensor,), (Hole("column"), Hole("count")))),
    Call((aten.eq.Tensor,), (Hole("column"), Hole("count"))),
)
_OWN_SCORES: Pattern = Call((aten.sum.dim_IntList,), (Hole("scores") * Hole("mask"), LAST), and_more=True)
