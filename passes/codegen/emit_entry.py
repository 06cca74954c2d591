"""emit-entry: adds the function that the runtime calls. Its only argument is a list of 64-bit words.

before   func.func @region(%x: memref<?x768xf32>, ..., %threads: index)
after    func.func @entry(%words: !llvm.ptr)
           words = [address of x, size of its dynamic dimension, ..., threads]
           rebuilds the (contiguous) memrefs and calls @region

A memref takes a word for its address and one for each dynamic size; an index takes one. The module's attribute `kernel.words`
has the dynamic dimensions of the memref of each argument.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import func, llvm

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.llvm_values import from_llvm, memory_at
from gossamer.passes.loops.queries import public_functions

ENTRY = "entry"
WORDS = "kernel.words"


@dataclass(frozen=True)
class EmitEntry:
    """Add @entry, which unpacks its words and calls the module's public function."""

    def run(self, module: ir.Module) -> None:
        public = public_functions(module)
        if len(public) != 1:
            raise CompileError(f"emit-entry needs one public function, the module has {len(public)}")
        target = public[0]
        types = list(target.type.inputs)
        dynamic = [_dynamic_dims(t) for t in types]
        i32 = ir.IntegerType.get_signless(32)
        module.operation.attributes[WORDS] = ir.ArrayAttr.get(
            [ir.ArrayAttr.get([ir.IntegerAttr.get(i32, d) for d in dims]) for dims in dynamic]
        )
        pointer = ir.Type.parse("!llvm.ptr")
        with ir.InsertionPoint(module.body), target.location:
            entry = func.FuncOp(ENTRY, ([pointer], []))
            with ir.InsertionPoint(entry.add_entry_block()):
                words = _Words(entry.entry_block.arguments[0])
                func.CallOp(target, [_argument(words, t) for t in types])
                func.ReturnOp([])
        target.attributes["sym_visibility"] = ir.StringAttr.get("private")


def _dynamic_dims(type_: ir.Type) -> list[int]:
    if not isinstance(type_, ir.MemRefType):
        return []
    memory = ir.MemRefType(type_)
    return [d for d in range(memory.rank) if memory.is_dynamic_dim(d)]


class _Words:
    """Reads the words one after the other."""

    def __init__(self, pointer: ir.Value) -> None:
        self.pointer, self.next = pointer, 0

    def take(self, type_: ir.Type) -> ir.Value:
        word = ir.TypeAttr.get(ir.IntegerType.get_signless(64))
        address = llvm.getelementptr(self.pointer.type, self.pointer, [], [self.next], word, 0)
        self.next += 1
        return llvm.load(type_, address)


def _argument(words: _Words, type_: ir.Type) -> ir.Value:
    """Reads the next argument: an index, or a contiguous memref from its address and dynamic sizes."""
    word = ir.IntegerType.get_signless(64)
    if not isinstance(type_, ir.MemRefType):
        return from_llvm(words.take(word), type_)
    address = words.take(ir.Type.parse("!llvm.ptr"))
    return memory_at(address, type_, [words.take(word) for _ in _dynamic_dims(type_)])
