"""Builders for tensor cores: asynchronous copies into shared memory, fragments of matrices, and their products.

The 32 lanes of a warp compute a product of fragments, d[16 x 8] += a[16 x 16] b[16 x 8], of bf16 or f16, summed in f32. With
g = l / 4 and q = l % 4, lane l has
    a   rows g and g + 8, columns 2q, 2q + 1, 2q + 8, 2q + 9
    b   rows 2q, 2q + 1, 2q + 8, 2q + 9, column g
    d   rows g and g + 8, columns 2q, 2q + 1
For int8, summed in i32, a is 16 x 32 and b 32 x 8: each two neighbours above become four elements.
"""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, nvgpu, nvvm, vector

from gossamer.passes.loops.vectors import byte_width, index

CHUNK = 8  # elements of 16 bits in the 16 bytes that a thread copies at once, and in a row of an ldmatrix matrix


def copy_async(
    source: ir.Value,
    at: Sequence[ir.Value],
    to: ir.Value,
    place: Sequence[ir.Value],
    exists: ir.Value | None = None,
    size: int = 16,
) -> None:
    """Starts to copy 16, 8 or 4 bytes from global to shared memory. If `exists` is false, it writes zeros and reads nothing."""
    count = size // byte_width(ir.MemRefType(source.type).element_type)
    elements = None if exists is None else arith.select(exists, index(count), index(0))
    nvgpu.device_async_copy(to, place, source, at, count, src_elements=elements, bypass_l1=size == 16)


def commit() -> None:
    """Makes a group of the copies since the last commit."""
    nvvm.cp_async_commit_group()


def wait(groups: int) -> None:
    """Waits until all but the last `groups` groups of this thread have arrived."""
    nvvm.cp_async_wait_group(groups)


def load_matrices(memory: ir.Value, at: Sequence[ir.Value], transposed: bool = False) -> list[ir.Value]:
    """Loads four 8 x 8 matrices, or their transposes, from shared memory as fragments. Lane l gives the address of row l % 8 of
    matrix l / 8. A row of int8 has 16 elements."""
    element = ir.MemRefType(memory.type).element_type
    loaded = nvgpu.ldmatrix(ir.VectorType.get([4, 4 // byte_width(element)], element), memory, at, transposed, 4)
    return [vector.extract(loaded, [], [i]) for i in range(4)]


def multiply_add(a: Sequence[ir.Value], b: Sequence[ir.Value], sums: ir.Value) -> ir.Value:
    """Returns sums + a b, for four fragments of a (rows first), two of b, and a vector of four sums. Fragments of a may be i32
    words."""
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
    """Returns sums + a b for a sparse a[16 x 32]: 2 of every 4 neighbours are stored, as [16 x 16], with `metadata` words.

    There are four fragments of a (rows first) and of b[32 x 8]. `selector` says which lanes give the words: 0 for q = 0 and 1
    of each g, 1 for q = 2 and 3. The low half of a word is for row g, the high half for row g + 8. Even lanes have columns 0 to
    15, odd lanes columns 16 to 31. Each value has two bits for its place in its group of four, ascending.
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
    """Returns the instructions' type of the elements, and the fragments of a and b in the form that they take."""
    element = ir.VectorType(b[0].type).element_type
    name = "s8" if isinstance(element, ir.IntegerType) else str(element)
    if not isinstance(element, ir.F16Type):
        a, b = [_word(v) for v in a], [_word(v) for v in b]
    return ir.Attribute.parse(f"#nvvm.mma_type<{name}>"), a, b


def _sums(result: ir.Value, type_: ir.VectorType) -> ir.Value:
    values = [llvm.extractvalue(type_.element_type, result, [i]) for i in range(4)]
    return vector.from_elements(type_, values)


def _word(fragment: ir.Value) -> ir.Value:
    """Returns two or four elements as one i32, which instructions for bf16 and int8 take."""
    i32 = ir.IntegerType.get_signless(32)
    if fragment.type == i32:
        return fragment
    return vector.extract(vector.bitcast(ir.VectorType.get([1], i32), fragment), [], [0])
