"""The body of a chain's attention stage that multiplies pairs of bf16, one pair in each lane, and sums them in f32.

    for each head:   scores[j][t] = scale * sum over pairs of d of k[d, d + 1][j] . q[d, d + 1][t] + mask
                     weights[j, j + 1][t] = exp(scores - max), rounded, total
                     y[d][t] = sum over pairs of j of v[d][j, j + 1] . weights[j, j + 1][t] / total

Queries and keys are lines of pairs of features (bf16_pairs.py). Weights are lines of pairs of keys. Values are rows of tokens,
of which two are a pair. Weights overwrite the scores of keys that are done.
"""

from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.passes.chains.attention_stage import Attention
from gossamer.passes.codegen.coarse_math import coarse_exp_below_zero
from gossamer.passes.loops.vectors import index, loop, vector_of
from gossamer.passes.weights_bf16.bf16_pairs import LINE, store_line


class AttentionInPairs(Attention):
    """`weights` is the memory of the scores as [keys][2 x tokens] of bf16."""

    together: ClassVar[int] = 2

    def _exponentiate(self, highest: list[ir.Value]) -> list[ir.Value]:
        # If the number of keys is odd, the score behind the last one is minus infinity.
        with loop(index(0), self.keys, index(2), [self.start] * self.frame.vectors) as js:
            key = js.induction_variable
            even, odd = (self._powers(k, highest) for k in (key, arith.addi(key, index(1))))
            store_line(even, odd, self.weights, self._in_elements(key))
            both = [arith.addf(a, b) for a, b in zip(even, odd, strict=True)]
            scf.YieldOp([arith.addf(total, more) for total, more in zip(js.inner_iter_args, both, strict=True)])
        return list(js.results)

    def _power(self, score: ir.Value, highest: ir.Value) -> ir.Value:
        return coarse_exp_below_zero(arith.subf(score, highest))

    def _vectors(self, buffer: ir.Value, row: ir.Value) -> list[ir.Value]:
        line = vector_of(LINE, ir.BF16Type.get())
        return [vector.load(line, buffer, [row, index(v * LINE)]) for v in self.vectors]

    def _plus_product(self, total: ir.Value, scalar: ir.Value, given: ir.Value) -> ir.Value:
        return x86.DotBF16Op(total, scalar, given).result

    def _seen(self, weight: ir.Value) -> ir.Value:
        bits = vector_of(LINE, ir.IntegerType.get_signless(16))
        nothing, magnitude = (
            arith.constant(bits, ir.DenseElementsAttr.get_splat(bits, ir.IntegerAttr.get(bits.element_type, value)))
            for value in (0, 0x7FFF)
        )
        return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(vector.bitcast(bits, weight), magnitude), nothing)

    def _scalar(self, at: ir.Value) -> ir.Value:
        pair = memref.load(self.sequence.memory, [at])
        lanes = vector_of(self.frame.lanes, ir.IntegerType.get_signless(32))
        return vector.bitcast(vector_of(LINE, ir.BF16Type.get()), vector.broadcast(lanes, pair))
