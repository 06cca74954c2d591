"""Builds contract IR of one op of the kernel dialect, or of a body that a caller builds: a function of tensors of any size.

op_ir(CollectOp, [torch.int32, torch.int32, torch.float32, torch.float32])
→
func.func @region(%0: tensor<?xi32>, %1: tensor<?xi32>, %2: tensor<?x?xf32>) -> tensor<?xf32> {
  %3 = "kernel.collect"(%0, %1, %2) : (...) -> tensor<?xf32>
  return %3 : tensor<?xf32>
}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import KernelOp, integer
from gossamer.dialects.signature import Declared
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import ELEMENTS

Op = type[KernelOp]


def op_ir(
    op: Op,
    types: Sequence[torch.dtype],
    fixed: Sequence[tuple[str, int]] = (),
    attributes: Sequence[tuple[str, Any]] = (),
) -> str:
    """Returns contract IR of one op for tensors of these dtypes: a function of its operands that returns its results.

    All sizes are open, except those in `fixed`.
    """
    with building():
        sizes, each = dict(fixed), iter(types)
        takes, gives = (
            {declared.name: tensor_type(declared, next(each), sizes) for declared in side}
            for side in (op.signature.takes, op.signature.gives)
        )
        return region(op, takes, gives, **dict(attributes))


def tensor_type(declared: Declared, dtype: torch.dtype, fixed: Mapping[str, int]) -> ir.RankedTensorType:
    """Returns the type of a tensor whose sizes are open, except those in `fixed`. Needs an MLIR context."""
    open_ = ir.ShapedType.get_dynamic_size()
    shape = [size.of(fixed) if size.fixed else open_ for size in declared.sizes]
    return ir.RankedTensorType.get(shape, element_of(dtype))


def region(op: Op, takes: Mapping[str, Any], gives: Mapping[str, ir.Type], **attributes: Any) -> str:
    """Returns a module with one function that returns the results of the op. Needs an MLIR context.

    `takes` has the type of each operand, or a list of types. Declared operands that `takes` lacks are left out.
    """

    def build(*arguments: ir.Value) -> list[ir.Value]:
        each = iter(arguments)
        results = {**dict.fromkeys(declared.name for declared in op.signature.gives), **gives}
        operands: dict[str, Any] = dict.fromkeys(declared.name for declared in op.signature.takes)
        for name, own in takes.items():
            operands[name] = [next(each) for _ in own] if isinstance(own, list) else next(each)
        made = op(**operands, **{name: _attribute(value) for name, value in attributes.items()}, **results)
        return [getattr(made, name) for name in gives]

    types = [each for types in takes.values() for each in (types if isinstance(types, list) else [types])]
    return function_of(types, build)


def function_of(types: Sequence[ir.Type], build: Callable[..., Sequence[ir.Value]]) -> str:
    """Returns a module with one function of arguments of these types. `build` makes its results. Needs an MLIR context."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("region", (list(types), []))
    with ir.InsertionPoint(function.add_entry_block()):
        results = list(build(*function.entry_block.arguments))
        func.ReturnOp(results)
    made = ir.FunctionType.get(list(types), [each.type for each in results])
    function.attributes["function_type"] = ir.TypeAttr.get(made)
    return str(module)


def element_of(dtype: torch.dtype) -> ir.Type:
    """Returns the MLIR type of a dtype. CompileError if there are no kernels for it."""
    if dtype not in ELEMENTS:
        known = ", ".join(str(each).removeprefix("torch.") for each in ELEMENTS)
        raise CompileError(f"there are no kernels for {dtype}, only for {known}: convert the operands with .to(dtype)")
    return ir.Type.parse(ELEMENTS[dtype])


def _attribute(value: Any) -> ir.Attribute:
    if isinstance(value, list | tuple):
        return ir.ArrayAttr.get([_attribute(each) for each in value])
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F64Type.get(), value)
    return integer(value)
