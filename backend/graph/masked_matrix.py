"""Recognises expressions of weights that are a parameter times a mask.

evaluate(original, mask) = mul(original, mask), also reshaped to a matrix, transposed, or with reversed filters
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Arrangement = Callable[[Tensor], Tensor]
"""Reorders the elements of any tensor like the parameter into a matrix. May add zeros between them."""

_COPIES = {aten.alias.default, aten.detach.default, aten.clone.default}
_ARRANGING = _COPIES | {
    aten.t.default, aten.permute.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    torch.ops.prims.rev.default, aten.constant_pad_nd.default,
}  # fmt: skip


def arrangement_of(evaluate: Any) -> Arrangement | None:
    """Returns how an expression reorders the product of its two leaves. Returns None if it does anything else."""
    if not isinstance(evaluate, fx.GraphModule):
        return None
    leaves = [each for each in evaluate.graph.nodes if each.op == "placeholder"]
    node, steps = evaluate.graph.output_node().args[0], list[fx.Node]()
    while isinstance(node, fx.Node) and node.target in _ARRANGING and not any(node.args[2:]):  # pads must add zeros
        steps.insert(0, node)
        node = node.args[0]
    if (
        not isinstance(node, fx.Node)
        or node.target is not aten.mul.Tensor
        or any(len(each.all_input_nodes) > 1 for each in steps)
    ):
        return None
    factors = [before_copies(each) for each in node.args]
    return partial(_arranged, steps) if len(leaves) == 2 and factors in (leaves, leaves[::-1]) else None


def _arranged(steps: Sequence[fx.Node], product: Tensor) -> Tensor:
    for step in steps:
        apply: Any = step.target
        product = apply(product, *step.args[1:], **step.kwargs)
    return product


def turned(node: Any) -> tuple[fx.Node, int]:
    """Returns the node before copies and transpositions, and the number of transpositions."""
    turns, node = 0, before_copies(node)
    while node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0]):
        turns, node = turns + 1, before_copies(node.args[0])
    return node, turns


def before_copies(node: Any) -> fx.Node:
    """Returns the node before copies. Unlike `nodes.same`, needs no sizes, because nodes of expressions have none."""
    while isinstance(node, fx.Node) and node.target in _COPIES:
        node = node.args[0]
    return node


def mask_of(leaves: Sequence[Tensor]) -> Tensor | None:
    """Returns the mask: the only leaf of the two that is not trained. Returns None if there is none, or shapes differ."""
    masks = [leaf for leaf in leaves if not leaf.requires_grad]
    return masks[0].detach() if len(masks) == 1 and masks[0].shape == leaves[0].shape == leaves[1].shape else None
