"""The base of the innermost loops of products with tokens in the lanes: what they read, and several sets of sums.

A multiply-add takes four cycles. So if only few sums are in registers, a loop has several sets of them. Nonzeros take turns
with the sets, which are added up in the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.loops.buffers import WeightArrays
from gossamer.passes.loops.vectors import index, load_index, loop, widened, zeros


@dataclass(frozen=True)
class InnerLoop(WeightArrays):
    """The base of inner loops: the arrays of a `weight`, and `packed`, which is x as [K][`vectors` of type `vec`]."""

    weight: tuple[ir.Value, ...]
    packed: ir.Value
    vec: ir.VectorType
    vectors: int

    def entries(self, at: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns positions[at] and positions[at + 1]."""
        begin = load_index(self.positions, at)
        return begin, load_index(self.positions, arith.addi(at, index(1)))

    def x(self, k: ir.Value) -> Iterator[ir.Value]:
        """Yields the vectors of column k of x. Each is loaded when it is asked for."""
        return (vector.load(self.vec, self.packed, [k, index(v * self.vec.shape[0])]) for v in range(self.vectors))

    def value(self, p: ir.Value) -> ir.Value:
        """Returns values[p] in all lanes."""
        return vector.broadcast(self.vec, widened(memref.load(self.values, [p]), self.vec.element_type))


def sets_of(sums: list[ir.Value], ways: int) -> list[ir.Value]:
    """Returns `ways` sets of sums, which are vectors or scalars: these, then zeros."""
    return sums + [_zero(sums[0].type)] * (len(sums) * (ways - 1))


def _zero(type_: ir.Type) -> ir.Value:
    if isinstance(type_, ir.VectorType):
        return zeros(type_)
    return arith.constant(type_, 0 if isinstance(type_, ir.IntegerType) else 0.0)


def added_up(sets: list[ir.Value], count: int) -> list[ir.Value]:
    """Adds up sets of `count` sums each. Returns one set."""
    total, *others = (sets[at : at + count] for at in range(0, len(sets), count))
    for other in others:
        total = [_add(a, b) for a, b in zip(total, other, strict=True)]
    return total


def _add(a: ir.Value, b: ir.Value) -> ir.Value:
    element = a.type.element_type if isinstance(a.type, ir.VectorType) else a.type
    whole = isinstance(element, ir.IntegerType)
    return arith.addi(a, b) if whole else arith.addf(a, b)


def add_in_turns(
    begin: ir.Value,
    end: ir.Value,
    ways: int,
    least: int,
    sums: list[ir.Value],
    add: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Emits sums = add(p, sums) for begin <= p < end. Returns the sums.

    If there are at least `least` numbers p, it takes `ways` of them at a time, each with its own set of sums. For fewer, the
    second loop over the remainder would cost more than this gains.
    """
    number, width = arith.subi(end, begin), len(sums)
    many = arith.cmpi(arith.CmpIPredicate.uge, number, index(least))
    in_groups = arith.select(many, arith.subi(number, arith.remui(number, index(ways))), index(0))
    middle = arith.addi(begin, in_groups)
    with loop(begin, middle, index(ways), sets_of(sums, ways)) as groups:
        totals = list(groups.inner_iter_args)
        for way in range(ways):
            at, mine = arith.addi(groups.induction_variable, index(way)), slice(way * width, (way + 1) * width)
            totals[mine] = add(at, totals[mine])
        scf.YieldOp(totals)
    first, others = list(groups.results)[:width], list(groups.results)[width:]
    with loop(middle, end, index(1), first) as rest:
        scf.YieldOp(add(rest.induction_variable, list(rest.inner_iter_args)))
    return added_up([*rest.results, *others], width)
