"""Products of rows, sorted by group, with a sparse matrix for each group, as those of experts are.

y[t] = x[t] w[e]     x [slots, k], w a SparseTensor [experts, k, m]    →    gossamer::stored_product
"""

from torch import Tensor

from gossamer.runtime.operations import one_node, untraced
from gossamer.sparsity.experts.stored_products import stored_product
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, values_of


@untraced
@one_node
def grouped_product(x: Tensor, weight: SparseTensor, ends: Tensor) -> Tensor:
    """[slots, m]: the rows of x from ends[e - 1] to ends[e] times matrix e of the weight [experts, k, m].

    Rows behind the last end give 0. The weight has the format LINES, or is the transpose of one that has it. Gradients flow to
    x and to the values of the weight.
    """
    line = next(level.dim for level in weight.format.levels[1:] if level.kind == "dense")
    positions, coordinates, _ = weight.components
    sizes = weight.shape[line], weight.shape[3 - line]
    product: Tensor = stored_product(x, ends, positions, coordinates, values_of(weight), *sizes, line == 1)
    return product
