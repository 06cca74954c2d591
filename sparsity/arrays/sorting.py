"""Sorts keys whose range is not much larger than their number, such as the rows of entries or the nodes of edges."""

import torch
from torch import Tensor

from gossamer.dialects.open_ops import SortKeysOp
from gossamer.runtime.experts.routes import Routes
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, run, schedule_of

_FEW = 1024  # slots


def sort_keys(keys: Tensor, extent: int, integers: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Sorts keys. Returns where each number below `extent` begins in sorted order, and the order.

    keys       [n] of int32 or int64, with any stride; the caller has checked that they are in [0, extent)
    integers   int32 or int64, the dtype of the first result
    returns    [extent + 1] of `integers`, and the order [n] of int64, stable; None for keys that are in order

    It is a counting sort (Seward, 1954), O(n + extent), by a kernel for CPU tensors.
    """
    keys = keys.contiguous()  # the kernel and torch's conversion read addresses
    if bool((keys[1:] >= keys[:-1]).all()):
        return torch.ops.aten._convert_indices_from_coo_to_csr(keys, extent, out_int32=integers == torch.int32), None
    if not keys.is_cpu:
        keys, order = keys.sort(stable=True)
        return torch.ops.aten._convert_indices_from_coo_to_csr(keys, extent, out_int32=integers == torch.int32), order
    return _counted(keys, extent, integers)


def sorting_kernel() -> RegionKernel:
    """Returns the kernel for CPUs, for keys and positions of int64."""
    what = SortKeysOp, (torch.int64,) * 3, (), ()
    kernel = kernel_on(torch.device("cpu"), op_ir, what, schedule_of(SortKeysOp))
    assert isinstance(kernel, RegionKernel)
    return kernel


def routes_of(experts: Tensor, count: int) -> Routes:
    """Returns the slots of experts [tokens, top], sorted by expert. ArgumentError for an expert outside of `count`."""
    # Checking whether a few slots are in order takes longer than sorting them.
    few = experts.is_cpu and experts.numel() <= _FEW
    return Routes.of(experts, count, lambda keys, extent: (_counted if few else sort_keys)(keys, extent, torch.int64))


def _counted(keys: Tensor, extent: int, integers: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sorts by the kernel, contiguous keys on a CPU."""
    positions, order = keys.new_empty(extent + 1, dtype=integers), keys.new_empty(keys.numel(), dtype=torch.int64)
    run(SortKeysOp, [keys], [positions, order])
    return positions, order
