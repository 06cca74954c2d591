"""Rules for attention. A head stays or goes as a whole. Values that are zeros give results that are zeros."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.nodes import argument
from gossamer.backend.smaller.analysis import Analysis, Rule, Step
from gossamer.backend.smaller.channels import Channels
from gossamer.backend.smaller.views import not_empty


def scaled_dot_product(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for scaled_dot_product_attention with as many heads of queries as of keys.

    The weighted mean of a constant is that constant, unless there is no key, a mask hides all keys, or dropout zeroes weights.
    """
    operands = [argument(node, n, name) for n, name in enumerate(("query", "key", "value"))]
    found = [analysis.channels(each) for each in operands]
    mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    one = found[2]
    if one is None or any(each is None or not _alike(each, one) for each in found):
        return None
    if one.dims[1] != operands[2].meta["example_value"].dim() - 1:
        return None
    if isinstance(mask, fx.Node) and not _broadcast(mask, operands[2], one.dim):
        return None
    query, key, _ = found
    assert query is not None and key is not None
    analysis.atoms.tie(query.ids, one.ids)
    analysis.atoms.tie(key.ids, one.ids)
    keys = operands[2].meta["example_value"].dim() - 2
    zeroed = mask is not None or dropout or not not_empty(operands[2], [keys])
    const = analysis.is_zero(one.fill, one.const) if zeroed else one.const

    def back(need: Tensor) -> None:
        heads = (need & ~const).any(1, keepdim=True).expand_as(need)
        for operand, given in zip(operands, found, strict=True):
            assert given is not None
            analysis.want(operand, heads & ~given.const if operand is operands[2] else heads)

    zeros = [(one, const)] if zeroed else []
    return Step(replace(one, const=const), operands, back, zeros=zeros)


def _alike(one: Channels, two: Channels) -> bool:
    """Whether both have heads and features in the same dimensions."""
    return len(one.dims) == 2 and one.dims == two.dims and one.ids.shape == two.ids.shape and one.along == two.along == 0


def _broadcast(mask: fx.Node, operand: fx.Node, dim: int) -> bool:
    """Whether a mask is the same for all heads."""
    value = mask.meta.get("example_value")
    if not isinstance(value, Tensor):
        return False
    place = dim - (operand.meta["example_value"].dim() - value.dim())
    return place < 0 or value.shape[place] == 1


def product(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for matmul in each head: queries by keys, or weights by values."""
    if len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    one, two = analysis.channels(a), analysis.channels(b)
    if one is None or two is None or one.dim != two.dim or one.along != 0 or two.along != 0:
        return None
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    dims = a.meta["example_value"].dim()
    if b.meta["example_value"].dim() != dims or one.dim >= dims - 2 or one.ids.shape[0] != two.ids.shape[0]:
        return None
    scores = one.dims[1:] == (dims - 1,) and two.dims[1:] == (dims - 2,) and one.ids.shape == two.ids.shape
    weighed = len(one.dims) == 1 and two.dims[1:] == (dims - 1,)
    heads = [each.ids if each.ids.dim() == 1 else each.ids[:, 0] for each in (one, two)]
    if not scores and not weighed:
        return None
    analysis.atoms.tie(*heads)
    if scores:
        result = Channels((one.dim,), heads[0], 0, torch.zeros(len(heads[0]), dtype=torch.bool), None)
    else:
        result = replace(two, const=analysis.is_zero(two.fill, two.const), fill=None)

    def back(need: Tensor) -> None:
        asked = (need & ~result.const).reshape(len(heads[0]), -1).any(1)
        for operand, given in ((a, one), (b, two)):
            mask = asked if given.ids.dim() == 1 else asked[:, None].expand_as(given.ids)
            analysis.want(operand, mask & ~given.const if operand is b and weighed else mask)

    return Step(result, [a, b], back, zeros=[(two, result.const)] if weighed else [])


def softmax(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for softmax along another dimension than the heads."""
    x, dim = argument(node, 0, "input"), argument(node, 1, "dim")
    given = analysis.channels(x)
    if given is None or dim is None or node.all_input_nodes != [x] or dim % x.meta["example_value"].dim() in given.dims:
        return None
    return Step(replace(given, const=torch.zeros_like(given.const), fill=None), [x])


RULES: dict[Any, Rule] = {
    F.scaled_dot_product_attention: scaled_dot_product,
    **dict.fromkeys([torch.matmul, "matmul"], product),
    **dict.fromkeys([torch.softmax, F.softmax, "softmax"], softmax),
}
