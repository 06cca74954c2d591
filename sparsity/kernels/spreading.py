"""A dense matrix of entries by rows, as the gradient of a masked parameter is."""

from functools import cache

import torch
from torch import Tensor

from gossamer.runtime.elements import ELEMENTS
from gossamer.sparsity.kernels.compile_kernel import RegionKernel, compile_region
from gossamer.sparsity.kernels.warm_memory import empty


def spread(positions: Tensor, coordinates: Tensor, values: Tensor, columns: int) -> Tensor:
    """dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, 0 elsewhere, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    values                  [entries], f32 or f64, contiguous
    returns                 [rows, columns], in memory that is mapped: fresh pages would take twice as long
    """
    rows = positions.shape[0] - 1
    dense = empty([rows, columns], values.dtype)
    if dense.numel():
        work = empty([torch.get_num_threads(), columns], values.dtype)
        types = positions.dtype, coordinates.dtype, values.dtype
        _kernel(*types).into([dense, work], [positions, coordinates, values])
    return dense


@cache
def _kernel(positions: torch.dtype, coordinates: torch.dtype, values: torch.dtype) -> RegionKernel:
    entries = [f"tensor<?x{ELEMENTS[each]}>" for each in (positions, coordinates, values)]
    matrix = f"tensor<?x?x{ELEMENTS[values]}>"
    return compile_region(
        f"""
        func.func @region(%p: {entries[0]}, %c: {entries[1]}, %v: {entries[2]}) -> ({matrix}, {matrix}) {{
          %dense, %row = "kernel.spread"(%p, %c, %v) : ({", ".join(entries)}) -> ({matrix}, {matrix})
          return %dense, %row : {matrix}, {matrix}
        }}""",
        schedule="spread",
    )
