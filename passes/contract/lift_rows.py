"""lift-rows: what stands between the products of a chain, from linalg to `kernel.map` and `kernel.sum`.

before   %1 = linalg.generic {parallel, reduction} ins(%x) outs(%zeros) { in + out }        [T, 384] -> [T, 1]
         %2 = linalg.generic {parallel, parallel} ins(%x, %1, %g) outs(%0) { (in - in_1) * in_2 }
after    %1 = "kernel.sum"() ({ kernel.read(%x) }) {size = 384}
         %2 = "kernel.map"() ({ (kernel.read(%x) - kernel.read(%1)) * kernel.read(%g) })

Expects generic ops (after linalg-generalize-named-ops and linalg-fuse-elementwise-ops) and contractions that fuse-epilogue has
taken. Of generics over two dimensions, tokens first, it takes those that are elementwise, and sums over the second; others
stay.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from gossamer.dialects.kernel import MapOp, ReadOp, SumOp, YieldOp
from gossamer.passes.loops.queries import clone_into, defining, filled_with, iterator_types, walk


@dataclass(frozen=True)
class LiftRows:
    """Turn elementwise generics and sums of rows into kernel.map and kernel.sum."""

    name: ClassVar[str] = "lift-rows"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            iterators = iterator_types(op)
            if len(op.results) != 1 or len(op.operands) < 2 or len(iterators) != 2 or _sparse(op):
                continue
            if iterators == ["parallel", "parallel"]:
                _lift_map(op)
            elif iterators == ["parallel", "reduction"]:
                _lift_sum(op)


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
            YieldOp(clone_into(block, _reads(op))[0])
    op.results[0].replace_all_uses_with(lifted.result)
    op.erase()


def _lift_sum(op: ir.Operation) -> None:
    """A sum of rows: a body that ends in `out + expression`, from 0."""
    block, result = op.regions[0].blocks[0], ir.RankedTensorType(op.results[0].type)
    old, init = block.arguments[len(op.operands) - 1], op.operands[len(op.operands) - 1]
    total, size = defining(list(block.operations)[-1].operands[0]), _summed_size(op)
    if total is None or total.name != "arith.addf" or size is None or filled_with(init) != 0:
        return
    others = [v for v in total.operands if v != old]
    if len(others) != 1 or result.rank != 2 or result.shape[1] != 1:
        return
    with ir.InsertionPoint(op), op.location:
        lifted = SumOp(ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size), result=result)
        body = ir.Block.create_at_start(lifted.body, [], [])
        with ir.InsertionPoint(body):
            mapping = _reads(op)
            clone_into(block, mapping)
            YieldOp(mapping.get(others[0], others[0]))
            next(o for o in body.operations if any(v == old for v in o.operands)).operation.erase()
    op.results[0].replace_all_uses_with(lifted.result)
    op.erase()


def _reads(op: ir.Operation) -> dict[ir.Value, ir.Value]:
    """A kernel.read at the insertion point for each block argument that stands for an input."""
    maps = [ir.AffineMapAttr(a) for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
    arguments = list(op.regions[0].blocks[0].arguments)[:-1]
    return {
        argument: ReadOp(operand, affine_map, result=argument.type).result
        for argument, operand, affine_map in zip(arguments, op.operands, maps, strict=False)
        if _used(argument)
    }


def _used(value: ir.Value) -> bool:
    return any(True for _ in value.uses)


def _summed_size(op: ir.Operation) -> int | None:
    """The static size of dimension 1."""
    maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
    for operand, affine_map in zip(op.operands, maps, strict=True):
        shape = ir.RankedTensorType(operand.type).shape
        for axis, expr in enumerate(affine_map.results):
            if isinstance(expr, ir.AffineDimExpr) and ir.AffineDimExpr(expr).position == 1 and shape[axis] > 0:
                return shape[axis]
    return None
