"""`gossamer.graph_attention` computes attention over the entries of a sparse matrix, such as the edges of a graph.

GAT                 graph_attention(a, h, target=h_target, source=h_source, slope=0.2, dropout=0.6 if training else 0.0)
GATv2               graph_attention(a, h_source, queries=h_target, keys=h_source, direction=att, slope=0.2)
graph transformer   graph_attention(a, v, queries=q, keys=k, scale=d**-0.5)
"""

from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.dialects.format import Format
from gossamer.runtime.operations import one_node
from gossamer.sparsity.edges.edge_attention import attend_edges
from gossamer.sparsity.operations.open_sizes import agree
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, values_of


def graph_attention(
    pattern: SparseTensor,
    values: Tensor,
    *,
    target: Tensor | None = None,
    source: Tensor | None = None,
    edge: Tensor | None = None,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
    direction: Tensor | None = None,
    scale: float = 1.0,
    slope: float = 1.0,
    dropout: float = 0.0,
    weighted: bool = False,
) -> Tensor:
    """Computes attention over the edges of a graph in one pass over the rows of a sparse matrix.

    out[i, h] = sum over the entries p = (i, j) of row i of softmax_p(z[p, h]) * values[j, h], where

    z[p, h] = leaky_relu(target[i, h] + source[j, h] + edge[p, h] + scale * <queries[i, h], keys[j, h]>, slope)
    or, if `direction` is given,
    z[p, h] = target[i, h] + source[j, h] + edge[p, h] + scale * <direction[h], leaky_relu(queries[i, h] + keys[j, h], slope)>

    pattern        SparseTensor [rows, columns] in any format. Its values are used only if `weighted`: then they multiply the
                   products of queries and keys
    values         [columns, heads, features] of a float type; all terms have the same type
    target         [rows, heads]               source  [columns, heads]
    edge           [nnz, heads] or [nnz], in the order of the pattern in CSR
    queries        [rows, heads, size]         keys    [columns, heads, size]
    direction      [heads, size]
    slope          the slope of leaky_relu; 1 for no leaky_relu
    dropout        the share of weights in [0, 1) that are set to 0; the others are divided by the remaining share. torch's
                   generator draws them at every call

    Returns [rows, heads, features]. Rows without entries give 0. Neither the result nor its gradients need an array of
    nnz x heads. GossamerError if shapes or types do not fit.
    """
    if not isinstance(pattern, SparseTensor):
        kind = type(pattern).__name__
        raise GossamerError(
            f"graph_attention: the pattern is a {kind}, must be a SparseTensor: SparseTensor.from_torch, from_dense"
        )
    given = {"values": values, "target": target, "source": source, "edge": edge, "queries": queries, "keys": keys}
    for name, term in (given | {"direction": direction}).items():
        if term is not None and not isinstance(term, Tensor):
            raise GossamerError(f"graph_attention: {name} is {type(term).__name__}, must be a tensor: see torch.as_tensor")
    if pattern.dim() != 2 or not values.dim() or not agree(pattern.shape[1], values.shape[0]):
        shapes = f"a pattern of {list(pattern.shape)} does not go with values of {list(values.shape)}"
        raise GossamerError(f"graph_attention: {shapes}, which must have a row for each column of the pattern")
    if weighted and keys is None:
        raise GossamerError("graph_attention: weighted=True multiplies products of queries and keys: give queries and keys")
    positions, coordinates, stored = _in_rows(pattern)
    weight = stored if weighted else None
    terms = {
        "target": target, "source": source, "edge": edge, "queries": queries, "keys": keys, "weight": weight,
        "direction": direction,
    }  # fmt: skip
    return attend_edges(positions, coordinates, values, **terms, scale=scale, slope=slope, dropout=dropout)


@one_node
def _in_rows(pattern: SparseTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the positions, coordinates and values of the matrix in CSR."""
    rows = pattern if pattern.format.levels == Format.CSR.levels else pattern.to_format(Format.CSR)
    positions, coordinates = rows.components[:2]
    return positions, coordinates, values_of(rows)
