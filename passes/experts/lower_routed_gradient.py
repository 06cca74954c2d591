"""lower-routed-gradient: lowers a `kernel.routed_gradient` to the loops of expert_product.py and the activation's derivative.

before   %sums, %weighted, %shares = "kernel.routed_gradient"(%x, %weight, ..., %scores, %kept) {activation = "silu", ...}
after    … the sums g of a block, and the kept gates and ups of its slots
         weighted[n, rows] = score * h; shares[n, rows / 16] = the sum of g * h
         sums[n, rows] = score * g * the derivative of h by gates and by ups

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.activations import with_slopes
from gossamer.passes.experts.expert_product import UNIT, Block, ExpertProduct, Machine, store
from gossamer.passes.loops.buffers import buffer_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import (
    deinterleaved,
    index,
    interleaved,
    loop,
    mask_of,
    narrowed,
    sums_across,
    vector_of,
    widened,
    zeros,
)


@dataclass(frozen=True)
class LowerRoutedGradient(Machine):
    """Its options are those of `Machine`."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.routed_gradient"):
            with op.location:
                _Gradient(op.opview, self).lower(module)


class _Gradient:
    def __init__(self, op: Any, machine: Machine) -> None:
        self.product = ExpertProduct(op, machine, "x")
        self.activation, self.layout = (ir.StringAttr(a).value for a in (op.activation, op.layout))
        self.kept, self.scores = buffer_of(op.kept), buffer_of(op.scores)
        self.sums, self.weighted, self.shares = self.product.storage.outputs
        self.lanes, self.vec = self.product.lanes, self.product.vec
        self.kind = vector_of(self.lanes, ir.MemRefType(self.sums.type).element_type)

    def lower(self, module: ir.Module) -> None:
        with ir.InsertionPoint(self.product.op):
            self.size, first = memref.dim(self.weighted, index(1)), index(0)
        self.product.lower(module, self.size, [first], self._finish)

    def _finish(self, block: Block) -> None:
        with loop(index(0), block.slots, index(1)) as slots:
            number = slots.induction_variable
            slot = arith.addi(block.slot, number)
            score = vector.broadcast(self.vec, memref.load(self.scores, [self.product.slot(slot)]))
            with loop(index(0), block.rows, index(UNIT)) as units:
                at, share = units.induction_variable, zeros(self.vec)
                for part in range(0, UNIT, self.lanes):
                    place = arith.addi(at, index(part))
                    left = arith.subi(arith.maxui(block.rows, place), place)
                    back = vector.load(self.vec, block.sums[0], [number, place])
                    row = arith.addi(block.row, place)
                    share = arith.addf(share, self._back(back, score, slot, row, left))
                total = vector.extract(sums_across([share]), [], [0])
                memref.store(total, self.shares, [slot, arith.divui(arith.addi(block.row, at), index(UNIT))])

    def _back(self, back: ir.Value, score: ir.Value, slot: ir.Value, row: ir.Value, left: ir.Value) -> ir.Value:
        """Stores the results for a vector of rows. Returns the products g * h of these rows."""
        gate, up = self._load(slot, row, left)
        value, *slopes = with_slopes(self.activation, gate, up)
        store(narrowed(arith.mulf(value, score), self.kind), self.weighted, [slot, row], left)
        scored = arith.mulf(back, score)
        self._store([arith.mulf(scored, slope) for slope in slopes if slope is not None], slot, row, left)
        return arith.select(mask_of(self.lanes, left), arith.mulf(back, value), zeros(self.vec))

    def _load(self, slot: ir.Value, row: ir.Value, left: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Loads the kept gates and ups."""
        if self.layout == "up":
            return self._read(slot, row, left), None
        if self.layout == "halves":
            return self._read(slot, row, left), self._read(slot, arith.addi(row, self.size), left)
        first, twice = arith.muli(row, index(2)), arith.muli(left, index(2))
        both = [self._read(slot, arith.addi(first, n), self._more(twice, n)) for n in self._halves()]
        return deinterleaved(both[0], both[1])

    def _read(self, slot: ir.Value, row: ir.Value, left: ir.Value) -> ir.Value:
        found = vector.maskedload(self.kind, self.kept, [slot, row], mask_of(self.lanes, left), zeros(self.kind))
        return widened(found, self.vec)

    def _store(self, gradients: list[ir.Value], slot: ir.Value, row: ir.Value, left: ir.Value) -> None:
        if self.layout != "interleaved":
            for number, each in enumerate(gradients):
                store(narrowed(each, self.kind), self.sums, [slot, arith.addi(row, self.size) if number else row], left)
            return
        first, twice = arith.muli(row, index(2)), arith.muli(left, index(2))
        for n, each in zip(self._halves(), interleaved(gradients[0], gradients[1], 1), strict=True):
            store(narrowed(each, self.kind), self.sums, [slot, arith.addi(first, n)], self._more(twice, n))

    def _halves(self) -> list[ir.Value]:
        """Returns the places of the two vectors of interleaved gates and ups."""
        return [index(0), index(self.lanes)]

    @staticmethod
    def _more(left: ir.Value, begun: ir.Value) -> ir.Value:
        """Returns how many are left from a place on."""
        return arith.subi(arith.maxui(left, begun), begun)
