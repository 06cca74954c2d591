"""Converts values to LLVM's types and back, for outlined functions and the entry point."""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm


def llvm_type(type_: ir.Type) -> ir.Type:
    """Returns the LLVM type of a memref (its descriptor), an index, or a scalar."""
    if isinstance(type_, ir.MemRefType):
        rank = ir.MemRefType(type_).rank
        arrays = f", array<{rank} x i64>, array<{rank} x i64>" if rank else ""
        return ir.Type.parse(f"!llvm.struct<(ptr, ptr, i64{arrays})>")
    return ir.IntegerType.get_signless(64) if isinstance(type_, ir.IndexType) else type_


def to_llvm(value: ir.Value) -> ir.Value:
    """Converts a value to its LLVM type."""
    return _cast(value, llvm_type(value.type))


def from_llvm(value: ir.Value, type_: ir.Type) -> ir.Value:
    """Converts a value of an LLVM type back to `type_`."""
    return _cast(value, type_)


def _cast(value: ir.Value, type_: ir.Type) -> ir.Value:
    if value.type == type_:
        return value
    return ir.Operation.create("builtin.unrealized_conversion_cast", results=[type_], operands=[value]).results[0]


def insert(container: ir.Value, value: ir.Value, *position: int) -> ir.Value:
    """Returns `container` with `value` at a position (llvm.insertvalue)."""
    return llvm.insertvalue(container, value, list(position))


def memory_at(address: ir.Value, type_: ir.Type, sizes: Sequence[ir.Value] = ()) -> ir.Value:
    """Returns a contiguous memref of a type at an address (!llvm.ptr), with its dynamic sizes (i64)."""
    memory, remaining = ir.MemRefType(type_), iter(sizes)
    shape = [next(remaining) if memory.is_dynamic_dim(d) else i64(memory.shape[d]) for d in range(memory.rank)]
    descriptor = llvm.mlir_undef(llvm_type(type_))
    for position in (0, 1):
        descriptor = insert(descriptor, address, position)
    descriptor = insert(descriptor, i64(0), 2)
    stride = i64(1)
    for d in reversed(range(memory.rank)):
        descriptor = insert(descriptor, shape[d], 3, d)
        descriptor = insert(descriptor, stride, 4, d)
        stride = arith.muli(stride, shape[d])
    return from_llvm(descriptor, type_)


def struct_of(types: Sequence[ir.Type]) -> ir.Type:
    """Returns an LLVM struct of the LLVM types of `types`."""
    return ir.Type.parse(f"!llvm.struct<({', '.join(str(llvm_type(t)) for t in types)})>")


def i64(value: int) -> ir.Value:
    """Returns an i64 constant."""
    return arith.constant(ir.IntegerType.get_signless(64), value)
