"""Kernels on the device of their results: of contract IR that somebody builds, and of one op of the kernel dialect.

    run(CollectOp, [positions, coordinates, dense], [values])
    →
    func.func @region(%0: tensor<?xi32>, %1: tensor<?xi32>, %2: tensor<?x?xf32>) -> tensor<?xf32> {
      %3 = "kernel.collect"(%0, %1, %2) : (...) -> tensor<?xf32>
      return %3 : tensor<?xf32>
    }

Such a kernel sees nothing that is not as its op declares it. What the numbers in arrays of positions and coordinates are,
whoever made the arrays has checked.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.errors import DeviceError
from gossamer.dialects.kernel import KernelOp
from gossamer.dialects.signature import Declared
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.operation import check
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.kernels.compile_kernel import compile_region
from gossamer.sparsity.kernels.gpu_kernels import LoadedKernel, loaded_kernel

Op = type[KernelOp]
_MOST = 1024


_kernels: dict[tuple[Any, ...], Any] = {}
"""By what they have been given and have passed: an op, shapes, types, and so on. Looking is quicker than checking."""


def run(
    op: Op, given: Sequence[Tensor], made: Sequence[Tensor], known: Mapping[str, int] | None = None, **attributes: Any
) -> None:
    """Computes what a kernel op gives from contiguous operands, by its kernel for their device.

    ArgumentError if they are not as declared, or not of the sizes that are `known`; DeviceError if a GPU has no kernel.
    """
    key: list[Any] = [op, *attributes.values(), *(known or {}).values()]
    for tensor in (*given, *made):
        key += tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device
    kernel = _kernels.get(found := tuple(key))
    if kernel is None:
        if len(_kernels) >= _MOST:
            _kernels.clear()
        kernel = _kernels[found] = _checked(op, given, made, dict(known or {}), attributes)
    kernel(given, made[0] if len(made) == 1 else made)


def _checked(
    op: Op, given: Sequence[Tensor], made: Sequence[Tensor], known: dict[str, Any], attributes: dict[str, Any]
) -> Callable[..., None]:
    """The kernel for such operands, after they have been looked at."""
    tensors = list(zip((*op.signature.takes, *op.signature.gives), (*given, *made), strict=True))
    check(op.OPERATION_NAME, tensors, known)
    if not any(each.numel() for each in made):
        return lambda given, made: None
    fixed = tuple((name, known[name]) for name in op.signature.fixed)
    what = op, tuple(tensor.dtype for _, tensor in tensors), fixed, tuple(attributes.items())
    kernel = kernel_on(made[0].device, op_ir, what, schedule_of(op))
    if kernel is None:
        raise DeviceError(f"{op.OPERATION_NAME}: no kernel for {made[0].device}, there are some from sm_80 on; call .cpu()")
    return kernel


def op_ir(
    op: Op,
    types: Sequence[torch.dtype],
    fixed: Sequence[tuple[str, int]] = (),
    attributes: Sequence[tuple[str, Any]] = (),
) -> str:
    """Contract IR of one op, of tensors of these types: a function of its operands that returns its results.

    All sizes are open, but those that are `fixed`.
    """
    with building():
        sizes, each = dict(fixed), iter(types)
        takes, gives = (
            {declared.name: tensor_type(declared, next(each), sizes) for declared in side}
            for side in (op.signature.takes, op.signature.gives)
        )
        return region(op, takes, gives, **dict(attributes))


def tensor_type(declared: Declared, dtype: torch.dtype, fixed: Mapping[str, int]) -> ir.RankedTensorType:
    """The type of a tensor whose sizes are open, but those that are `fixed`. In an MLIR context."""
    open_ = ir.ShapedType.get_dynamic_size()
    shape = [size.of(fixed) if size.fixed else open_ for size in declared.sizes]
    return ir.RankedTensorType.get(shape, ir.Type.parse(ELEMENTS[dtype]))


def region(op: Op, takes: Mapping[str, Any], gives: Mapping[str, ir.Type], **attributes: Any) -> str:
    """A module with one function, which returns what the op gives; its arguments are of the types of the operands, or lists of
    types. What the op declares and `takes` lacks is left out. In an MLIR context.
    """
    module = ir.Module.create()
    types = [each for types in takes.values() for each in (types if isinstance(types, list) else [types])]
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("region", (types, list(gives.values())))
    with ir.InsertionPoint(function.add_entry_block()):
        arguments = iter(function.entry_block.arguments)
        operands: dict[str, Any] = dict.fromkeys(each.name for each in op.signature.takes)
        for name, own in takes.items():
            operands[name] = [next(arguments) for _ in own] if isinstance(own, list) else next(arguments)
        made = op(**operands, **{name: _attribute(value) for name, value in attributes.items()}, **gives)
        func.ReturnOp([getattr(made, name) for name in gives])
    return str(module)


def _attribute(value: Any) -> ir.Attribute:
    if isinstance(value, list | tuple):
        return ir.ArrayAttr.get([_attribute(each) for each in value])
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F64Type.get(), value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def schedule_of(op: Op) -> str:
    """The schedule that computes the op as it is."""
    return op.lowering.removeprefix("lower-")


def kernel_on(
    place: torch.device, build: Callable[..., str], what: tuple[Any, ...], schedule: str
) -> RegionKernel | LoadedKernel | None:
    """The kernel of what `build` makes of `what`. On GPUs None where there is none, and CompileError on CPUs."""
    if on_gpu(place):
        return loaded_kernel(build, what, schedule, place)
    return _kernel(build, what, schedule)


def on_gpu(place: torch.device) -> bool:
    """Whether tensors there are computed by kernels for GPUs."""
    return place.type == "cuda"


@lru_cache(1024)
def _kernel(build: Callable[..., str], what: tuple[Any, ...], schedule: str) -> RegionKernel:
    return compile_region(build(*what), schedule=schedule)
