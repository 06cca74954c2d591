"""Products of rows, sorted by group, with a sparse matrix for each group, as those of experts are.

y[t] = x[t] w[e]     x [slots, k], w a SparseTensor [experts, k, m]    →    gossamer::stored_product
"""

from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.operations import one_node, untraced
from gossamer.sparsity.experts.stored_products import stored_product
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, values_of

LINES = Format.parse("#sparse_tensor.encoding<{ map = (e, m, k) -> (e : dense, m : dense, k : compressed) }>")
"""A matrix in CSR for each expert, one behind the other."""


@untraced
@one_node
def grouped_product(x: Tensor, weight: SparseTensor, ends: Tensor) -> Tensor:
    """[slots, m]: the rows of x from ends[e - 1] to ends[e] times matrix e of a weight in LINES, [experts, k, m], or of its
    transpose; 0 behind the last end. Gradients flow to x and to the values of the weight."""
    line = next(level.dim for level in weight.format.levels[1:] if level.kind == "dense")
    positions, coordinates, _ = weight.components
    sizes = weight.shape[line], weight.shape[3 - line]
    product: Tensor = stored_product(x, ends, positions, coordinates, values_of(weight), *sizes, line == 1)
    return product
