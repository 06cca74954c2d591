"""MLIR to the text of LLVM IR: the same as torch-mlir's binding gives, and no copy of it stays in memory."""

import ctypes

import pytest
from torch_mlir import ir
from torch_mlir.dialects import llvm

from gossamer.passes.framework.context import context
from gossamer.passes.framework.translate import translate_to_llvm_ir

STORES = 10_000


class _Heap(ctypes.Structure):
    """What glibc says of its heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost"]
    ]


def allocated() -> int:
    """Bytes that are allocated now."""
    glibc = ctypes.CDLL(None)
    if not hasattr(glibc, "mallinfo2"):
        pytest.skip("only glibc tells what is allocated")
    glibc.mallinfo2.restype = _Heap
    heap = glibc.mallinfo2()
    return int(heap.used + heap.hblkhd)


def module() -> ir.Module:
    """Long: 0.8 MB of LLVM IR."""
    stores = "\n".join(
        f"%p{i} = llvm.getelementptr %out[{i}] : (!llvm.ptr) -> !llvm.ptr, f32\nllvm.store %x, %p{i} : f32, !llvm.ptr"
        for i in range(STORES)
    )
    return ir.Module.parse(f"llvm.func @entry(%out: !llvm.ptr, %x: f32) {{\n{stores}\nllvm.return\n}}")


def test_as_the_binding() -> None:
    with context(), ir.Location.unknown():
        operation = module().operation
        text = translate_to_llvm_ir(operation)
        assert text == llvm.translate_module_to_llvmir(operation)
    assert text.count("store float") == STORES


def test_translating_keeps_no_memory() -> None:
    with context(), ir.Location.unknown():
        operation = module().operation
        size = len(translate_to_llvm_ir(operation))
        before = allocated()
        for _ in range(10):
            translate_to_llvm_ir(operation)
        assert allocated() - before < size
