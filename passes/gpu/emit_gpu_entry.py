"""emit-gpu-entry: makes kernels take an address and the dynamic sizes of each memref, as a launch passes them.

before   gpu.func @region_t128(%x: memref<?x768xf32>, ..., %out: memref<?x3072xf32>) kernel
after    gpu.func @region_t128(%x: !llvm.ptr {llvm.noalias, llvm.readonly, llvm.align = 16}, %x_0: i64, ...) kernel
           rebuilds the (contiguous) memrefs

The arguments have the same order as those of emit-entry on the CPU. The pass also writes the list of dynamic dimensions to the
module as `kernel.words`. A kernel only reads its memrefs, except the last one. Every address must be a multiple of 16.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import gpu

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integer
from gossamer.passes.codegen.emit_entry import WORDS
from gossamer.passes.loops.llvm_values import memory_at
from gossamer.passes.loops.queries import walk

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class EmitGpuEntry:
    """Replaces the memrefs that kernels take by pointers and sizes."""

    def run(self, module: ir.Module) -> None:
        kernels = [op.opview for op in walk(module, "gpu.func")]
        if not kernels:
            raise CompileError("emit-gpu-entry needs a kernel, the module has none")
        types = [ir.MemRefType(t) for t in kernels[0].function_type.value.inputs]
        if any(list(kernel.function_type.value.inputs) != types for kernel in kernels):
            raise CompileError("emit-gpu-entry needs kernels that take the same arguments")
        i32 = ir.IntegerType.get_signless(32)
        words = [ir.ArrayAttr.get([ir.IntegerAttr.get(i32, d) for d in _dynamic(t)]) for t in types]
        module.operation.attributes[WORDS] = ir.ArrayAttr.get(words)
        for kernel in kernels:
            with kernel.location:
                _rewrite(kernel, types)


def _dynamic(memory: ir.MemRefType) -> list[int]:
    return [d for d in range(memory.rank) if memory.is_dynamic_dim(d)]


def _rewrite(kernel: gpu.GPUFuncOp, types: list[ir.MemRefType]) -> None:
    block = kernel.entry_block
    pointer, word = ir.Type.parse("!llvm.ptr"), ir.IntegerType.get_signless(64)
    inputs: list[ir.Type] = []
    attributes: list[ir.Attribute] = []
    memrefs = list(block.arguments)
    with ir.InsertionPoint.at_block_begin(block):
        for position, memory in enumerate(types):
            address = block.add_argument(pointer, kernel.location)
            sizes = [block.add_argument(word, kernel.location) for _ in _dynamic(memory)]
            inputs += [pointer, *[word] * len(sizes)]
            attributes += [_pointer_attributes(position < len(types) - 1), *[ir.DictAttr.get({})] * len(sizes)]
            memrefs[position].replace_all_uses_with(memory_at(address, memory, sizes))
    for _ in memrefs:
        block.erase_argument(0)
    kernel.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, []))
    kernel.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def _pointer_attributes(only_read: bool) -> ir.DictAttr:
    aligned = integer(ALIGNMENT)
    attributes: dict[str, ir.Attribute] = {"llvm.noalias": ir.UnitAttr.get(), "llvm.align": aligned}
    return ir.DictAttr.get({**attributes, "llvm.readonly": ir.UnitAttr.get()} if only_read else attributes)
