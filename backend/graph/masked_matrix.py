"""Weights that are a parameter under a mask, and what was packed of them.

    evaluate(original, mask) = mul(original, mask)

As long as the mask stays, new values are gathered from the parameter at the places that are stored, without the matrix in
between. What the mask hides is not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx

from gossamer.dialects.format import Format
from gossamer.runtime.nonzeros import count_nonzeros
from gossamer.runtime.packing import Packed

aten = torch.ops.aten


def is_product(evaluate: Any) -> bool:
    """Whether an expression is the product of its two leaves, in their order of elements."""
    if not isinstance(evaluate, fx.GraphModule):
        return False
    leaves = [each for each in evaluate.graph.nodes if each.op == "placeholder"]
    node, turns = turned(evaluate.graph.output_node().args[0])
    factors = [before_copies(each) for each in node.args] if node.target is aten.mul.Tensor else []
    return turns % 2 == 0 and len(leaves) == 2 and factors in (leaves, leaves[::-1])


def turned(node: Any) -> tuple[fx.Node, int]:
    """What is behind copies and transpositions, and how many of the latter there are."""
    turns, node = 0, before_copies(node)
    while node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0]):
        turns, node = turns + 1, before_copies(node.args[0])
    return node, turns


def before_copies(node: Any) -> fx.Node:
    """As `nodes.same`, without asking for sizes, which an expression does not have."""
    while isinstance(node, fx.Node) and node.target in (aten.alias.default, aten.detach.default, aten.clone.default):
        node = node.args[0]
    return node


def mask_of(leaves: Sequence[Tensor]) -> Tensor | None:
    """The leaf of such a product that is not trained, if that is one of the two."""
    masks = [leaf for leaf in leaves if not leaf.requires_grad]
    return masks[0].detach() if len(masks) == 1 and masks[0].shape == leaves[0].shape == leaves[1].shape else None


@dataclass(frozen=True, eq=False)
class MaskedValues:
    """Where the packed values of a weight are in its parameter, which is the leaf of number `given`: int32, -1 for what fills
    up; and what the mask multiplies them with, None where that is 1."""

    given: int
    places: Tensor
    factors: Tensor | None

    @classmethod
    def of(cls, packed: Packed, leaves: Sequence[Tensor], number: int) -> Self | None:
        """None if the mask keeps something that is not stored, or for tensors of other shapes, types and orders."""
        given, mask = leaves[number], leaves[1 - number]
        shape, dtype = tuple(given.shape), packed.values.dtype
        alike = shape == tuple(mask.shape) == packed.shape and len(shape) == 2 and given.numel() < 1 << 31
        if not alike or given.dtype != dtype or not (given.is_contiguous() and mask.is_contiguous()):
            return None
        places = packed.source.long()
        if isinstance(packed.format, Format):
            filled = packed.format.padded_shape(shape)[1]
            row, column = places // filled, places % filled
            inside = (row < shape[0]) & (column < shape[1])
            places = torch.where(inside, row * shape[1] + column, -1)
        else:
            places = torch.where(places < given.numel(), places, -1)
        factors = mask.detach().flatten()[places.clamp(min=0)].masked_fill_(places < 0, 0)
        if count_nonzeros(factors) != count_nonzeros(mask.detach()):
            return None
        whole = bool(((factors == 1) | (places < 0)).all())
        return cls(number, places.int(), None if whole else factors.to(dtype))

    def renew(self, packed: Packed, leaves: Sequence[Tensor]) -> None:
        """Takes over the values of the parameter."""
        from gossamer.sparsity.kernels.taking import take  # which needs the compiler

        take(leaves[self.given].detach().flatten(), self.places, packed.values)
        if self.factors is not None:
            packed.values.mul_(self.factors)
