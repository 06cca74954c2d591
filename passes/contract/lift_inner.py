"""lift-inner: turns products with a dense matrix from linalg into `kernel.inner` in the bodies that read them.

before   %1 = linalg.generic {parallel, parallel, reduction} ins(%h, %b) outs(%zeros) { out + in * in_1 }     low rank
         %2 = "kernel.contract"(%x, %w) ({ ^bb0(%sum): %sum + kernel.read(%1) })
after    %2 = "kernel.contract"(%x, %w) ({ ^bb0(%sum): %sum + "kernel.inner"(%h, %b) {reduction = 1} })

A product that one body reads once, element by element, moves into that body. Any other product becomes a `kernel.map`. Runs
after fuse-epilogue and lift-rows. Narrow factors are widened to the type of the sums, as linalg does.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.kernel import InnerOp, MapOp, end, integer
from gossamer.passes.contract.fuse_epilogue import is_product
from gossamer.passes.loops.queries import dims, walk


@dataclass(frozen=True)
class LiftInner:
    """Turn dense products of matrices into kernel.inner."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            reduction = _reduction(op)
            if reduction is not None:
                _lift(op, reduction)


def _reduction(op: ir.Operation) -> int | None:
    """Returns the dimension of w that y[t, n] = sum_k x[t, k] w[n, k], or w[k, n], sums over. None for other ops."""
    if not is_product(op) or any(ir.RankedTensorType(v.type).encoding is not None for v in op.operands):
        return None
    x, w, _ = (dims(ir.AffineMapAttr(a).value) for a in ir.ArrayAttr(op.attributes["indexing_maps"]))
    return w.index(2) if x == [0, 2] and w in ([1, 2], [2, 1]) else None


def _lift(op: ir.Operation, reduction: int) -> None:
    """Puts a kernel.inner in place of the read of the product, or in a kernel.map in place of the product."""
    x, w, _ = op.operands
    given = integer(reduction)
    element = ir.RankedTensorType(op.results[0].type).element_type
    read = _only_read(op.results[0])
    if read is not None:
        with ir.InsertionPoint(read), read.location:
            read.results[0].replace_all_uses_with(InnerOp(x, w, given, result=element).result)
        read.erase()
    else:
        with ir.InsertionPoint(op), op.location:
            lifted = MapOp(result=op.results[0].type)
            with ir.InsertionPoint(ir.Block.create_at_start(lifted.body, [], [])):
                end(InnerOp(x, w, given, result=element).result)
        op.results[0].replace_all_uses_with(lifted.result)
    op.erase()


def _only_read(value: ir.Value) -> ir.Operation | None:
    """Returns the kernel.read that is the only user of a value, if it reads the element of the body's own result element."""
    users = [use.owner.operation for use in value.uses]
    if len(users) != 1 or users[0].name != "kernel.read":
        return None
    (read,) = users
    reader = read.parent
    assert reader is not None
    whole = dims(ir.AffineMapAttr(read.attributes["map"]).value) == [0, 1] and reader.name in ("kernel.contract", "kernel.map")
    return read if whole else None
