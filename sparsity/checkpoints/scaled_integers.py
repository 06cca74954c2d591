"""Converts weights that compressed-tensors (llm-compressor) stores as integers or 8-bit floats with scales to floats.

w[m, k] = (q[m, k] - z[m, group of k]) scale[m, group of k]      pruned weights have q = z, so they stay zeros

    weight_packed   int32 [rows, ceil(columns bits / 32)]: q + 2^(bits - 1), each with that many bits, least significant first;
                    or in its place
    weight          int8 or 8-bit floats, [rows, columns], maybe from a bitmask
    weight_scale    [] or [1] for the tensor, [rows, 1] for rows, [rows, groups], or [rows of blocks, columns of blocks]
    weight_zero_point   integers of the shape of the scales, or int32 [ceil(rows bits / 32), groups], packed along rows
    weight_g_idx    the group of each column, if columns were reordered
    weight_shape    the shape of the weight, if it is packed
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError

PACKED, SCALE = "weight_packed", "weight_scale"
BESIDE = (SCALE, "weight_zero_point", "weight_g_idx", "weight_shape")
"""Tensors that a file may have in addition to the integers of a layer."""


def is_scaled(weight: Tensor) -> bool:
    """Whether a weight in a file needs scales."""
    return weight.dtype == torch.int8 or (weight.is_floating_point() and weight.itemsize == 1)


def floats_of(name: str, arrays: Mapping[str, Tensor]) -> Tensor:
    """Returns the weight of these arrays, named as above, in the dtype of its scales.

    FormatError, with the weight's name, if the arrays do not fit together.
    """
    packed, scale = arrays.get(PACKED), arrays[SCALE]
    zero = arrays.get("weight_zero_point")
    if packed is None:
        codes = arrays["weight"]
    else:
        rows, columns = _shape(name, arrays)
        bits = _bits(name, packed, rows, columns)
        codes = _unpacked(packed, bits, columns)
        if zero is not None and zero.dtype == torch.int32:
            zero = _unpacked(zero.t(), bits, rows).t()
    if codes.dim() != 2 or not scale.is_floating_point():
        raise FormatError(
            f"'{name}': {codes.dtype} {tuple(codes.shape)} with scales of {scale.dtype} is no weight that Gossamer reads"
        )
    by = arrays.get("weight_g_idx")
    spread = _spread(name, scale, codes.shape, by)
    values = codes.float() if zero is None else codes.float() - _spread(name, zero.float(), codes.shape, by)
    return (values * spread.float()).to(scale.dtype)


def _shape(name: str, arrays: Mapping[str, Tensor]) -> tuple[int, int]:
    shape = arrays.get("weight_shape")
    if shape is None or shape.numel() != 2 or int(shape.min()) < 0 or int(shape[0]) != len(arrays[PACKED]):
        said = "there is none" if shape is None else f"it is {shape.tolist()}"
        raise FormatError(f"'{name}': weight_shape must be rows and columns of what is packed, {said}")
    return int(shape[0]), int(shape[1])


def _bits(name: str, packed: Tensor, rows: int, columns: int) -> int:
    """Returns the bits of a code, from the width of packed rows. For narrow rows several fit; the usual 4 and 8 come first."""
    words = packed.shape[1] if packed.dim() == 2 else -1
    fitting = [bits for bits in (4, 8, 2, 3, 6, 5, 7, 1) if -(-columns * bits // 32) == words]
    if not fitting or packed.dtype != torch.int32:
        raise FormatError(f"'{name}': {packed.dtype} {tuple(packed.shape)} does not pack {rows} x {columns} integers")
    return fitting[0]


def _unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Unpacks int32 [rows, words] to codes, int8 [rows, columns]."""
    starts = torch.arange(columns) * bits
    words = torch.cat([packed, packed.new_zeros(len(packed), 1)], 1).long() & 0xFFFFFFFF
    word, shift = starts // 32, starts % 32
    low, high = words[:, word] >> shift, words[:, word + 1] << (32 - shift)
    return (((low | high) & ((1 << bits) - 1)) - (1 << bits - 1)).to(torch.int8)


def _spread(name: str, scale: Tensor, shape: torch.Size, by: Tensor | None) -> Tensor:
    """Returns scales, or zero points, for each element."""
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, columns)
    scale = scale[:, None] if scale.dim() == 1 else scale
    if by is not None and len(by) == columns and int(by.max()) < scale.shape[1] and int(by.min()) >= 0:
        return scale[:, by.long()]
    height, width = (-(-size // count) if count else 0 for size, count in zip(shape, scale.shape, strict=True))
    if height == 0 or width == 0 or (-(-rows // height), -(-columns // width)) != tuple(scale.shape):
        raise FormatError(f"'{name}': scales of shape {tuple(scale.shape)} do not fit {rows} x {columns} integers")
    return scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
