"""Finds weights: matrices that are computed only from static inputs.

A masked weight is not a tensor that somebody holds, but `mul(weight, mask)` in the graph. This file copies such an expression
out of the graph (expressions.py), and evaluates it once on the real values to see its zeros. packed_weights.py evaluates it
again when one of its leaves changes.

    %t = permute(mul(%weight, %mask), [1, 0])   →   evaluate(weight, mask) = mul(weight, mask), transposed
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from gossamer.backend.graph.expressions import content_key, cut, evaluated
from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.runtime.grouped_values import dense_groups, fitting
from gossamer.runtime.weight_store import only_reading

aten = torch.ops.aten

T = TypeVar("T")

_TRANSPOSES = {aten.permute.default, aten.t.default, aten.transpose.int, aten.numpy_T.default}
"""Views that transpose a matrix."""


@dataclass(frozen=True)
class Weight:
    """A matrix that depends only on static inputs.

    leaves      the placeholders and constants that it is computed from, in the order in which `evaluate` takes their values
    main        the leaf that gives the weight its name: a parameter if there is one, and the largest; no scale or mask
    evaluate    leaf values → the stored matrix, rows first
    transposed  whether the graph uses the transpose of the stored matrix
    key         content hash of the expression and of its leaves' types
    pattern     the positions of its nonzeros at compile time
    groups      for a matrix of small integers with a scale for each 16 neighbours in a row: the bits of the integers, and
                those of the scales, at compile time; None for other matrices
    """

    leaves: tuple[fx.Node, ...]
    main: fx.Node
    evaluate: Callable[..., torch.Tensor]
    transposed: bool
    key: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    pattern: Pattern
    groups: tuple[int, int] | None

    @property
    def density(self) -> float:
        """The share of elements that are not zero."""
        return self.pattern.density


def weight_behind(operand: fx.Node, leaf_values: dict[fx.Node, torch.Tensor]) -> Weight | None:
    """Returns the weight behind an operand that depends only on static inputs.

    leaf_values  the real value of every static leaf

    A batch of equal matrices counts as one matrix. Returns None if the operand is no matrix, or its evaluation fails.
    """
    expression = cut([operand], leaf_values)
    leaves, evaluate = expression.leaves, expression.evaluate
    if not leaves:
        return None
    values = [leaf_values[leaf] for leaf in leaves]
    try:
        (value,) = run(evaluate, values)
    except RuntimeError:
        return None
    graph = evaluate.graph
    output = graph.output_node()
    results: Any = output.args[0]
    node = results[0]
    with graph.inserting_before(output):
        while value.dim() > 2 and (value.shape[0] == 1 or value.stride(0) == 0):
            node, value = graph.call_function(aten.select.int, (node, 0, 0)), value[0]
        if value.dim() != 2:
            return None
        transposed = value.stride(0) == 1 and value.stride(1) >= max(2, value.shape[0])
        if transposed:
            node, value = graph.call_function(aten.permute.default, (node, [1, 0])), value.t()
    output.args = (node,)
    evaluate.recompile()
    types = [(tuple(v.shape), v.stride(), v.dtype) for v in values]
    main = max(leaves, key=lambda n: _prominence(leaf_values[n]))
    shape = (value.shape[0], value.shape[1])
    return Weight(
        leaves, main, evaluate, transposed, content_key(evaluate, types), shape, value.dtype, value.device, Pattern.of(value),
        _groups(node, values, value),
    )  # fmt: skip


def _groups(made: Any, leaves: Sequence[torch.Tensor], matrix: torch.Tensor) -> tuple[int, int] | None:
    """Returns `Weight.groups` of a matrix that the node `made` computes from leaves."""
    if matrix.dtype is torch.float32 and matrix.is_cpu and any(_is_quantized(leaf, matrix) for leaf in leaves):
        return fitting(matrix)
    turned = False
    while made.target in _TRANSPOSES:
        made, turned = made.args[0], not turned
    return (made.args[-1], 16) if made.target is dense_groups and not turned else None


def _is_quantized(leaf: torch.Tensor, matrix: torch.Tensor) -> bool:
    return leaf.dtype is torch.int8 and leaf.numel() == matrix.numel()


def run(evaluate: Callable[..., T], values: Sequence[torch.Tensor]) -> T:
    """Evaluates a weight expression on real values. Weights that are kept only packed stay so (see `only_reading`)."""
    with only_reading():
        return evaluated(evaluate, values)


def _prominence(leaf: torch.Tensor) -> tuple[bool, int, bool]:
    return isinstance(leaf, torch.nn.Parameter), leaf.numel(), leaf.is_floating_point()
