"""Dense matrices of entries by rows and entries of dense matrices: a masked parameter's gradient, and its values."""

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
        _spreading(*types).into([dense, work], [positions, coordinates, values])
    return dense


def collect(positions: Tensor, coordinates: Tensor, dense: Tensor) -> Tensor:
    """values[p] = dense[r, c] for the entries p = (r, c) of a matrix in CSR, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    dense                   [rows, columns], of floats, contiguous
    """
    values = empty([coordinates.shape[0]], dense.dtype)
    if values.numel():
        _collecting(positions.dtype, coordinates.dtype, dense.dtype)([positions, coordinates, dense], values)
    return values


@cache
def _collecting(positions: torch.dtype, coordinates: torch.dtype, dense: torch.dtype) -> RegionKernel:
    integers, matrix = [f"tensor<?x{ELEMENTS[each]}>" for each in (positions, coordinates)], f"tensor<?x?x{ELEMENTS[dense]}>"
    values = f"tensor<?x{ELEMENTS[dense]}>"
    return compile_region(
        f"""
        func.func @region(%p: {integers[0]}, %c: {integers[1]}, %d: {matrix}) -> {values} {{
          %v = "kernel.collect"(%p, %c, %d) : ({integers[0]}, {integers[1]}, {matrix}) -> {values}
          return %v : {values}
        }}""",
        schedule="spread",
    )


@cache
def _spreading(positions: torch.dtype, coordinates: torch.dtype, values: torch.dtype) -> RegionKernel:
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
