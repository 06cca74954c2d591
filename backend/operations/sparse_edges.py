"""Recognises the parts of attention that is written with operations on SparseTensors, as the protocol of `edges/spelling.py`.

    %s = gossamer::sample([%pos, %crd, %a, %q, %k])               product of queries and keys, or rows that are gathered
    %w = gossamer::softmax(%pos, %z)                              softmax of %z
    %y = gossamer::einsum([%pos, %crd, %w, %v])                   sum of %w times %v

The entries of a pattern are the edges, from the columns (sources) to the rows (targets); there is one head.
"""

import torch
from torch import fx

from gossamer.backend.edges.spelling import PerNode, Product, Softmax, Sum
from gossamer.backend.graph.einsum_calls import Call, Given, Rows, call_at
from gossamer.backend.graph.nodes import same

aten, ours = torch.ops.aten, torch.ops.gossamer


class SparseEdges:
    """The entries of a pattern stored in rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def gathered(self, node: fx.Node) -> tuple[str, PerNode] | None:
        """Returns the side, "target" or "source", of a sampled vector, and the vector; None for other nodes."""
        call = self._sample(node)
        if call is None or len(call[0]) != 1 or len(call[0][0].letters) != 1:
            return None
        (vector,), rows = call
        return "target" if vector.letters == rows.row else "source", PerNode(vector.values)

    def product(self, node: fx.Node) -> Product | None:
        """Returns the sampled product of two matrices that a node is, else None."""
        call = self._sample(node)
        if call is None or len(call[0]) != 2 or any(len(matrix.letters) != 2 for matrix in call[0]):
            return None
        matrices, rows = call
        by = {next((each for each in (rows.row, rows.column) if each in m.letters), ""): m for m in matrices}
        features = {letter for matrix in matrices for letter in matrix.letters} - {rows.row, rows.column}
        if set(by) != {rows.row, rows.column} or len(features) != 1 or not all(features < {*m.letters} for m in matrices):
            return None
        size = matrices[0].values.meta["val"].shape[matrices[0].letters.index(features.pop())]
        if not isinstance(size, int):
            return None
        return Product(_per_node(by[rows.row], rows.row), _per_node(by[rows.column], rows.column), size)

    def softmax(self, node: fx.Node) -> Softmax | None:
        """Returns the softmax over rows that a node is, else None."""
        if node.target is not ours.softmax.default or node.args[2] or same(node.args[0]) is not self.rows.positions:
            return None
        return Softmax(same(node.args[1]))

    def sum_of(self, call: Call) -> Sum | None:
        """Returns a product of the pattern with a matrix as a sum over the entries of each row; None for other calls."""
        if len(call.sparse) != 1 or len(call.dense) != 1:
            return None
        pattern, (matrix,), result = call.sparse[0], call.dense, call.spec.result.letters
        rows = pattern.rows
        if rows is None or rows.pattern != self.rows.pattern or rows.row not in result or rows.column in result:
            return None
        features = {*result} - {rows.row}
        if not len(result) == len(matrix.letters) == 2 or {*matrix.letters} != {rows.column, *features}:
            return None
        return Sum(PerNode(call.node, result[-1] == rows.row), _per_node(matrix, rows.column), same(pattern.values))

    def _sample(self, node: fx.Node) -> tuple[list[Given], Rows] | None:
        """Returns the dense operands that a node samples at this pattern, and the letters of the call; None for other nodes."""
        call = call_at(same(node), ours.sample.default)
        rows = None if call is None else call.operands[0].rows
        if call is None or rows is None or rows.pattern != self.rows.pattern:
            return None
        return call.dense, rows


def _per_node(matrix: Given, letter: str) -> PerNode:
    """Returns a matrix with one row for each node, or a column if the dimension with this letter is its second one."""
    return PerNode(matrix.values, len(matrix.letters) == 2 and matrix.letters[1] == letter)
