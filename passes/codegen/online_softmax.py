"""Softmax that goes along with its scores: what is known is scaled when a larger score comes.

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
    """The largest scores so far, and the totals of exp(score - largest): vectors of queries, or of heads."""

    largest: list[ir.Value]
    totals: list[ir.Value]

    def shrunk(self, now: Sequence[ir.Value]) -> list[ir.Value]:
        """What is known has to be multiplied by it where the largest scores are these now."""
        return [power(before, top) for before, top in zip(self.largest, now, strict=True)]


def along(
    begin: ir.Value, end: ir.Value, step: int, vec: ir.VectorType, count: int, block: Callable[[ir.Value, Running], Running]
) -> Running:
    """The state of `count` vectors after all scores; block(first, before) is the state after `step` more from `first` on."""
    with loop(begin, end, index(step), [*lowest(vec, count), *[zeros(vec)] * count]) as blocks:
        carried = list(blocks.inner_iter_args)
        after = block(blocks.induction_variable, Running(carried[:count], carried[count:]))
        scf.YieldOp([*after.largest, *after.totals])
    return Running(list(blocks.results)[:count], list(blocks.results)[count:])


def lowest(vec: ir.VectorType, count: int) -> list[ir.Value]:
    """The largest of no scores, as so many vectors."""
    return [splat_of(vec, lowest_of(vec.element_type))] * count


def larger(score: ir.Value, before: ir.Value) -> ir.Value:
    """In one instruction. A score that is NaN is left out here; its power, and with it the total, is NaN."""
    return arith.select(arith.cmpf(arith.CmpFPredicate.OGT, score, before), score, before)


def power(score: ir.Value, largest: ir.Value) -> ir.Value:
    """exp(score - largest): where it is next to nothing, 0, in as little time as elsewhere."""
    x = arith.subf(score, largest)
    return exp_below_zero(x) if isinstance(ir.VectorType(x.type).element_type, ir.F32Type) else math.exp(x)


def inverse(totals: Sequence[ir.Value]) -> list[ir.Value]:
    """1 / totals, and 0 where all scores are hidden."""
    one, none = (splat_of(ir.VectorType(totals[0].type), value) for value in (1.0, 0.0))
    some = [arith.cmpf(arith.CmpFPredicate.UNE, total, none) for total in totals]
    return [arith.select(each, arith.divf(one, total), none) for each, total in zip(some, totals, strict=True)]
