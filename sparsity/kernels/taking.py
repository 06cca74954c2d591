"""Values by their places, for packed weights that take over new ones at every step of training."""

from functools import cache

import torch
from torch import Tensor

from gossamer.runtime.elements import FLOATS
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
