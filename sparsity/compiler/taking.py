"""Values by their places, for packed weights that take over new ones at every step of training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.open_ops import TakeInOrderOp, TakeOp
from gossamer.runtime.elements import FLOATS
from gossamer.sparsity.compiler.op_kernels import run


def take(values: Tensor, places: Tensor, out: Tensor) -> None:
    """out[p] = values[places[p]], 0 where a place is -1.

    values   contiguous, flat, of a float type
    places   int32 on the same device, below the number of values: the caller has checked
    """
    if values.is_cpu and values.dtype in FLOATS:
        run(TakeOp, [values, places], [out])
    else:
        torch.index_select(values, 0, places.clamp(min=0), out=out)
        out.masked_fill_(places < 0, 0)


def take_in_order(values: Tensor, starts: Tensor, packed: Sequence[Tensor], panel: int, scale: int, out: Tensor) -> None:
    """The values of a matrix in CSR for a packing of it that is filled up, in the packing's order; see `kernel.take_in_order`.

    values, starts  contiguous, at least one value; where each row begins, int32 or int64
    packed          positions and coordinates of the packing, made of this very matrix: the caller has checked
    """
    positions, coordinates = packed
    made = [out, torch.empty_like(starts)]
    run(TakeInOrderOp, [values, starts, positions, coordinates], made, panel=panel, scale=scale)
