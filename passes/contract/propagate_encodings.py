"""propagate-encodings: gives results of ops that keep the zeros of a sparse tensor a sparse encoding too.

before   %1 = linalg.transpose ins(%w : tensor<8x4xf32, #CSR>) outs(%0 : tensor<4x8xf32>) permutation = [1, 0]
after    %1 = linalg.transpose ins(%w : tensor<8x4xf32, #CSR>) outs(%0 : tensor<4x8xf32, #CSC>) permutation = [1, 0]

The importer sets only the encodings of a region's arguments. This pass follows transposes, casts, and elementwise generics that
map zero to zero: negf, absf and the like of the sparse value, and its product with anything. The encoding of a transpose is the
permuted one: the same arrays are read as the transposed matrix. A value that is used outside of linalg stays dense.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.format import Format
from gossamer.passes.loops.queries import all_ops, defining, parallel

_ZERO_TO_ZERO = ("arith.negf", "arith.extf", "arith.truncf", "arith.extsi", "math.absf", "math.sqrt", "math.tanh", "math.sin")


@dataclass(frozen=True)
class PropagateEncodings:
    """Carry encodings from operands to results, op after op."""

    def run(self, module: ir.Module) -> None:
        for op in all_ops(module.operation):
            if op.name == "linalg.transpose":
                _transpose(op)
            elif op.name == "linalg.generic":
                _elementwise(op)


def _encoding(value: ir.Value) -> ir.Attribute | None:
    return ir.RankedTensorType(value.type).encoding if isinstance(value.type, ir.RankedTensorType) else None


def _transpose(op: ir.Operation) -> None:
    encoding = _encoding(op.operands[0])
    if encoding is not None and _encoding(op.results[0]) is None:
        order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
        _encode(op, ir.Attribute.parse(str(Format.parse(str(encoding)).permuted(order))))


def _elementwise(op: ir.Operation) -> None:
    """Gives the result of an elementwise op an encoding, if it reads one sparse input by the identity and keeps its zeros."""
    inputs = list(op.operands)[:-1]
    sparse = [i for i, v in enumerate(inputs) if _encoding(v) is not None]
    if len(sparse) != 1 or len(op.results) != 1 or not parallel(op) or _encoding(op.results[0]) is not None:
        return
    maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
    identity = ir.AffineMap.get_identity(maps[0].n_dims)
    block = op.regions[0].blocks[0]
    result = list(block.operations)[-1].operands[0]
    if maps[sparse[0]] == maps[-1] == identity and _keeps_zero(result, block.arguments[sparse[0]]):
        encoding = _encoding(inputs[sparse[0]])
        assert encoding is not None
        _encode(op, encoding)


def _keeps_zero(value: ir.Value, sparse: ir.Value) -> bool:
    """Whether `value` is 0 wherever `sparse` is."""
    if value == sparse:
        return True
    op = defining(value)
    if op is None:
        return False
    if op.name == "arith.mulf":
        return any(_keeps_zero(v, sparse) for v in op.operands)
    return op.name in _ZERO_TO_ZERO and _keeps_zero(op.operands[0], sparse)


def _encode(op: ir.Operation, encoding: ir.Attribute) -> None:
    """Gives the encoding to the op's result and to the empty tensor that it starts from."""
    result = op.results[0]
    old = ir.RankedTensorType(result.type)
    new = ir.RankedTensorType.get(old.shape, old.element_type, encoding)
    start = op.operands[len(op.operands) - 1]
    empty = defining(start)
    if empty is None or empty.name != "tensor.empty" or not all(_takes_any_encoding(use) for use in result.uses):
        return
    with ir.InsertionPoint(op), op.location:
        fresh = ir.Operation.create("tensor.empty", results=[new], operands=list(empty.operands))
    op.operands[len(op.operands) - 1] = fresh.results[0]
    result.set_type(new)


def _takes_any_encoding(use: ir.OpOperand) -> bool:
    """Whether this is an input of a linalg op, or a tensor.dim. Other ops may require that the type equals one of their own."""
    op = use.owner.operation
    is_input = op.name.startswith("linalg.") and use.operand_number < len(op.operands) - len(op.results)
    return is_input or op.name == "tensor.dim"
