"""lower-routed-hidden: a `kernel.routed_hidden` becomes the loops of expert_product.py, whose sums go through the activation.

before   %h, %kept = "kernel.routed_hidden"(%x, %weight, %scales, %bias, %positions, %order) {activation = "silu", ...}
after    … the sums of a block's rows of gates, and of those of up
         hidden[n, rows] = gates / (1 + exp(-gates)) * up

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.activations import hidden
from gossamer.passes.experts.expert_product import Block, ExpertProduct, Rows, store
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, interleaved, loop, narrowed, vector_of


@dataclass(frozen=True)
class LowerRoutedHidden:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "lower-routed-hidden"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.routed_hidden"):
            with op.location:
                _Hidden(op.opview, self.bits).lower(module)


class _Hidden:
    def __init__(self, op: Any, bits: int) -> None:
        self.product = ExpertProduct(op, bits, "x")
        self.activation, self.layout = (ir.StringAttr(a).value for a in (op.activation, op.layout))
        self.keep = ir.IntegerAttr(op.keep).value
        self.out, self.kept = self.product.storage.outputs
        self.kind = vector_of(self.product.lanes, ir.MemRefType(self.out.type).element_type)

    def lower(self, module: ir.Module) -> None:
        with ir.InsertionPoint(self.product.op):
            self.size, zero = memref.dim(self.out, index(1)), index(0)
            streams = {
                "halves": [Rows(zero), Rows(self.size)],
                "interleaved": [Rows(zero, 2), Rows(index(1), 2)],
                "up": [Rows(zero)],
            }
        self.product.lower(module, self.size, streams[self.layout], self._finish)

    def _finish(self, block: Block) -> None:
        lanes, vec = self.product.lanes, self.product.vec
        with loop(index(0), block.slots, index(1)) as slots:
            number = slots.induction_variable
            target = arith.addi(block.slot, number)
            with loop(index(0), block.rows, index(lanes)) as rows:
                at = rows.induction_variable
                sums = [vector.load(vec, each, [number, at]) for each in block.sums]
                left, row = arith.subi(block.rows, at), arith.addi(block.row, at)
                value = hidden(self.activation, sums[0], sums[1] if len(sums) > 1 else None)
                store(narrowed(value, self.kind), self.out, [target, row], left)
                if self.keep:
                    self._keep([narrowed(each, self.kind) for each in sums], target, row, left)

    def _keep(self, sums: list[ir.Value], target: ir.Value, row: ir.Value, left: ir.Value) -> None:
        """The sums as they lie in the rows of the weight."""
        if self.layout != "interleaved":
            for number, each in enumerate(sums):
                at = arith.addi(row, self.size) if number else row
                store(each, self.kept, [target, at], left)
            return
        lanes, both = self.product.lanes, arith.muli(left, index(2))
        for half, each in enumerate(interleaved(sums[0], sums[1], 1)):
            at = arith.addi(arith.muli(row, index(2)), index(half * lanes))
            begun = index(half * lanes)
            store(each, self.kept, [target, at], arith.subi(arith.maxui(both, begun), begun))
