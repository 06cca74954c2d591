"""Gathers values by their places, for packed weights that get new values at every step of training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.open_ops import TakeInOrderOp, TakeOp
from gossamer.runtime.elements import FLOATS
from gossamer.sparsity.compiler.op_kernels import run


def take(values: Tensor, places: Tensor, out: Tensor) -> None:
    """Writes out[p] = values[places[p]], and 0 where a place is -1.

    values   contiguous, flat, of a float type
    places   int32 on the same device; the caller has checked that they are below the number of values
    """
    if values.is_cpu and values.dtype in FLOATS:
        run(TakeOp, [values, places], [out])
    else:
        torch.index_select(values, 0, places.clamp(min=0), out=out)
        out.masked_fill_(places < 0, 0)


def take_in_order(values: Tensor, starts: Tensor, packed: Sequence[Tensor], panel: int, scale: int, out: Tensor) -> None:
    """Writes the values of a matrix in CSR in the order of its padded packing; see `kernel.take_in_order`.

    values, starts  contiguous: at least one value; where each row begins, int32 or int64
    packed          positions and coordinates of the packing; the caller has checked that it was made of this matrix
    """
    positions, coordinates = packed
    made = [out, torch.empty_like(starts)]
    run(TakeInOrderOp, [values, starts, positions, coordinates], made, panel=panel, scale=scale)
