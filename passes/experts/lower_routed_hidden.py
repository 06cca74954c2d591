"""lower-routed-hidden: lowers a `kernel.routed_hidden` to the loops of expert_product.py and the activation of their sums.

before   %h, %kept = "kernel.routed_hidden"(%x, %weight, %scales, %bias, %positions, %order) {activation = "silu", ...}
after    … the sums of a block's rows of gates, and of those of up
         hidden[n, rows] = gates / (1 + exp(-gates)) * up

Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.activations import hidden
from gossamer.passes.experts.expert_product import Block, ExpertProduct, Machine, store
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import deinterleaved, index, loop, narrowed, vector_of


@dataclass(frozen=True)
class LowerRoutedHidden(Machine):
    """Its options are those of `Machine`."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.routed_hidden"):
            with op.location:
                _Hidden(op.opview, self).lower(module)


class _Hidden:
    def __init__(self, op: Any, machine: Machine) -> None:
        self.product = ExpertProduct(op, machine, "x")
        self.activation, self.layout = (ir.StringAttr(a).value for a in (op.activation, op.layout))
        self.keep = ir.IntegerAttr(op.keep).value
        self.out, self.kept = self.product.storage.outputs
        self.kind = vector_of(self.product.lanes, ir.MemRefType(self.out.type).element_type)

    def lower(self, module: ir.Module) -> None:
        with ir.InsertionPoint(self.product.op):
            self.size, first = memref.dim(self.out, index(1)), index(0)
            rows = arith.muli(self.size, index(2)) if self.layout == "interleaved" else self.size
            streams = [first, self.size] if self.layout == "halves" else [first]
        self.product.lower(module, rows, streams, self._finish)

    def _finish(self, block: Block) -> None:
        step = index(self.product.lanes * (2 if self.layout == "interleaved" else 1))
        with loop(index(0), block.slots, index(1)) as slots, loop(index(0), block.rows, step) as rows:
            number, at = slots.induction_variable, rows.induction_variable
            slot, row, left = arith.addi(block.slot, number), arith.addi(block.row, at), arith.subi(block.rows, at)
            if self.layout == "interleaved":
                self._in_turns(block.sums[0], [number, at], slot, row, left)
                return
            sums = [vector.load(self.product.vec, each, [number, at]) for each in block.sums]
            self._store(sums, slot, row, left)
            for half, each in enumerate(sums if self.keep else ()):
                place = arith.addi(row, self.size) if half else row
                store(narrowed(each, self.kind), self.kept, [slot, place], left)

    def _in_turns(self, sums: ir.Value, at: list[ir.Value], slot: ir.Value, row: ir.Value, left: ir.Value) -> None:
        """Finishes a vector of slots whose sums of gates and ups are interleaved."""
        lanes, half = self.product.lanes, index(2)
        both = [vector.load(self.product.vec, sums, [at[0], arith.addi(at[1], index(n * lanes))]) for n in (0, 1)]
        self._store(deinterleaved(both[0], both[1]), slot, arith.divui(row, half), arith.divui(left, half))
        for n, each in enumerate(both if self.keep else ()):
            begun = index(n * lanes)
            own = arith.subi(arith.maxui(left, begun), begun)
            store(narrowed(each, self.kind), self.kept, [slot, arith.addi(row, begun)], own)

    def _store(self, sums: Sequence[ir.Value], slot: ir.Value, row: ir.Value, left: ir.Value) -> None:
        value = hidden(self.activation, sums[0], sums[1] if len(sums) > 1 else None)
        store(narrowed(value, self.kind), self.out, [slot, row], left)
