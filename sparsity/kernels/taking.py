"""Values by their places, for packed weights that take over new ones at every step of training."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gossamer.runtime.elements import ELEMENTS, FLOATS
from gossamer.sparsity.kernels.compile_kernel import RegionKernel, compile_region


def take(values: Tensor, places: Tensor, out: Tensor) -> None:
    """out[p] = values[places[p]], 0 where a place is -1.

    values   contiguous, flat, of a float type
    places   int32 on the same device, below the number of values: the caller has checked
    """
    if values.is_cpu and values.dtype in FLOATS:
        _kernel(values.dtype)([values, places], out)
    else:
        torch.index_select(values, 0, places.clamp(min=0), out=out)
        out.masked_fill_(places < 0, 0)


@cache
def _kernel(dtype: torch.dtype) -> RegionKernel:
    values = f"tensor<?x{FLOATS[dtype]}>"
    return compile_region(
        f"""
        func.func @region(%values: {values}, %places: tensor<?xi32>) -> {values} {{
          %taken = "kernel.take"(%values, %places) : ({values}, tensor<?xi32>) -> {values}
          return %taken : {values}
        }}""",
        schedule="take",
    )


def take_in_order(values: Tensor, starts: Tensor, packed: Sequence[Tensor], panel: int, scale: int, out: Tensor) -> None:
    """The values of a matrix in CSR for a packing of it that is filled up, in the packing's order; see `kernel.take_in_order`.

    values, starts  contiguous, at least one value; where each row begins, int32 or int64
    packed          positions and coordinates of the packing, made of this very matrix: the caller has checked
    """
    positions, coordinates = packed
    types = [each.dtype for each in (values, starts, positions, coordinates)]
    _in_order(*types, panel, scale).into([out, torch.empty_like(starts)], [values, starts, positions, coordinates])


@cache
def _in_order(
    values: torch.dtype, starts: torch.dtype, positions: torch.dtype, coordinates: torch.dtype, panel: int, scale: int
) -> RegionKernel:
    taken = [f"tensor<?x{ELEMENTS[each]}>" for each in (values, starts, positions, coordinates)]
    made = taken[:2]
    return compile_region(
        f"""
        func.func @region(%v: {taken[0]}, %s: {taken[1]}, %p: {taken[2]}, %c: {taken[3]}) -> ({", ".join(made)}) {{
          %taken, %ends = "kernel.take_in_order"(%v, %s, %p, %c) {{panel = {panel} : i64, scale = {scale} : i64}}
            : ({", ".join(taken)}) -> ({", ".join(made)})
          return %taken, %ends : {", ".join(made)}
        }}""",
        schedule="take",
    )
