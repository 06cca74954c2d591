"""lower-routed-sum: lowers a `kernel.routed_sum` to the loops of expert_product.py. Their sums are added up for each token.

before   %y = "kernel.routed_sum"(%hidden, %weight, %scales, %bias, %positions, %order, %scores) {top = 8, ...}
after    y[:, the rows of a thread] = 0
         … y[token, rows] += score * the sums of a block

Each row of the result belongs to one thread. So a token's sum is added up in the order of the experts, whatever the number of
threads. Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.expert_product import Block, ExpertProduct, Machine, store
from gossamer.passes.loops.buffers import buffer_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, loop, mask_of, zeros


@dataclass(frozen=True)
class LowerRoutedSum(Machine):
    """Its options are those of `Machine`."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.routed_sum"):
            with op.location:
                _lower(module, ExpertProduct(op.opview, self, "hidden", in_order=True))


def _lower(module: ir.Module, product: ExpertProduct) -> None:
    out, scores, vec, lanes = product.storage.output, buffer_of(product.op.scores), product.vec, product.lanes

    def begin(low: ir.Value, high: ir.Value) -> None:
        with loop(index(0), memref.dim(out, index(0)), index(1)) as tokens, loop(low, high, index(lanes)) as rows:
            at = rows.induction_variable
            store(zeros(vec), out, [tokens.induction_variable, at], arith.subi(high, at))

    def finish(block: Block) -> None:
        with loop(index(0), block.slots, index(1)) as slots:
            number = slots.induction_variable
            slot = product.slot(arith.addi(block.slot, number))
            score, token = vector.broadcast(vec, memref.load(scores, [slot])), product.token(slot)
            with loop(index(0), block.rows, index(lanes)) as rows:
                at = rows.induction_variable
                place, left = [token, arith.addi(block.row, at)], arith.subi(block.rows, at)
                before = vector.maskedload(vec, out, place, mask_of(lanes, left), zeros(vec))
                store(vector.fma(score, vector.load(vec, block.sums[0], [number, at]), before), out, place, left)

    with ir.InsertionPoint(product.op):
        rows, first = memref.dim(out, index(1)), index(0)
    product.lower(module, rows, [first], finish, begin)
