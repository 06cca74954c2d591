"""Finds stored values outside a tensor's shape, so that no result depends on them. Blocks at its edge store some.

2 x 3 blocks of a 3 x 5 matrix:     x x x | x x -
                                    x x x | x x -
                                    ------+------
                                    x x x | x x -
                                    - - - | - - -
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.runtime.modules import sizes
from gossamer.sparsity.arrays.stored_entries import blocked
from gossamer.sparsity.compiler.operands import Bound
from gossamer.sparsity.compiler.operands import dense as bound_dense
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to


def inside(pattern: Bound) -> Tensor | None:
    """Returns which stored values lie within the shape, None if all do."""
    edges = _edges(pattern)
    if not edges:
        return None
    ones = pattern.values.detach().new_ones
    wide = pattern.with_values(ones(pattern.values.shape, dtype=torch.float32))
    return sample(wide, [bound_dense(c, ones(n, dtype=torch.float32)) for c, n in edges]) != 0


def inside_of(tensor: SparseTensor) -> Tensor | None:
    """Returns `inside` for a tensor."""
    return inside(bound_to(letters_of(tensor), tensor)) if blocked(tensor.format) else None


def within(tensor: SparseTensor, values: Tensor) -> Tensor:
    """Returns values with 0 for those outside the shape. Functions may have made them nonzero, such as 0 / 0."""
    kept = inside_of(tensor)
    return values if kept is None else values.masked_fill(~kept, 0)


def summed_within(bound: Sequence[Bound], result: str) -> list[Bound]:
    """Returns operands with 0 outside the shape, where only this operand has a summed letter.

    Otherwise the extents of the other operands or of the result limit the sum.
    """
    return [_alone_within(operand, [*(other.letters for other in bound if other is not operand), result]) for operand in bound]


def _alone_within(operand: Bound, others: list[str]) -> Bound:
    letters = set().union(*others)
    if all(c in letters for c, _ in _edges(operand)):
        return operand
    kept = inside(operand)
    return operand if kept is None else operand.with_values(torch.where(kept, operand.values, 0))


def _edges(pattern: Bound) -> list[tuple[str, int]]:
    """Returns the letters, with extents, of dimensions in which blocks reach outside the shape, or may if extents are open."""
    if pattern.format is None or not blocked(pattern.format):
        return []
    padded = pattern.format.padded_shape(pattern.shape)
    extents = zip(pattern.letters, pattern.shape, padded, strict=True)
    return [(c, n) for c, n, whole in extents if not sizes.known_true(n == whole)]
