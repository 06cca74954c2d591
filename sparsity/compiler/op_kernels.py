"""Runs kernels on the device of their results, made from one op of the kernel dialect or from contract IR of a caller.

    run(CollectOp, [positions, coordinates, dense], [values])

`run` checks types, ranks and sizes against the declaration of the op. The values in arrays of positions and coordinates were
checked when these arrays were made.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import DeviceError
from gossamer.runtime.operations import check
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.gpu_kernels import LoadedKernel, loaded_kernel
from gossamer.sparsity.compiler.op_ir import Op, op_ir

_MOST = 1024
_kernels: dict[tuple[Any, ...], Any] = {}
"""Kernels whose arguments have passed the checks, by op, attributes, shapes, dtypes and devices. A look-up is faster."""


def run(
    op: Op, given: Sequence[Tensor], made: Sequence[Tensor], known: Mapping[str, int] | None = None, **attributes: Any
) -> None:
    """Computes the results `made` of a kernel op from contiguous operands, by its kernel for their device.

    ArgumentError if they do not fit the op's declaration or the `known` sizes; DeviceError if a GPU has no kernel.
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
    """Checks the operands. Returns the kernel for them."""
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


def schedule_of(op: Op) -> str:
    """Returns the schedule that computes an op."""
    return op.lowering.removeprefix("lower-")


def kernel_on(
    place: torch.device, build: Callable[..., str], what: tuple[Any, ...], schedule: str
) -> RegionKernel | LoadedKernel | None:
    """Returns the kernel of the IR `build(*what)`. If there is none: None on GPUs, CompileError on CPUs."""
    if on_gpu(place):
        return loaded_kernel(build, what, schedule, place)
    return _kernel(build, what, schedule)


def on_gpu(place: torch.device) -> bool:
    """Whether tensors on this device need kernels for GPUs."""
    return place.type == "cuda"


@lru_cache(1024)
def _kernel(build: Callable[..., str], what: tuple[Any, ...], schedule: str) -> RegionKernel:
    return compile_region(build(*what), schedule=schedule)
