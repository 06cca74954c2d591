"""Reports the operations on SparseTensors and on sites of points that the final graph has: format, schedule, loop order."""

import torch
from torch import fx

from gossamer.backend.graph.einsum_calls import Call, call_at, hint
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs, density
from gossamer.backend.graph.nodes import COPIES, VIEWS, arguments, is_backward, same
from gossamer.backend.report.report import Decision
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.loop_order import dense_result_order
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.block_samples import whole_blocks
from gossamer.sparsity.operations.calls import Build, kernel_of
from gossamer.sparsity.operations.dense_results import einsum_ir, sample_ir
from gossamer.sparsity.operations.matrix_calls import RowProduct, RowSample
from gossamer.sparsity.tensor.einsum_sketches import NotedOrder, take_notes

ours = torch.ops.gossamer
aten = torch.ops.aten

_TURNS = {
    *VIEWS, *COPIES, aten.permute.default, aten.transpose.int, aten.flip.default, torch.ops.prims.rev.default,
    aten._to_copy.default, torch.ops.prims.convert_element_type.default,
}  # fmt: skip
"""Operations that only put the elements of a weight into another order or type."""


class ReportOperations:
    """Reports the operations on SparseTensors and sites in the final graph. Changes nothing."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each einsum of several operands that was split while torch traced it. Then returns one for
        each call of gossamer::einsum, gossamer::sample and gossamer::convolve_sites, in the order of the graph."""
        found = [_order(note) for note in take_notes()]
        for node in graph.nodes:
            einsum, sample = call_at(node, ours.einsum.default), call_at(node, ours.sample.default)
            if einsum is not None:
                found.append(_decision(einsum, "einsum", einsum_ir, RowProduct.of(einsum.spec), context.inputs))
            elif sample is not None:
                found.append(_decision(sample, "sample", sample_ir, RowSample.of(sample.spec), context.inputs))
            elif str(node.target) == "gossamer.convolve_sites.default":  # only gossamer.nn registers it
                found.append(_convolution(node, context.inputs))
        return found


def _order(note: NotedOrder) -> Decision:
    return Decision(note.expression, "product order", note.shape, 1.0, None, "order", False, note.text, note.gain)


def name_of(structure: fx.Node, inputs: Inputs) -> str:
    """Returns the user's name for the sparse tensor with this array. A computed array has the name of its node."""
    node = same(structure)
    return inputs.name(node) if node.op == "placeholder" else node.name


def _convolution(node: fx.Node, inputs: Inputs) -> Decision:
    weight = arguments(node)[1]
    while weight.target in _TURNS:
        weight = arguments(weight)[0]
    shape = tuple(hint(size) for size in weight.meta["val"].shape)
    value = inputs.value(weight) if weight.op == "placeholder" else None
    share = 1.0 if value is None else density(value.detach())
    op = "convolution backward" if is_backward(node) else "convolution"
    reason = "no work at empty voxels"
    return Decision(name_of(weight, inputs), op, shape, share, "site map", "sites", True, reason, None)


def _decision(call: Call, op: str, build: Build, product: RowProduct | RowSample | None, inputs: Inputs) -> Decision:
    first = call.sparse[0]
    assert first.format is not None
    dtype = first.values.meta["val"].dtype
    schedule = "token-blocks" if _is_in_blocks(call, product, inputs) else _schedule(call, build, product, dtype)
    how = "in parallel by rows" if schedule in ("rows", "dots", "tokens", "token-blocks") else "MLIR's own sparsifier"
    by_rows = product is None or _stored_by_rows(product) or schedule == "reference"
    reason = f"loops {', '.join(_loops(call, product))}, {how}" + ("" if by_rows else ", on a sorted copy that is kept")
    name, kernel = name_of(first.arrays[0], inputs), (first.format.name, schedule, True, reason, None)
    return Decision(name, f"{op} {call.text}", first.shape, first.density, *kernel)


def _stored_by_rows(product: RowProduct | RowSample) -> bool:
    return product.direct if isinstance(product, RowProduct) else product.format.levels == Format.CSR.levels


def _schedule(call: Call, build: Build, product: RowProduct | RowSample | None, dtype: torch.dtype) -> str:
    """Returns the schedule of the kernel. Compiles the kernel if it is not compiled yet."""
    spec: Spec = call.spec
    if isinstance(product, RowSample) and product.over_tokens and call.node.meta["val"].device.type == "cpu":
        return "tokens"
    if product is not None:
        arrays = [node.meta["val"].dtype for node in call.sparse[0].arrays[:2]]
        widths = [kind.itemsize * 8 for kind in arrays] if _stored_by_rows(product) else [32, 32]
        spec = product.canonical(Format.CSR.with_widths(*widths))
    try:
        return kernel_of(build, spec, dtype).schedule
    except CompileError:
        return "none"


def _is_in_blocks(call: Call, product: RowProduct | RowSample | None, inputs: Inputs) -> bool:
    """Whether the call is the gradient of a weight whose entries are known to form whole blocks."""
    if not isinstance(product, RowSample) or not product.over_tokens or not _stored_by_rows(product):
        return False
    positions, coordinates = (inputs.value(same(array)) for array in call.sparse[0].arrays[:2])
    if positions is None or coordinates is None or not positions.is_cpu:
        return False
    columns, dtype = call.sparse[0].sizes[1 - product.rows], call.node.meta["val"].dtype
    return isinstance(columns, int) and whole_blocks(positions, coordinates, columns, dtype) is not None


def _loops(call: Call, product: RowProduct | RowSample | None) -> list[str]:
    """Returns the letters of the loops, outermost first."""
    if product is None:
        return list(dense_result_order(tuple([operand.operand for operand in call.operands])))
    own = call.sparse[0].letters
    outer = [own[product.rows], own[1 - product.rows]]
    return [*outer, *(letter for operand in call.dense for letter in operand.letters if letter not in outer)][:3]
