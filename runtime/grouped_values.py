"""Floats as integers of 4 or 8 bits and a scale for each 16 of them: what `Groups` stores.

    element = integer x scale      integers from -2^(bits - 1) to 2^(bits - 1) - 1, scales of bfloat16 or float32

A product with a scale of bfloat16 is exact, one with another is rounded to float32. The scales are found from the elements (see
group_scales.py).

    %w = gossamer::dense_groups(%groups, 3072, 768, 4)       what stands for such a weight in graphs

A matrix of them is one tensor, for each one costs at every call: uint8 [lines, 2 bits], the integers of each stored group in a
line, two of 4 bits a byte, the first in its lower half; then, in as many lines as it takes, the scales of the groups, and a bit
for each group of a row, stored or not, least significant first, in whole bytes for each row; zeros up to the last line's end.
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
"""Share of groups that are stored up to which it is worth asking what they are."""


def encoded(packing: Groups, elements: Tensor) -> tuple[Tensor, Tensor]:
    """The `scales`, in int32, and the `values`, uint8, of float32 elements in the order of storage.

    FormatError if the elements of a group are not integers of so many bits times a scale of so many.
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
    """The inverse of `encoded`."""
    integers = values.view(torch.int8).view(-1, packing.COLUMNS)
    if packing.bits == 4:
        integers = torch.stack([(integers << 4) >> 4, integers >> 4], 1).view(-1, packing.COLUMNS)
    return _floats(integers, scales.view(_SCALES[packing.scale])).flatten()


def fitting(matrix: Tensor) -> tuple[int, int] | None:
    """The bits of the integers, and of the scales, that store the groups of a float32 matrix along its rows, as few as can be.

    None for groups that are none, and where less than a tenth of them are zeros.
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
    return integers.float() * scale.float()[:, None] + 0.0  # no -0.0, for other scales give the same elements


def joined(codes: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
    """One tensor of integers [groups stored, 2 bits] uint8, their scales, bfloat16, and bits [rows, groups / 8] uint8."""
    behind = torch.cat([scale.view(torch.uint8), kept.flatten()])
    lines = F.pad(behind, (0, -len(behind) % codes.shape[1])).view(-1, codes.shape[1])
    return torch.cat([codes, lines])


def parts(groups: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The integers, scales and bits of a matrix of this size, as views. FormatError if it is none of this size."""
    width, each = groups.shape[1], bytes_of_bits(columns)
    count = (groups.numel() - rows * each) // (width + 2)
    if count < 0 or len(groups) != count - (-(2 * count + rows * each) // width):
        raise FormatError(f"{len(groups)} lines of {width} bytes are no groups of {rows} rows and {columns} columns")
    behind = groups[count:].reshape(-1)
    kept = behind[2 * count : 2 * count + rows * each].view(rows, each)
    return groups[:count], behind[: 2 * count].view(torch.bfloat16), kept


def bytes_of_bits(columns: int) -> int:
    """Of a row: a bit for each of its groups."""
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
    """Bits [M, groups / 8], least significant first, as bool [M, groups]."""
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
"""The float32 matrix [rows, columns] of groups of 16 along its rows, which are one tensor of `bits`."""
