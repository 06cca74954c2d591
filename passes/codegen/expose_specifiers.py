"""expose-specifiers: turns sparse tensors of any size, after MLIR has bufferized them, into plain arguments and an output list.

before   func.func @region(%pos: memref<?xi32>, %crd: memref<?xi32>, %val: memref<?xf32>,
                           %s: !sparse_tensor.storage_specifier<#CSR>, ..., %workspace: memref<?xi8>, %threads: index)
           -> (memref<?xi32>, memref<?xi32>, memref<?xf32>, !sparse_tensor.storage_specifier<#CSR>)
after    func.func @region(%pos: memref<?xi32>, %crd: memref<?xi32>, %val: memref<?xf32>, %rows: index, %columns: index,
                           ..., %results: memref<?xindex>, %workspace: memref<?xi8>, %threads: index)
           %s = sparse_tensor.storage_specifier.init ... set lvl_sz ... pos_mem_sz ... crd_mem_sz ... val_mem_sz
           results = [address of pos, elements in use, address of crd, ...]    // memory from malloc, which the caller frees

A sparse operand has arguments for its memory, then for the size of each level. Runs after sparsification-and-bufferization.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import func, memref
from torch_mlir.dialects import sparse_tensor as st

from gossamer.dialects.format import Format
from gossamer.passes.loops.queries import public_functions
from gossamer.passes.loops.vectors import index

_SIZES = {"positions": "pos_mem_sz", "coordinates": "crd_mem_sz", "values": "val_mem_sz"}
_PREFIX = "!sparse_tensor.storage_specifier<"


@dataclass(frozen=True)
class ExposeSpecifiers:
    """Replace the storage specifiers that public functions take by indices, and results in sparse formats by a list."""

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            if any(_is_specifier(t) for t in (*function.type.inputs, *function.type.results)):
                _expose(function)


def _expose(function: func.FuncOp) -> None:
    block = function.entry_block
    returned = list(block.operations)[-1]
    *old, workspace, threads = block.arguments
    memory: list[ir.Value] = []  # the memory of the current operand
    with function.location:
        for argument in old:
            if not _is_specifier(argument.type):
                memory.append(block.add_argument(argument.type, function.location))
                argument.replace_all_uses_with(memory[-1])
                continue
            fmt = _format(argument.type)
            sizes = [block.add_argument(ir.IndexType.get(), function.location) for _ in fmt.levels]
            with ir.InsertionPoint.at_block_begin(block):
                arrays = memory[-len(fmt.components()) :]
                argument.replace_all_uses_with(_specifier(argument.type, fmt, arrays, sizes))
        if returned.operands:
            results = block.add_argument(_list_type(), function.location)
            with ir.InsertionPoint(returned):
                _store(list(returned.operands), results)
                func.ReturnOp([])
            returned.operation.erase()
        for argument in (workspace, threads):
            argument.replace_all_uses_with(block.add_argument(argument.type, function.location))
        for _ in range(len(old) + 2):
            block.erase_argument(0)
        types = [argument.type for argument in block.arguments]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, []))
    for attribute in ("arg_attrs", "res_attrs"):
        if attribute in function.attributes:
            del function.attributes[attribute]


def _specifier(type_: ir.Type, fmt: Format, memory: list[ir.Value], sizes: list[ir.Value]) -> ir.Value:
    """Returns a specifier with these level sizes, of which all memory is in use."""
    specifier = st.storage_specifier_init(type_)
    for level, size in enumerate(sizes):
        specifier = st.storage_specifier_set(specifier, _kind("lvl_sz"), size, level=_level(level))
    for (level, component), buffer in zip(fmt.components(), memory, strict=True):
        at = None if component == "values" else _level(level)
        specifier = st.storage_specifier_set(specifier, _kind(_SIZES[component]), memref.dim(buffer, index(0)), level=at)
    return specifier


def _store(operands: list[ir.Value], results: ir.Value) -> None:
    """Writes the address and the number of used elements of each returned array into the list."""
    *memory, specifier = operands
    for number, ((level, component), buffer) in enumerate(zip(_format(specifier.type).components(), memory, strict=True)):
        at = None if component == "values" else _level(level)
        used = st.storage_specifier_get(specifier, _kind(_SIZES[component]), level=at)
        address = memref.extract_aligned_pointer_as_index(buffer)
        memref.store(address, results, [index(2 * number)])
        memref.store(used, results, [index(2 * number + 1)])


def _list_type() -> ir.Type:
    return ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], ir.IndexType.get())


def _level(number: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IndexType.get(), number)


def _kind(name: str) -> ir.Attribute:
    return ir.Attribute.parse(f"#sparse_tensor<kind {name}>")


def _is_specifier(type_: ir.Type) -> bool:
    return str(type_).startswith(_PREFIX)


def _format(type_: ir.Type) -> Format:
    return Format.parse(str(type_).removeprefix(_PREFIX)[:-1])
