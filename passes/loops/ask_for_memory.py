"""Lets a kernel ask its caller for memory while it runs, for results whose sizes only the kernel finds out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf

from gossamer.passes.loops.llvm_values import i64, memory_at, to_llvm
from gossamer.passes.loops.vectors import index

_DYNAMIC = ir.ShapedType.get_dynamic_size()


@contextmanager
def given(giver: ir.Value, sizes: Sequence[ir.Value]) -> Iterator[list[ir.Value]]:
    """Asks for memories (memref<?xi8>) of these sizes in bytes, and yields them.

    The code inside the `with` block only runs if all of them are given.

    giver  the address (index) of a function of the caller: (i64 bytes, ptr) → nothing. It writes the address of the memory to
           the ptr, or leaves the 0 there. (It returns nothing because a Python function that is interrupted returns garbage.)

    Only the thread that entered the kernel may ask. When the kernel returns, the memory belongs to the caller again.
    """
    pointer, word = ir.Type.parse("!llvm.ptr"), ir.IntegerType.get_signless(64)
    function = llvm.inttoptr(pointer, to_llvm(giver))
    place = llvm.alloca(pointer, i64(1), ir.TypeAttr.get(word))
    addresses, there = [], arith.constant(ir.IntegerType.get_signless(1), 1)
    for size in sizes:
        llvm.store(i64(0), place)
        llvm.CallOp(None, [function, to_llvm(size), place], [], [])
        addresses.append(llvm.load(word, place))
        there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.ne, addresses[-1], i64(0)))
    with ir.InsertionPoint(scf.IfOp(there).then_block):
        bytes_ = ir.MemRefType.get([_DYNAMIC], ir.IntegerType.get_signless(8))
        yield [
            memory_at(llvm.inttoptr(pointer, address), bytes_, [to_llvm(size)])
            for address, size in zip(addresses, sizes, strict=True)
        ]
        scf.YieldOp([])


def array_in(memory: ir.Value, element: ir.Type, size: ir.Value, offset: ir.Value | None = None) -> ir.Value:
    """Returns an array of `size` elements in a memory, from byte `offset` on."""
    type_ = ir.MemRefType.get([_DYNAMIC], element)
    return memref.view(type_, memory, index(0) if offset is None else offset, [size])
