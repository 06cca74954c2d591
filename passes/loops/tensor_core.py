"""Tensor cores: asynchronous copies into shared memory, fragments of matrices, and their products.

A product of fragments is d[16 x 8] += a[16 x 16] b[16 x 8] of bf16 or f16, summed in f32, by the 32 lanes of a warp. Lane l
holds, with g = l / 4 and q = l % 4,
    a   rows g and g + 8, columns 2q, 2q + 1, 2q + 8, 2q + 9
    b   rows 2q, 2q + 1, 2q + 8, 2q + 9, column g
    d   rows g and g + 8, columns 2q, 2q + 1
Of int8, summed in i32, a is 16 x 32 and b 32 x 8: four elements take the place of two neighbours.
"""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, nvgpu, nvvm, vector

from gossamer.passes.loops.vectors import byte_width, index

CHUNK = 8  # elements of 16 bits in the 16 bytes that a thread copies at once, and in a row of a matrix of ldmatrix


def copy_async(
    source: ir.Value,
    at: Sequence[ir.Value],
    to: ir.Value,
    place: Sequence[ir.Value],
    exists: ir.Value | None = None,
    size: int = 16,
) -> None:
    """Start to copy 16, 8 or 4 bytes from global to shared memory; zeros where `exists` is false, then nothing is read."""
    count = size // byte_width(ir.MemRefType(source.type).element_type)
    elements = None if exists is None else arith.select(exists, index(count), index(0))
    nvgpu.device_async_copy(to, place, source, at, count, src_elements=elements, bypass_l1=size == 16)


def commit() -> None:
    """What was copied since the last commit is a group."""
    nvvm.cp_async_commit_group()


def wait(groups: int) -> None:
    """Wait until all but the last `groups` groups of this thread have arrived."""
    nvvm.cp_async_wait_group(groups)


def load_matrices(memory: ir.Value, at: Sequence[ir.Value], transposed: bool = False) -> list[ir.Value]:
    """Four 8 x 8 matrices, or their transposes, from shared memory as fragments; lane l gives the address of row l % 8 of
    matrix l / 8. Of int8 a row has 16 elements."""
    element = ir.MemRefType(memory.type).element_type
    loaded = nvgpu.ldmatrix(ir.VectorType.get([4, 4 // byte_width(element)], element), memory, at, transposed, 4)
    return [vector.extract(loaded, [], [i]) for i in range(4)]


def multiply_add(a: Sequence[ir.Value], b: Sequence[ir.Value], sums: ir.Value) -> ir.Value:
    """sums + a b: four fragments of a (rows first), two of b, and a vector of four sums. Those of a may be words."""
    kind, a, b = _factors(a, b)
    total = ir.VectorType(sums.type).element_type
    exact = isinstance(total, ir.IntegerType)
    result = nvvm.mma_sync(
        ir.Type.parse(f"!llvm.struct<({', '.join([str(total)] * 4)})>"),
        ir.Attribute.parse(f"#nvvm.shape<m = 16, n = 8, k = {32 if exact else 16}>"),
        ir.Attribute.parse("#nvvm.mma_layout<row>"),
        ir.Attribute.parse("#nvvm.mma_layout<col>"),
        a,
        b,
        [vector.extract(sums, [], [i]) for i in range(4)],
        int_overflow_behavior=ir.Attribute.parse("#nvvm.mma_int_overflow<wrapped>") if exact else None,
        multiplicand_a_ptx_type=kind,
        multiplicand_b_ptx_type=kind,
    )
    return _sums(result, sums.type)


def multiply_add_sparse(
    a: Sequence[ir.Value], metadata: ir.Value, selector: int, b: Sequence[ir.Value], sums: ir.Value
) -> ir.Value:
    """sums + a b with a[16 x 32] of which 2 of every 4 neighbours are stored: as a[16 x 16], and where they are, in words.

    Four fragments of a (rows first) and of b[32 x 8]. `selector` says whose words count: 0 for lanes q = 0 and 1 of each g, 1
    for q = 2 and 3. Of a word, the low half is for row g, the high one for row g + 8; of columns 0 to 15 in even, 16 to 31 in
    odd lanes; two bits for each value, ascending in a group of four.
    """
    kind, a, b = _factors(a, b)
    result = nvvm.mma_sp_sync(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        ir.Attribute.parse("#nvvm.shape<m = 16, n = 8, k = 32>"),
        a,
        b,
        [vector.extract(sums, [], [i]) for i in range(4)],
        metadata,
        arith.constant(ir.IntegerType.get_signless(32), selector),
        multiplicand_a_ptx_type=kind,
        multiplicand_b_ptx_type=kind,
        ordered_metadata=True,
    )
    return _sums(result, sums.type)


def _factors(a: Sequence[ir.Value], b: Sequence[ir.Value]) -> tuple[ir.Attribute, Sequence[ir.Value], Sequence[ir.Value]]:
    """The type that instructions have for the elements, and the fragments of a and b as they take them."""
    element = ir.VectorType(b[0].type).element_type
    name = "s8" if isinstance(element, ir.IntegerType) else str(element)
    if not isinstance(element, ir.F16Type):
        a, b = [_word(v) for v in a], [_word(v) for v in b]
    return ir.Attribute.parse(f"#nvvm.mma_type<{name}>"), a, b


def _sums(result: ir.Value, type_: ir.VectorType) -> ir.Value:
    values = [llvm.extractvalue(type_.element_type, result, [i]) for i in range(4)]
    return vector.from_elements(type_, values)


def _word(fragment: ir.Value) -> ir.Value:
    """Two or four elements as the 32 bits that instructions for bf16 and int8 take."""
    i32 = ir.IntegerType.get_signless(32)
    if fragment.type == i32:
        return fragment
    return vector.extract(vector.bitcast(ir.VectorType.get([1], i32), fragment), [], [0])
