"""Dot products of bytes and of words, as the loops of quantized products use them."""

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, vector

from gossamer.passes.loops.vectors import vector_of

_DOT = {512: "avx512.vpdpbusd.512", 256: "avx512.vpdpbusd.256", 128: "avx512.vpdpbusd.128"}
_PAIRS = {512: "avx512.pmaddw.d.512", 256: "avx2.pmadd.wd", 128: "sse2.pmadd.wd"}


def multiplied(sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """sums[i] + the dot product of x[4 i .. 4 i + 3], u8, and weights[4 i .. 4 i + 3], s8; exact but for wrapping around."""
    return _called(_DOT, ir.VectorType(sums.type), sums, x, weights)


def multiplied_words(sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """sums[i] + x[2 i] weights[2 i] + x[2 i + 1] weights[2 i + 1], words."""
    return arith.addi(sums, _called(_PAIRS, ir.VectorType(sums.type), x, weights))


def in_all_lanes(values: ir.Value, lanes: int) -> list[ir.Value]:
    """Each 32 bits of the values, repeated in all of so many lanes."""
    i32, given = ir.IntegerType.get_signless(32), ir.VectorType(values.type)
    width = 32 // ir.IntegerType(given.element_type).width
    words, line = vector.bitcast(vector_of(given.shape[0] // width, i32), values), vector_of(width * lanes, given.element_type)
    repeated = (vector.broadcast(vector_of(lanes, i32), vector.extract(words, [], [i])) for i in range(given.shape[0] // width))
    return [vector.bitcast(line, each) for each in repeated]


def plus_128(values: ir.Value) -> ir.Value:
    """Bytes with 128 added: from -128..127 to what reads, without a sign, as 0..255."""
    type_ = ir.VectorType(values.type)
    return arith.xori(values, splat_of_bytes(type_.shape[0], -128))


def splat_of_bytes(count: int, value: int) -> ir.Value:
    """A vector of one byte everywhere."""
    type_ = vector_of(count, ir.IntegerType.get_signless(8))
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(type_.element_type, value)))


def _called(names: dict[int, str], result: ir.VectorType, *operands: ir.Value) -> ir.Value:
    name = names[32 * result.shape[0]]
    return llvm.call_intrinsic(result, f"llvm.x86.{name}", list(operands), [], [])
