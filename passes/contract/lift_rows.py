"""lift-rows: turns the ops between the products of a chain from linalg into `kernel.map`, `kernel.sum` and `kernel.max`.

before   %1 = linalg.generic {parallel, reduction} ins(%x) outs(%zeros) { in + out }        [T, 384] -> [T, 1]
         %2 = linalg.generic {parallel, parallel} ins(%x, %1, %g) outs(%0) { (in - in_1) * in_2 }
after    %1 = "kernel.sum"() ({ kernel.read(%x) }) {size = 384}
         %2 = "kernel.map"() ({ (kernel.read(%x) - kernel.read(%1)) * kernel.read(%g) })

Expects generic ops (after linalg-generalize-named-ops and linalg-fuse-elementwise-ops). Runs after fuse-epilogue has taken the
contractions. Takes generics over two dimensions, tokens first: elementwise ones, and sums and maxima over the second dimension.
Others stay.
"""

import math
from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.kernel import MapOp, MaxOp, ReadOp, SumOp, end, integer
from gossamer.passes.loops.queries import clone_into, defining, dims, filled_with, iterator_types, walk

_REDUCTIONS = {"arith.addf": (SumOp, 0), "arith.maximumf": (MaxOp, -math.inf)}
"""For the op that accumulates in the body of a reduction: the kernel op, and the initial value."""


@dataclass(frozen=True)
class LiftRows:
    """Turn elementwise generics and reductions of rows into kernel.map, kernel.sum and kernel.max."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            iterators = iterator_types(op)
            if len(op.results) != 1 or len(op.operands) < 2 or _sparse(op):
                continue
            if iterators == ["parallel", "parallel"]:
                _lift_map(op)
            elif iterators in (["parallel", "reduction"], ["parallel", "parallel", "reduction"]):
                _lift_reduction(op)


def _sparse(op: ir.Operation) -> bool:
    return any(ir.RankedTensorType(v.type).encoding is not None for v in op.operands)


def _lift_map(op: ir.Operation) -> None:
    block = op.regions[0].blocks[0]
    if _used(block.arguments[len(op.operands) - 1]):
        return
    with ir.InsertionPoint(op), op.location:
        lifted = MapOp(result=op.results[0].type)
        body = ir.Block.create_at_start(lifted.body, [], [])
        with ir.InsertionPoint(body):
            end(clone_into(block, _reads(op, _as_they_are(op)))[0])
    op.results[0].replace_all_uses_with(lifted.result)
    op.erase()


def _lift_reduction(op: ir.Operation) -> None:
    """Lifts a reduction of rows. Its body ends in `out + expression`, starting from 0, or in the greater of the two."""
    block, result = op.regions[0].blocks[0], ir.RankedTensorType(op.results[0].type)
    old, init = block.arguments[len(op.operands) - 1], op.operands[len(op.operands) - 1]
    total, size, reads = defining(list(block.operations)[-1].operands[0]), _summed_size(op), _rows_of(op)
    lifted_op, start = _REDUCTIONS.get(total.name if total is not None else "", (None, 0))
    if total is None or lifted_op is None or size is None or reads is None or filled_with(init) != start:
        return
    others = [v for v in total.operands if v != old]
    if len(others) != 1 or result.rank != 2 or result.shape[1] != 1:
        return
    with ir.InsertionPoint(op), op.location:
        lifted = lifted_op(integer(size), result=result)
        body = ir.Block.create_at_start(lifted.body, [], [])
        with ir.InsertionPoint(body):
            mapping = _reads(op, reads)
            clone_into(block, mapping)
            end(mapping.get(others[0], others[0]))
            next(o for o in body.operations if any(v == old for v in o.operands)).operation.erase()
    op.results[0].replace_all_uses_with(lifted.result)
    op.erase()


Reads = list[tuple[ir.Value, ir.AffineMap]]
"""For each input: a tensor, and the map from token and feature to the place that is read."""


def _as_they_are(op: ir.Operation) -> Reads:
    return list(zip(op.operands, _maps(op), strict=True))[:-1]


def _rows_of(op: ir.Operation) -> Reads | None:
    """Returns the inputs of a reduction. None if they are not rows.

    torch-mlir reshapes the rows of a maximum to [T, 1, N]; then the inputs are the rows before that.
    """
    if len(iterator_types(op)) == 2:
        return _as_they_are(op)
    places = [ir.AffineExpr.get_dim(0), ir.AffineExpr.get_constant(0), ir.AffineExpr.get_dim(1)]
    found: Reads = []
    for operand, affine_map in _as_they_are(op):
        expanded, at = defining(operand), dims(affine_map)
        if None in at:
            return None
        if len(at) == 3:
            if expanded is None or expanded.name != "tensor.expand_shape":
                return None
            if at != [0, 1, 2] or ir.ShapedType(operand.type).shape[1] != 1:
                return None
            operand, at = expanded.operands[0], [0, 2]
        if ir.RankedTensorType(operand.type).rank != len(at):
            return None
        found.append((operand, ir.AffineMap.get(2, 0, [places[d] for d in at if d is not None])))
    return found


def _reads(op: ir.Operation, inputs: Reads) -> dict[ir.Value, ir.Value]:
    """Makes a kernel.read at the insertion point for each block argument of an input that is used."""
    arguments = list(op.regions[0].blocks[0].arguments)[:-1]
    return {
        argument: ReadOp(operand, ir.AffineMapAttr.get(affine_map), result=argument.type).result
        for argument, (operand, affine_map) in zip(arguments, inputs, strict=True)
        if _used(argument)
    }


def _maps(op: ir.Operation) -> list[ir.AffineMap]:
    return [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]


def _used(value: ir.Value) -> bool:
    return any(True for _ in value.uses)


def _summed_size(op: ir.Operation) -> int | None:
    """Returns the static size of the last dimension, or None."""
    last = len(iterator_types(op)) - 1
    for operand, affine_map in zip(op.operands, _maps(op), strict=True):
        shape = ir.RankedTensorType(operand.type).shape
        for axis, expr in enumerate(affine_map.results):
            if isinstance(expr, ir.AffineDimExpr) and ir.AffineDimExpr(expr).position == last and shape[axis] > 0:
                return shape[axis]
    return None
