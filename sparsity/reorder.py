"""`gossamer.reorder`: the nodes of a graph in an order in which neighbours are near each other in memory."""

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


def reorder(adjacency: SparseTensor) -> tuple[SparseTensor, Tensor]:
    """The same graph with its nodes renumbered, and `order` [nodes]: the old number of each new node.

        a, order = gossamer.reorder(a)
        x = x[order]                           # once; labels and masks too
        y = model(a, x)[order.argsort()]       # if the old numbers are wanted back

    adjacency  [nodes, nodes] in any format; gradients flow to its values

    Reverse Cuthill-McKee (George, 1971), by SciPy. It pays where a graph has structure that its numbers do not show, such as
    a shuffled mesh, whose products take a third to a sixth of the time afterwards (one of 250,000 nodes; finding the order
    takes as long as three of them, 64 columns each). Power-law graphs do not gain from it. Moving the rows of x and y at
    every call costs more than it saves, so let the whole model run in the new order.
    GossamerError if the matrix is not square, ImportError without SciPy.
    """
    if adjacency.dim() != 2 or adjacency.shape[0] != adjacency.shape[1]:
        raise GossamerError(f"reorder: the adjacency of a graph is square, got {list(adjacency.shape)}")
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    detached = adjacency.detach()
    assert isinstance(detached, SparseTensor)
    graph = detached.to_scipy().tocsr()
    order = torch.from_numpy(reverse_cuthill_mckee(graph, symmetric_mode=False).copy()).long()
    renumbered = adjacency.index_select(0, order).index_select(1, order)
    assert isinstance(renumbered, SparseTensor)
    return renumbered, order
