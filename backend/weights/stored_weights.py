"""stored-weights: products with a parameter that is a SparseTensor become products with a weight, which sparse-weights takes.

    %y = gossamer::einsum([%x, %pos, %crd, %values])   →    %w = gossamer::einsum([%pos, %crd, %values])     all its elements
                                                            %y = mm(%x, permute(%w))

So these products get the kernels of pruned layers: in torch's layout, packed for a tile, with an epilogue, forward and
backward. The stored values remain the parameter. A packed copy takes new values after an optimizer has changed them
(`run/packed_weights.py`). A product that would not become a region stays as it is. So no call ever computes the dense matrix.
"""

import torch
from torch import fx

from gossamer.backend.graph.einsum_calls import Call, call_at
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import same
from gossamer.backend.regions.contractions import contraction_at
from gossamer.backend.regions.decide import judge
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision
from gossamer.dialects.errors import GossamerError
from gossamer.runtime.torch_internals import SubclassGetAttrAOTInput
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.matrix_calls import RowProduct

aten, ours = torch.ops.aten, torch.ops.gossamer

_MOST_ELEMENTS = 1 << 26
"""The largest number of elements, zeros included, of a matrix that is made dense once to be packed."""

_SPARSEST = 0.01
"""Sparser matrices are more like graphs than layers. Packings would cut them into tiles, most of which are empty."""


class StoredWeights:
    """Products with SparseTensor parameters become products with weights."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Makes no decision. sparse-weights decides about the new products."""
        if context.options.schedule == "reference":
            return []
        products = [node for node in graph.nodes if node.target is ours.einsum.default]
        values: dict[fx.Node, torch.Tensor] = {}
        for node in products:
            call = call_at(node, ours.einsum.default)
            arrays = _parameter(call, context.inputs) if call is not None else None
            if call is None or arrays is None or not _is_linear(call):
                continue
            values.update(arrays)
            _replace(call, list(arrays), values, context.options)
        graph.eliminate_dead_code()
        return []


def _parameter(call: Call, inputs: Inputs) -> dict[fx.Node, torch.Tensor] | None:
    """Returns the arrays of a product's matrix if it is a parameter with the size and density of a layer, or None."""
    if len(call.sparse) != 1:
        return None
    (matrix,) = call.sparse
    if matrix.rows is None or not all(isinstance(size, int) for size in matrix.sizes):
        return None
    found: dict[fx.Node, torch.Tensor] = {}
    for array in map(same, matrix.arrays):
        desc = array.meta.get("desc")
        outer = inputs.given(desc.base) if isinstance(desc, SubclassGetAttrAOTInput) else None
        value = inputs.value(array) if isinstance(outer, torch.nn.Parameter) else None
        if value is None:
            return None
        found[array] = value
    elements, entries = matrix.sizes[0] * matrix.sizes[1], next(reversed(found.values())).numel()
    return found if entries >= _SPARSEST * elements and 0 < elements <= _MOST_ELEMENTS else None


def _is_linear(call: Call) -> bool:
    """Whether a call is x @ w.T or x @ w with contiguous rows of x."""
    product = RowProduct.of(call.spec)
    return product is not None and not product.vector and product.x_across and product.y_across


def _replace(call: Call, arrays: list[fx.Node], values: dict[fx.Node, torch.Tensor], options: Options) -> None:
    """Replaces a call by a product with the matrix, unless that product would stay dense."""
    (matrix,), (x,) = call.sparse, call.dense
    emit = Emitter(call.node)
    spec = Spec((matrix.operand,), Operand(matrix.letters))
    weight = emit(ours.einsum.default, arrays, list(matrix.sizes), str(spec))
    by_columns = matrix.letters[1] in x.letters  # y[t, m] = sum_k x[t, k] w[m, k]
    product = emit(aten.mm.default, x.values, emit(aten.permute.default, weight, [1, 0]) if by_columns else weight)
    try:
        contraction = contraction_at(product, values)
        stays_dense = contraction is None or judge(contraction, options)[0] is not None
    except GossamerError:
        stays_dense = True
    if not stays_dense:
        call.node.replace_all_uses_with(product)
