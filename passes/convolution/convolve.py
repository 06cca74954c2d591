"""convolve: turns the product of a region that slides over images into a `kernel.convolve`.

before   func.func @region(%x: tensor<?x576xf32>, %w: tensor<64x576xf32, #CSR>) -> tensor<?x64xf32>
             attributes {kernel.window = [1, 3, 3, 1, 1, 1, ...]}
           %y = "kernel.contract"(%x, %w) ({epilogue}) {indexing_maps = [(t, m, k) -> (t, k), (t, m, k) -> (m, k)]}
after    func.func @region(%x: tensor<?x64x?xf32>, %w: tensor<64x576xf32, #KB>, ..., %depth: index, ...) -> tensor<?x64x?xf32>
           %y = "kernel.convolve"(%x, %w, %depth, %height, %width) ({epilogue})
             {window = [1, 3, 3, 1, 1, 1, ...], lanes = 16, reduction = 1}

Before, a row of x has all inputs of one output pixel. After, tensors are images [n, channels, pixels], whose sizes are
arguments of each call. With `kernel.depthwise`, each channel of the result reads only its own channel of x, and all sizes are
dynamic:

           %y = "kernel.convolve_depthwise"(%x, %w, %height, %width) ({epilogue}) {window = [1, 3, 3, 1, ...], lanes = 16}
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.convolution import ConvolveDepthwiseOp, ConvolveOp
from gossamer.dialects.elements import FLOATS
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.window import Window
from gossamer.passes.contract.choose_format import is_linear
from gossamer.passes.loops.encodings import stored_as
from gossamer.passes.loops.epilogue import check_elements
from gossamer.passes.loops.queries import dims, public_functions, walk

WINDOW = "kernel.window"  # function attribute: `Window.numbers`
DEPTHWISE = "kernel.depthwise"  # function attribute, a unit: each result reads only its own channel


@dataclass(frozen=True)
class Convolve:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            if WINDOW not in function.attributes:
                raise CompileError(f"@{function.name.value} has no {WINDOW}")
            contracts = walk(module, "kernel.contract")
            if len(contracts) != 1 or not is_linear(contracts[0].opview):
                raise CompileError(f"@{function.name.value} is no product of one weight, as a convolution is")
            self._convolve(contracts[0].opview, function)

    def _convolve(self, contract: Any, function: func.FuncOp) -> None:
        check_elements(contract)
        numbers = ir.ArrayAttr(function.attributes[WINDOW])
        window = Window.of(integers(numbers))
        x, w = contract.lhs, contract.rhs
        weight = ir.RankedTensorType(w.type)
        rows, columns = weight.shape
        depthwise = DEPTHWISE in function.attributes
        if depthwise:
            rows = any_ = ir.ShapedType.get_dynamic_size()
            w.set_type(ir.RankedTensorType.get([any_, columns], weight.element_type))
            _as_images(x, any_)
        else:
            w.set_type(stored_as(weight, Format.kblock(window.channels * window.taps)))
            _as_images(x, columns // window.taps * window.groups)
        for read in contract.epilogue.blocks[0].operations:
            if read.operation.name == "kernel.read":
                _read_images(read, rows)
        result = _images(ir.RankedTensorType(contract.result.type), rows)
        sums = FLOATS[FLOATS[str(weight.element_type)].sums].bytes
        i64 = ir.IntegerType.get_signless(64)
        lanes = ir.IntegerAttr.get(i64, self.bits // (8 * sums))
        with ir.InsertionPoint(contract), contract.location:
            count = 2 if depthwise else 3
            sizes = [function.entry_block.add_argument(ir.IndexType.get(), contract.location) for _ in range(count)]
            if depthwise:
                convolve: Any = ConvolveDepthwiseOp(x, w, *sizes, numbers, lanes, result=result)
            else:
                convolve = ConvolveOp(x, w, *sizes, numbers, lanes, ir.IntegerAttr.get(i64, 1), result=result)
        contract.epilogue.blocks[0].append_to(convolve.epilogue)
        contract.result.replace_all_uses_with(convolve.result)
        contract.operation.erase()
        inputs = [argument.type for argument in function.entry_block.arguments]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, [convolve.result.type]))
        for attribute in (WINDOW, DEPTHWISE):
            if attribute in function.attributes:
                del function.attributes[attribute]


def _images(matrix: ir.RankedTensorType, channels: int) -> ir.RankedTensorType:
    any_ = ir.ShapedType.get_dynamic_size()
    return ir.RankedTensorType.get([any_, channels, any_], matrix.element_type)


def _as_images(argument: ir.Value, channels: int) -> None:
    if not isinstance(argument.owner, ir.Block):
        raise CompileError(f"no convolution of {argument}, which is no argument of the region")
    argument.set_type(_images(ir.RankedTensorType(argument.type), channels))


def _read_images(read: Any, channels: int) -> None:
    """Changes a read by pixel and channel, or by channel, to the dimensions of images."""
    positions = dims(ir.AffineMapAttr(read.map).value)
    if positions not in ([0, 1], [1], []):
        raise CompileError(f"no convolution whose epilogue reads by {read.map}")
    source = ir.RankedTensorType(read.source.type)
    if positions == [0, 1] and source.rank == 2:
        _as_images(read.source, channels)
    elif positions == [1]:
        read.source.set_type(ir.RankedTensorType.get([channels], source.element_type))
    whole = [0, 1, 2] if positions == [0, 1] else positions
    results = [ir.AffineDimExpr.get(d) for d in whole]
    read.operation.attributes["map"] = ir.AffineMapAttr.get(ir.AffineMap.get(3, 0, results))
