"""SDDMM over many tokens, as the gradient of a weight is: what comes with tokens in front is packed with tokens in lanes.

    v[p] = sum_t x[t, r] y[t, c]      →      pack x, pack y, v[p] = sum_t x[i, r, t] y[i, c, t]

16-bit floats are widened when they are packed, and summed in f32; but see block_samples.py for whole blocks of bf16.
"""

import torch
from torch import Tensor

from gossamer.dialects.token_tiles import PackTokensOp, SamplePlacesOp, SampleTokensOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.sparsity.compiler.op_kernels import run
from gossamer.sparsity.operations.block_samples import whole_blocks

FEWEST = 16
"""Tokens below which packing them costs more than it saves."""

_WIDTHS = (128, 64, 32, 16)
_WARM = 1 << 20  # bytes of a tile that is read here and there: what a second-level cache holds beside what is written


def sampled_over_tokens(positions: Tensor, coordinates: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The sum over tokens of x[t, row] * y[t, column] for the entries of a matrix in CSR, on CPUs.

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
    """The sum over n and q of x[n, row, q] y[n, place + q] for entries of rows that each have a place in y, on CPUs.

    positions, places  of int32 or int64, checked by the caller: place + q is in y for all of them
    x, y               [N, rows, Q] and [N, elements] of f32 or f64, contiguous
    returns            [entries] of that type
    """
    out = empty([places.shape[0]], x.dtype)
    if 0 in (x.shape[0], x.shape[2]):
        return out.zero_()
    run(SamplePlacesOp, [positions, places, x, y], [out])
    return out


def _width(tokens: int, bytes_a_token: int) -> int:
    """Tokens of a tile: as few as hold all of them, or as make a tile of y fit a cache."""
    holding = [width for width in _WIDTHS if width < 2 * tokens] or [_WIDTHS[-1]]
    return next((width for width in holding if width * bytes_a_token <= _WARM), 64 if 64 in holding else holding[-1])


def _packed(x: Tensor, width: int, wide: torch.dtype) -> Tensor:
    """x, [tokens, features], as [tiles, features, width]."""
    tokens, features = x.shape
    out = empty([-(-tokens // width), features, width], wide)
    run(PackTokensOp, [x], [out])
    return out
