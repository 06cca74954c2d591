"""Multiplies rows, sorted by group, with one sparse matrix per group, such as the weights of experts.

y[t] = x[t] w[e]     x [slots, k], w a SparseTensor [experts, k, m]    →    gossamer::stored_product
"""

from torch import Tensor

from gossamer.runtime.operations import one_node, untraced
from gossamer.sparsity.experts.stored_products import stored_product
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, values_of


@untraced
@one_node
def grouped_product(x: Tensor, weight: SparseTensor, ends: Tensor) -> Tensor:
    """Returns [slots, m]: rows ends[e - 1] to ends[e] of x times matrix e of the weight [experts, k, m].

    Rows after the last end give 0. The weight, or its transpose, has the format LINES. Gradients flow to x and to the values of
    the weight.
    """
    line = next(level.dim for level in weight.format.levels[1:] if level.kind == "dense")
    positions, coordinates, _ = weight.components
    sizes = weight.shape[line], weight.shape[3 - line]
    product: Tensor = stored_product(x, ends, positions, coordinates, values_of(weight), *sizes, line == 1)
    return product
