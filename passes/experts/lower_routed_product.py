"""lower-routed-product: lowers a `kernel.routed_product` to the loops of expert_product.py. Their sums are the result.

before   %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 8, ...}
after    … y[slot, rows] = the sums of a block

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.expert_product import Block, ExpertProduct, Machine, store
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, loop, narrowed, vector_of


@dataclass(frozen=True)
class LowerRoutedProduct(Machine):
    """Its options are those of `Machine`."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.routed_product"):
            with op.location:
                _lower(module, ExpertProduct(op.opview, self, "x"))


def _lower(module: ir.Module, product: ExpertProduct) -> None:
    out = product.storage.output
    kind = vector_of(product.lanes, ir.MemRefType(out.type).element_type)

    def finish(block: Block) -> None:
        with loop(index(0), block.slots, index(1)) as slots:
            number = slots.induction_variable
            target = product.slot(arith.addi(block.slot, number))
            with loop(index(0), block.rows, index(product.lanes)) as rows:
                at = rows.induction_variable
                value = narrowed(vector.load(product.vec, block.sums[0], [number, at]), kind)
                store(value, out, [target, arith.addi(block.row, at)], arith.subi(block.rows, at))

    with ir.InsertionPoint(product.op):
        rows, first = memref.dim(out, index(1)), index(0)
    product.lower(module, rows, [first], finish)
