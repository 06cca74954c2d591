"""Operations on sparse tensors on CUDA devices.

    products of a matrix with a dense one, samples at its entries   kernels for GPUs: "rows" and "dots", as on the CPU
    all else                                                        on the CPU, on copies; a warning says so once each

As on the CPU, matrices of other formats than CSR are taken by rows (see row_form), there on their device.
"""

import logging
import warnings
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gossamer.dialects.errors import FormatError, GossamerError
from gossamer.runtime import cuda
from gossamer.runtime.ptx import Architecture
from gossamer.sparsity.dense_results import einsum_ir, sample_ir
from gossamer.sparsity.gpu_kernels import LoadedKernel, compile_gpu_region
from gossamer.sparsity.launch import Build, Call, call_of
from gossamer.sparsity.matrix_calls import RowProduct, RowSample
from gossamer.sparsity.operands import LIBRARY, Spec
from gossamer.sparsity.row_form import RowForm

log = logging.getLogger("gossamer")

Arguments = tuple[list[Tensor], list[int], str]


def einsum(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """gossamer::einsum for CUDA tensors."""
    return _computed("einsum", call_of(einsum_ir, RowProduct.of, text, arrays[-1].dtype), "rows", (arrays, sizes, text))


def sample(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """gossamer::sample for CUDA tensors."""
    return _computed("sample", call_of(sample_ir, RowSample.of, text, arrays[-1].dtype), "dots", (arrays, sizes, text))


def _computed(name: str, call: Call, schedule: str, arguments: Arguments) -> Tensor:
    """A call by our kernel, if there is one for it."""
    arrays, sizes, _ = arguments

    def kernel(form: RowForm) -> LoadedKernel:
        assert call.product is not None
        found = _kernel(call.build, call.product.canonical(form.format), call.dtype, schedule, arrays[-1].device)
        if found is None:
            raise _NoKernel
        return found

    result = None
    if call.product is not None:
        with suppress(_NoKernel):
            result = call.product.run(kernel, arrays, sizes)
    return through_cpu(name, *arguments) if result is None else result


class _NoKernel(Exception):
    """There is none for a product."""


@lru_cache(1024)
def _kernel(build: Build, spec: Spec, dtype: torch.dtype, schedule: str, place: torch.device) -> LoadedKernel | None:
    """The kernel of a product with a matrix by rows, loaded on a GPU; None if there is none for it, or the GPU is too old."""
    try:
        architecture = Architecture.of_device(*cuda.device(place.index or 0).capability)
        return compile_gpu_region(build(spec, dtype), architecture, schedule=schedule).on(place)
    except GossamerError as problem:
        log.info("no %s kernel for %s on %s: %s", schedule, dtype, place, problem)
        return None


def through_cpu(name: str, *arguments: Any) -> Any:
    """The operation gossamer::name on the CPU, with copies of what is on a device; results go back there."""
    devices = list(dict.fromkeys(leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)))
    if len(devices) > 1:
        raise FormatError(f"gossamer::{name} of tensors on {devices[0]} and {devices[1]}: move them to one device")
    _warn(name)
    there = pytree.tree_map_only(Tensor, Tensor.cpu, arguments)
    results = getattr(torch.ops.gossamer, name).default(*there)
    return pytree.tree_map_only(Tensor, lambda result: result.to(devices[0]), results)


@cache
def _warn(name: str) -> None:
    warnings.warn(
        f"gossamer::{name} has no kernel for GPUs here: it is computed on the CPU, on copies. Matrices times dense ones in "
        "f32, f16 or bf16 have one; keep the rest of a sparse computation on the CPU, or make it dense.",
        stacklevel=4,
    )


def register() -> None:
    """Implements all operations for CUDA that are implemented for the CPU."""
    LIBRARY.impl("einsum", einsum, "CUDA")
    LIBRARY.impl("sample", sample, "CUDA")
    for operation in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        room, _, name = operation.partition("::")
        if room == LIBRARY.ns and not torch._C._dispatch_has_kernel_for_dispatch_key(operation, "CUDA"):
            LIBRARY.impl(name, partial(through_cpu, name), "CUDA")
