"""Dot products of bytes and of words, for the loops of quantized products."""

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, vector

from gossamer.passes.loops.vectors import vector_of

_DOT = {512: "avx512.vpdpbusd.512", 256: "avx512.vpdpbusd.256", 128: "avx512.vpdpbusd.128"}
_PAIRS = {512: "avx512.pmaddw.d.512", 256: "avx2.pmadd.wd", 128: "sse2.pmadd.wd"}


def are_signed(lanes: int) -> bool:
    """Whether a target with `lanes` sums in a vector multiplies signed bytes of x, as NEON does. AVX takes them as 0..255."""
    return lanes == 4


def as_multiplied(x: ir.Value, lanes: int) -> ir.Value:
    """Returns bytes of x in the form that the target multiplies."""
    return x if are_signed(lanes) else plus_128(x)


def multiplied(sums: ir.Value, x: ir.Value, weights: ir.Value, signed: bool = False) -> ir.Value:
    """Returns sums[i] + the dot product of x[4 i .. 4 i + 3], u8 or `signed`, and weights[4 i .. 4 i + 3], s8. It is exact
    unless it wraps around."""
    type_ = ir.VectorType(sums.type)
    if not signed:
        return _called(f"x86.{_DOT[32 * type_.shape[0]]}", type_, sums, x, weights)
    return _called(f"aarch64.neon.sdot.v{type_.shape[0]}i32.v{4 * type_.shape[0]}i8", type_, sums, x, weights)


def multiplied_words(sums: ir.Value, x: ir.Value, weights: ir.Value, lanes: int) -> ir.Value:
    """Returns sums[i] + x[2 i] weights[2 i] + x[2 i + 1] weights[2 i + 1] for words, with `lanes` sums in a vector."""
    type_ = ir.VectorType(sums.type)
    if not are_signed(lanes):
        return arith.addi(sums, _called(f"x86.{_PAIRS[32 * type_.shape[0]]}", type_, x, weights))
    wide = vector_of(2 * type_.shape[0], type_.element_type)
    products = arith.muli(arith.extsi(wide, x), arith.extsi(wide, weights))
    halves = (vector.shuffle(products, products, list(range(half, wide.shape[0], 2))) for half in (0, 1))
    return arith.addi(sums, arith.addi(*halves))


def in_all_lanes(values: ir.Value, lanes: int) -> list[ir.Value]:
    """Returns for each 32 bits of the values a vector that repeats them in all `lanes` lanes."""
    i32, given = ir.IntegerType.get_signless(32), ir.VectorType(values.type)
    width = 32 // ir.IntegerType(given.element_type).width
    words, line = vector.bitcast(vector_of(given.shape[0] // width, i32), values), vector_of(width * lanes, given.element_type)
    repeated = (vector.broadcast(vector_of(lanes, i32), vector.extract(words, [], [i])) for i in range(given.shape[0] // width))
    return [vector.bitcast(line, each) for each in repeated]


def plus_128(values: ir.Value) -> ir.Value:
    """Adds 128 to bytes: -128..127 becomes 0..255, read as unsigned."""
    type_ = ir.VectorType(values.type)
    return arith.xori(values, splat_of_bytes(type_.shape[0], -128))


def splat_of_bytes(count: int, value: int) -> ir.Value:
    """Returns a vector with the same byte in all lanes."""
    type_ = vector_of(count, ir.IntegerType.get_signless(8))
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(type_.element_type, value)))


def _called(name: str, result: ir.VectorType, *operands: ir.Value) -> ir.Value:
    return llvm.call_intrinsic(result, f"llvm.{name}", list(operands), [], [])
