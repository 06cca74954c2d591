"""expose-storage: turns a function on tensors into a function on their memory.

before   func.func @region(%x: tensor<?x768xf32>, %w: tensor<3072x768xf32, #KB>, ...) -> tensor<?x3072xf32>
after    func.func @region(%x: memref<?x768xf32>,
                           %w_positions: memref<?xi32>, %w_coordinates: memref<?xi16>, %w_values: memref<?xf32>, ...,
                           %out: memref<?x3072xf32>, %workspace: memref<?xi8>, %threads: index)
           %0 = bufferization.to_tensor %x restrict
           %1 = sparse_tensor.assemble (%w_positions, %w_coordinates), %w_values : ... to tensor<3072x768xf32, #KB>
           ...
           bufferization.materialize_in_destination %y in restrict writable %out

Every schedule and the reference share this calling convention. The arrays of a sparse operand have the order of
sparse_tensor.assemble: positions and coordinates level by level, then values. A packing has its own arrays, also with values
last, and a builtin.unrealized_conversion_cast in place of the assemble. MLIR assembles only tensors of static shape. A sparse
operand of dynamic shape, and a sparse result, are left to expose-specifiers.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import bufferization, func, sparse_tensor

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.queries import public_functions


@dataclass(frozen=True)
class ExposeStorage:
    """Give every public function memrefs for its tensors, an output for each result, a workspace and a number of threads.

    With `arrays`, sparse operands of dynamic shape also become their arrays and the sizes of their levels, for schedules that
    read the arrays.
    """

    arrays: bool = False

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            _expose(function, self.arrays)


def _expose(function: func.FuncOp, arrays: bool) -> None:
    block = function.entry_block
    returned = list(block.operations)[-1]
    results = [ir.RankedTensorType(value.type) for value in returned.operands]
    if not results or (len(results) > 1 and any(result.encoding is not None for result in results)):
        raise CompileError(f"@{function.name.value} returns {len(results)} values, expose-storage needs one, or dense ones")
    given = list(block.arguments)
    with ir.InsertionPoint.at_block_begin(block), function.location:
        for argument in given:
            argument.replace_all_uses_with(_exposed(block, argument.type, arrays))
        memories = [ir.MemRefType.get(r.shape, r.element_type) for r in results if r.encoding is None]
        outputs = [_added(block, memory) for memory in memories]
        _added(block, ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], ir.IntegerType.get_signless(8)))
        _added(block, ir.IndexType.get())
    for _ in given:
        block.erase_argument(0)
    if outputs:
        results = []
        with ir.InsertionPoint(returned), function.location:
            for value, out in zip(returned.operands, outputs, strict=True):
                bufferization.materialize_in_destination(None, value, out, restrict=True, writable=True)
            func.ReturnOp([])
        returned.operation.erase()
    types = [argument.type for argument in block.arguments]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, results))
    for attribute in ("arg_attrs", "res_attrs"):
        if attribute in function.attributes:
            del function.attributes[attribute]


def _added(block: ir.Block, type_: ir.Type) -> ir.Value:
    """Adds a last argument to the block."""
    return block.add_argument(type_, ir.Location.current)


def _exposed(block: ir.Block, type_: ir.Type, arrays: bool) -> ir.Value:
    """Returns a value of this type, made from new arguments: those of its memory, or itself if its memory is not exposed."""
    if isinstance(type_, ir.IndexType):
        return _added(block, type_)
    tensor = ir.RankedTensorType(type_)
    if tensor.encoding is None:
        return _tensor(_added(block, ir.MemRefType.get(tensor.shape, tensor.element_type)))
    is_open = not tensor.has_static_shape
    if is_open and not arrays:
        return _added(block, tensor)
    assembled = _assembled(tensor, [_tensor(buffer) for buffer in [_added(block, memory) for memory in _components(tensor)]])
    storage = storage_of_type(tensor)
    for _ in storage.levels if is_open and isinstance(storage, Format) else ():
        _added(block, ir.IndexType.get())
    return assembled


def _tensor(buffer: ir.Value) -> ir.Value:
    memory = ir.MemRefType(buffer.type)
    tensor = ir.RankedTensorType.get(memory.shape, memory.element_type)
    return bufferization.to_tensor(tensor, buffer, restrict=True)


def _assembled(tensor: ir.RankedTensorType, components: list[ir.Value]) -> ir.Value:
    """Returns the sparse tensor made from these components."""
    if isinstance(storage_of_type(tensor), Format) and tensor.has_static_shape:
        return sparse_tensor.assemble(tensor, components[:-1], components[-1])
    cast = ir.Operation.create("builtin.unrealized_conversion_cast", results=[tensor], operands=components)
    return cast.results[0]


def _components(tensor: ir.RankedTensorType) -> list[ir.Type]:
    """Returns the types of the memrefs of a sparse tensor: positions, coordinates and values, or the arrays of its packing."""
    storage = storage_of_type(tensor)
    if isinstance(storage, Packing):
        elements = [_integer(c.bits) if c.bits else tensor.element_type for c in storage.components()]
    else:
        assert storage is not None
        widths = {"positions": storage.pos_width, "coordinates": storage.crd_width}
        elements = [_integer(widths[kind]) if kind in widths else tensor.element_type for _, kind in storage.components()]
    return [ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], e) for e in elements]


def _integer(width: int) -> ir.Type:
    return ir.IntegerType.get_signless(width) if width else ir.IndexType.get()
