"""Sorting numbers that are not much more than they are many, such as the rows of entries or the nodes of edges."""

import torch
from torch import Tensor

from gossamer.dialects.open_ops import SortKeysOp
from gossamer.runtime.experts.routes import Routes
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, run, schedule_of

_FEW = 1024  # slots


def sort_keys(keys: Tensor, extent: int, integers: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Where the keys of each number below `extent` begin in sorted order, and which key each is there.

    keys       [n] of int32 or int64, within [0, extent): the caller has checked
    integers   int32 or int64, for the former
    returns    [extent + 1] of `integers` and [n] of int64, equal keys in the order in which they come; None for keys in order

    O(n + extent): a counting sort (Seward, 1954), by a kernel for CPU tensors.
    """
    if bool((keys[1:] >= keys[:-1]).all()):
        return torch.ops.aten._convert_indices_from_coo_to_csr(keys, extent, out_int32=integers == torch.int32), None
    if not keys.is_cpu:
        keys, order = keys.sort(stable=True)
        return torch.ops.aten._convert_indices_from_coo_to_csr(keys, extent, out_int32=integers == torch.int32), order
    return _counted(keys.contiguous(), extent, integers)


def sorting_kernel() -> RegionKernel:
    """The kernel for CPUs, of keys of int64 and with positions of that type."""
    what = SortKeysOp, (torch.int64,) * 3, (), ()
    kernel = kernel_on(torch.device("cpu"), op_ir, what, schedule_of(SortKeysOp))
    assert isinstance(kernel, RegionKernel)
    return kernel


def routes_of(experts: Tensor, count: int) -> Routes:
    """The slots of experts [tokens, top], sorted. ArgumentError for an expert that is none of `count`."""
    # To find out whether a few slots are in order takes longer than to sort them.
    few = experts.is_cpu and experts.numel() <= _FEW
    return Routes.of(experts, count, lambda keys, extent: (_counted if few else sort_keys)(keys, extent, torch.int64))


def _counted(keys: Tensor, extent: int, integers: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same by the kernel, of contiguous keys on a CPU."""
    positions, order = keys.new_empty(extent + 1, dtype=integers), keys.new_empty(keys.numel(), dtype=torch.int64)
    run(SortKeysOp, [keys], [positions, order])
    return positions, order
