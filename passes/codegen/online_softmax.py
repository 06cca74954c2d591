"""Online softmax: one pass over the scores, which scales the sums so far whenever a larger score comes.

for each block of scores, iter_args(largest, totals)
  now = the largest of them and `largest`
  shrunk = exp(largest - now)                              // also for the sums of values so far
  totals = totals * shrunk + the sum of exp(score - now)
the sums of values / totals

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, math, scf

from gossamer.passes.codegen.expand_math import exp_below_zero
from gossamer.passes.loops.vectors import index, loop, lowest_of, splat_of, zeros


@dataclass(frozen=True)
class Running:
    """The largest scores so far, and the totals of exp(score - largest). Lanes are queries, or heads."""

    largest: list[ir.Value]
    totals: list[ir.Value]

    def shrunk(self, now: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the factors of all sums so far, if `now` are the largest scores from now on."""
        return [power(before, top) for before, top in zip(self.largest, now, strict=True)]


def along(
    begin: ir.Value, end: ir.Value, step: int, vec: ir.VectorType, count: int, block: Callable[[ir.Value, Running], Running]
) -> Running:
    """Emits a loop over all scores of `count` vectors. Returns the state after them.

    block(first, before) returns the state after `step` more scores from `first` on.
    """
    with loop(begin, end, index(step), [*lowest(vec, count), *[zeros(vec)] * count]) as blocks:
        carried = list(blocks.inner_iter_args)
        after = block(blocks.induction_variable, Running(carried[:count], carried[count:]))
        scf.YieldOp([*after.largest, *after.totals])
    return Running(list(blocks.results)[:count], list(blocks.results)[count:])


def lowest(vec: ir.VectorType, count: int) -> list[ir.Value]:
    """Returns the largest scores before the first one, as `count` vectors."""
    return [splat_of(vec, lowest_of(vec.element_type))] * count


def larger(score: ir.Value, before: ir.Value) -> ir.Value:
    """Returns the larger of a score and the largest before, in one instruction.

    It ignores a score that is NaN. But the power of that score, and so the total, is NaN.
    """
    return arith.select(arith.cmpf(arith.CmpFPredicate.OGT, score, before), score, before)


def power(score: ir.Value, largest: ir.Value) -> ir.Value:
    """Returns exp(score - largest). Tiny results are 0, so that they take no longer than others."""
    x = arith.subf(score, largest)
    return exp_below_zero(x) if isinstance(ir.VectorType(x.type).element_type, ir.F32Type) else math.exp(x)


def inverse(totals: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns 1 / totals, and 0 if all scores are hidden."""
    one, none = (splat_of(ir.VectorType(totals[0].type), value) for value in (1.0, 0.0))
    some = [arith.cmpf(arith.CmpFPredicate.UNE, total, none) for total in totals]
    return [arith.select(each, arith.divf(one, total), none) for each, total in zip(some, totals, strict=True)]
