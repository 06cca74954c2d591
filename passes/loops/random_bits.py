"""Emits the random numbers of dialects/philox.py in vectors."""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.dialects.philox import MULTIPLIER, philox, threshold
from gossamer.passes.loops.vectors import vector_of


def random_bits(counter: ir.Value, key: ir.Value) -> ir.Value:
    """Returns 32 random bits for each lane, for a vector of counters (i64) and one key (i32)."""
    lanes = ir.VectorType(counter.type).shape[0]
    i32 = ir.IntegerType.get_signless(32)
    words, wide = vector_of(lanes, i32), counter.type
    left = arith.trunci(words, counter)
    right = arith.trunci(words, arith.shrui(counter, _splat(wide, 32)))

    def multiplied(word: ir.Value) -> tuple[ir.Value, ir.Value]:
        product = arith.muli(arith.extui(wide, word), _splat(wide, MULTIPLIER))
        return arith.trunci(words, arith.shrui(product, _splat(wide, 32))), arith.trunci(words, product)

    def keyed(number: int) -> ir.Value:
        return vector.broadcast(words, arith.addi(key, _constant(i32, number)))

    return philox(left, right, multiplied, keyed, arith.xori)


def at_least(bits: ir.Value, share: float) -> ir.Value:
    """Whether random bits, as numbers in [0, 1), are at least `share`."""
    return arith.cmpi(arith.CmpIPredicate.uge, bits, _splat(bits.type, threshold(share)))


def constants(type_: ir.VectorType, values: Sequence[int]) -> ir.Value:
    """Returns a constant vector of integers."""
    elements = [ir.IntegerAttr.get(type_.element_type, value) for value in values]
    return arith.constant(type_, ir.DenseElementsAttr.get(elements, type_))


def _splat(type_: ir.VectorType, value: int) -> ir.Value:
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, _attribute(type_.element_type, value)))


def _constant(type_: ir.Type, value: int) -> ir.Value:
    return arith.constant(type_, _attribute(type_, value))


def _attribute(type_: ir.Type, value: int) -> ir.IntegerAttr:
    width = ir.IntegerType(type_).width
    value &= (1 << width) - 1
    return ir.IntegerAttr.get(type_, value - (1 << width) if value >> (width - 1) else value)
