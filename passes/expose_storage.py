"""expose-storage: a function on tensors becomes a function on the memory behind them.

before   func.func @region(%x: tensor<?x768xf32>, %w: tensor<3072x768xf32, #KB>, ...) -> tensor<?x3072xf32>
after    func.func @region(%x: memref<?x768xf32>,
                           %w_positions: memref<?xi32>, %w_coordinates: memref<?xi16>, %w_values: memref<?xf32>, ...,
                           %out: memref<?x3072xf32>, %workspace: memref<?xi8>, %threads: index)
           %0 = bufferization.to_tensor %x restrict
           %1 = sparse_tensor.assemble (%w_positions, %w_coordinates), %w_values : ... to tensor<3072x768xf32, #KB>
           ...
           bufferization.materialize_in_destination %y in restrict writable %out

Every schedule and the reference share this calling convention. The memory of a sparse operand comes in the order of
sparse_tensor.assemble: positions and coordinates level by level, then values.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import bufferization, func, sparse_tensor

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.passes.queries import public_functions


@dataclass(frozen=True)
class ExposeStorage:
    """Give every public function of the module memrefs for its tensors, an output, a workspace and a team size."""

    name: ClassVar[str] = "expose-storage"

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            _expose(function)


def _expose(function: func.FuncOp) -> None:
    block = function.entry_block
    returned = list(block.operations)[-1]
    if len(returned.operands) != 1:
        raise CompileError(f"@{function.name.value} returns {len(returned.operands)} values, expose-storage needs one")
    types: list[ir.Type] = []
    with ir.InsertionPoint.at_block_begin(block), function.location:
        for argument in list(block.arguments):
            tensor = ir.RankedTensorType(argument.type)
            dense = tensor.encoding is None
            memory = [ir.MemRefType.get(tensor.shape, tensor.element_type)] if dense else _components(tensor)
            buffers = [block.add_argument(t, function.location) for t in memory]
            types += memory
            tensors = [_tensor(b) for b in buffers]
            replacement = tensors[0] if dense else sparse_tensor.assemble(tensor, tensors[:-1], tensors[-1])
            argument.replace_all_uses_with(replacement)
        result = ir.RankedTensorType(returned.operands[0].type)
        extra = [
            ir.MemRefType.get(result.shape, result.element_type),
            ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], ir.IntegerType.get_signless(8)),
            ir.IndexType.get(),
        ]
        out, *_ = (block.add_argument(t, function.location) for t in extra)
    for _ in range(len(block.arguments) - len(types) - len(extra)):
        block.erase_argument(0)
    with ir.InsertionPoint(returned), function.location:
        bufferization.materialize_in_destination(None, returned.operands[0], out, restrict=True, writable=True)
        func.ReturnOp([])
    returned.operation.erase()
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([*types, *extra], []))
    for attribute in ("arg_attrs", "res_attrs"):
        if attribute in function.attributes:
            del function.attributes[attribute]


def _tensor(buffer: ir.Value) -> ir.Value:
    memory = ir.MemRefType(buffer.type)
    tensor = ir.RankedTensorType.get(memory.shape, memory.element_type)
    return bufferization.to_tensor(tensor, buffer, restrict=True)


def _components(tensor: ir.RankedTensorType) -> list[ir.Type]:
    """The memrefs of a sparse tensor's positions, coordinates and values."""
    fmt = Format.parse(str(tensor.encoding))
    widths = {"positions": fmt.pos_width, "coordinates": fmt.crd_width}
    elements = [_integer(widths[kind]) if kind in widths else tensor.element_type for _, kind in fmt.components()]
    return [ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], e) for e in elements]


def _integer(width: int) -> ir.Type:
    return ir.IntegerType.get_signless(width) if width else ir.IndexType.get()
