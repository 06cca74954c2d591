"""Stores floats as integers of 4 or 8 bits with one scale for each 16 of them, as the packing `Groups` does.

    element = integer x scale      integers from -2^(bits - 1) to 2^(bits - 1) - 1, scales of bfloat16 or float32

A product with a scale of bfloat16 is exact; a product with a scale of float32 is rounded to float32. group_scales.py finds the
scales from the elements.

    %w = gossamer::dense_groups(%groups, 3072, 768, 4)       such a weight in a graph

The weight is a single tensor, because each tensor takes time at every call: uint8 [lines, 2 bits]. It has, in this order:

integers  one line for each stored group. With 4 bits, a byte holds two integers, the first in its lower half
scales    of the stored groups, bfloat16, over as many lines as they need
kept      one bit for each group of each row, 1 if it is stored; least significant bit first, in whole bytes for each row
zeros     up to the end of the last line
"""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime.group_scales import scaled
from gossamer.runtime.operations import Operation
from gossamer.runtime.packers.nonzeros import nonzero_mask

_SCALES = {16: torch.bfloat16, 32: torch.float32}

_MOST = 0.9
"""Largest share of stored groups for which this storage pays, so that the scales are searched for."""


def encoded(packing: Groups, elements: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `scales` (their bits in int32) and `values` (uint8) of float32 elements in the order of storage.

    Raises FormatError if the elements of a group are not integers times a scale, with the packing's bits.
    """
    if elements.dtype is not torch.float32:
        raise FormatError(f"{packing} stores float32, the tensor is {elements.dtype}")
    groups = elements.view(-1, packing.COLUMNS)
    found = scaled(groups, packing.bits, _SCALES[packing.scale])
    if found is None:
        raise FormatError(
            f"groups of {packing.COLUMNS} elements are no integers of {packing.bits} bits times a scale of {packing.scale} bits"
        )
    scales, integers = found
    if packing.bits == 8:
        return scales.view(torch.int32), integers.view(torch.uint8).flatten()
    pairs = integers.view(-1, packing.TOGETHER, packing.COLUMNS).view(torch.uint8)
    return scales.view(torch.int32), ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).flatten()


def decoded(packing: Groups, scales: Tensor, values: Tensor) -> Tensor:
    """Returns the elements of `scales` and `values`: the inverse of `encoded`."""
    integers = values.view(torch.int8).view(-1, packing.COLUMNS)
    if packing.bits == 4:
        integers = torch.stack([(integers << 4) >> 4, integers >> 4], 1).view(-1, packing.COLUMNS)
    return _floats(integers, scales.view(_SCALES[packing.scale])).flatten()


def fitting(matrix: Tensor) -> tuple[int, int] | None:
    """Returns the fewest bits of integers and of scales that store the groups along the rows of a float32 matrix.

    Returns None if the elements are not integers times scales, or if less than a tenth of the groups are zeros.
    """
    groups = F.pad(matrix, (0, -matrix.shape[1] % Groups.COLUMNS)).reshape(-1, Groups.COLUMNS)
    stored = groups[nonzero_mask(groups).any(1)]
    if len(stored) > _MOST * len(groups):
        return None
    for bits, (scale, dtype) in product((4, 8), _SCALES.items()):
        if scaled(stored, bits, dtype) is not None:
            return bits, scale
    return None


def _floats(integers: Tensor, scale: Tensor) -> Tensor:
    return integers.float() * scale.float()[:, None] + 0.0  # + 0.0 makes -0.0 to 0.0, whatever the sign of the scale


def joined(codes: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
    """Returns the single tensor of integers [stored groups, 2 bits], uint8, their scales, bfloat16, and bits [rows, groups /
    8], uint8."""
    behind = torch.cat([scale.view(torch.uint8), kept.flatten()])
    lines = F.pad(behind, (0, -len(behind) % codes.shape[1])).view(-1, codes.shape[1])
    return torch.cat([codes, lines])


def parts(groups: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns integers, scales and bits as views: the inverse of `joined`. Raises FormatError if the sizes do not fit."""
    width, each = groups.shape[1], bytes_of_bits(columns)
    count = (groups.numel() - rows * each) // (width + 2)
    if count < 0 or len(groups) != count - (-(2 * count + rows * each) // width):
        raise FormatError(f"{len(groups)} lines of {width} bytes are no groups of {rows} rows and {columns} columns")
    behind = groups[count:].reshape(-1)
    kept = behind[2 * count : 2 * count + rows * each].view(rows, each)
    return groups[:count], behind[: 2 * count].view(torch.bfloat16), kept


def bytes_of_bits(columns: int) -> int:
    """Returns the bytes of the bits of a row, one bit for each group."""
    return -(-columns // (8 * Groups.COLUMNS))


def _dense_groups(groups: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    codes, scale, kept = parts(groups, rows, columns)
    width = Groups.COLUMNS
    count = -(-columns // width)
    dense = torch.zeros(rows, count, width, dtype=torch.float32, device=groups.device)
    integers = codes.view(torch.int8)
    if bits == 4:
        integers = torch.stack([(integers << 4) >> 4, integers >> 4], 2).flatten(1)
    dense[mask_of_groups(kept, count)] = _floats(integers, scale)
    return dense.flatten(1)[:, :columns].contiguous()


def mask_of_groups(kept: Tensor, groups: int) -> Tensor:
    """Returns bits [M, groups / 8], least significant first, as bool [M, groups]."""
    bits = (kept[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=kept.device)) & 1
    return bits.flatten(1)[:, :groups].bool()


def _fake(groups: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    return groups.new_empty((rows, columns), dtype=torch.float32)


dense_groups = Operation(
    "dense_groups(Tensor groups, int rows, int columns, int bits) -> Tensor",
    _dense_groups,
    _dense_groups,
    _fake,
    tags=(torch.Tag.pt2_compliant_tag,),
).register()
"""dense_groups(groups, rows, columns, bits) returns the float32 matrix [rows, columns] that the tensor `groups` stores."""
