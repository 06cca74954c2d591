"""Computes SDDMM over many tokens, such as the gradient of a weight. It packs inputs so that tokens are in vector lanes.

    v[p] = sum_t x[t, r] y[t, c]      →      pack x, pack y, v[p] = sum_t x[i, r, t] y[i, c, t]

16-bit floats are widened when they are packed, and summed in f32. Whole blocks of bf16 have a faster way, see block_samples.py.
"""

import torch
from torch import Tensor

from gossamer.dialects.token_tiles import PackTokensOp, SamplePlacesOp, SampleTokensOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.sparsity.compiler.op_kernels import run
from gossamer.sparsity.operations.block_samples import whole_blocks

FEWEST = 16
"""With fewer tokens, packing costs more than it saves."""

_WIDTHS = (128, 64, 32, 16)
_WARM = 1 << 20  # bytes of a tile of y, which is read irregularly: it fits a second-level cache beside the output


def sampled_over_tokens(positions: Tensor, coordinates: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns the sum over tokens of x[t, row] * y[t, column] for the entries of a matrix in CSR, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    x, y                    [tokens, rows] and [tokens, columns] of one float type, contiguous
    returns                 [entries] of that type
    """
    blocks = whole_blocks(positions, coordinates, y.shape[1], x.dtype)
    if blocks is not None:
        return blocks.sampled(x, y)
    wide = torch.promote_types(x.dtype, torch.float32)
    width = _width(x.shape[0], y.shape[1] * wide.itemsize)
    packed = [_packed(each, width, wide) for each in (x, y)]
    out = empty([coordinates.shape[0]], wide)
    run(SampleTokensOp, [positions, coordinates, *packed], [out])
    return out.to(x.dtype)


def sampled_at_places(positions: Tensor, places: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns the sum over n and q of x[n, row, q] y[n, place + q] for each entry, on CPUs. Each entry has a place in y.

    positions, places  of int32 or int64, checked by the caller: every place + q is in y
    x, y               [N, rows, Q] and [N, elements] of f32 or f64, contiguous
    returns            [entries] of that type
    """
    out = empty([places.shape[0]], x.dtype)
    if 0 in (x.shape[0], x.shape[2]):
        return out.zero_()
    run(SamplePlacesOp, [positions, places, x, y], [out])
    return out


def _width(tokens: int, bytes_a_token: int) -> int:
    """Returns the tokens of a tile: the smallest width that holds all, or one with which a tile of y fits the cache."""
    holding = [width for width in _WIDTHS if width < 2 * tokens] or [_WIDTHS[-1]]
    return next((width for width in holding if width * bytes_a_token <= _WARM), 64 if 64 in holding else holding[-1])


def _packed(x: Tensor, width: int, wide: torch.dtype) -> Tensor:
    """Returns x [tokens, features], packed as [tiles, features, width]."""
    tokens, features = x.shape
    out = empty([-(-tokens // width), features, width], wide)
    run(PackTokensOp, [x], [out])
    return out
