"""Floats as integers of 4 or 8 bits and a scale for each 16 of them: what `Groups` stores.

    element = integer x scale      integers from -2^(bits - 1) to 2^(bits - 1) - 1, scales of bfloat16, so that float32 is exact

The scale of a group is found from its elements: its largest is the integer n times the scale, for some n.

    %w = gossamer::dense_groups(%codes, %scale, %kept, 768, 4)       what stands for such a weight in graphs
"""

import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime.operations import LIBRARY


def encoded(packing: Groups, elements: Tensor) -> tuple[Tensor, Tensor]:
    """The `scales`, two of bfloat16 in int32, and the `values`, uint8, of float32 elements in the order of storage.

    FormatError if the elements of a group are not integers of so many bits times any scale.
    """
    if elements.dtype is not torch.float32:
        raise FormatError(f"{packing} stores float32, the tensor is {elements.dtype}")
    groups = elements.view(-1, packing.COLUMNS)
    scales, integers = _on_grid(packing.bits, groups)
    if packing.bits == 8:
        return scales.view(torch.int32), integers.view(torch.uint8).flatten()
    pairs = integers.view(-1, packing.TOGETHER, packing.COLUMNS).view(torch.uint8)
    return scales.view(torch.int32), ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).flatten()


def decoded(packing: Groups, scales: Tensor, values: Tensor) -> Tensor:
    """The inverse of `encoded`."""
    integers = values.view(torch.int8).view(-1, packing.COLUMNS)
    if packing.bits == 4:
        integers = torch.stack([(integers << 4) >> 4, integers >> 4], 1).view(-1, packing.COLUMNS)
    return _floats(integers, scales.view(torch.bfloat16)).flatten()


def _floats(integers: Tensor, scale: Tensor) -> Tensor:
    return integers.float() * scale.float()[:, None] + 0.0  # no -0.0, for other scales give the same elements


def _on_grid(bits: int, groups: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each group, bfloat16, and its integers."""
    most = 1 << bits - 1
    extremes = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scales, integers = torch.ones_like(extremes), torch.zeros(groups.shape, dtype=torch.int8)
    left = (extremes != 0).flatten().nonzero()[:, 0]
    for n in (-most, *range(most - 1, 0, -1)):
        if not len(left):
            break
        scale = extremes[left] / n
        found = (groups[left] / scale).round().clamp_(-most, most - 1)
        fits = (found * scale == groups[left]).all(1) & (scale.bfloat16() == scale).flatten()
        scales[left[fits]], integers[left[fits]] = scale[fits], found[fits].to(torch.int8)
        left = left[~fits]
    if len(left):
        raise FormatError(
            f"{len(left)} groups of {groups.shape[1]} elements are no integers of {bits} bits times a scale of bfloat16"
        )
    return scales.flatten().bfloat16(), integers


def _dense_groups(codes: Tensor, scale: Tensor, kept: Tensor, columns: int, bits: int) -> Tensor:
    width = Groups.COLUMNS
    groups = -(-columns // width)
    dense = torch.zeros(kept.shape[0], groups, width, dtype=torch.float32, device=codes.device)
    integers = codes.view(torch.int8)
    if bits == 4:
        integers = torch.stack([(integers << 4) >> 4, integers >> 4], 2).flatten(1)
    dense[mask_of_groups(kept, groups)] = _floats(integers, scale)
    return dense.flatten(1)[:, :columns].contiguous()


def mask_of_groups(kept: Tensor, groups: int) -> Tensor:
    """Bits [M, groups / 8], least significant first, as bool [M, groups]."""
    bits = (kept[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=kept.device)) & 1
    return bits.flatten(1)[:, :groups].bool()


def _on_meta(codes: Tensor, scale: Tensor, kept: Tensor, columns: int, bits: int) -> Tensor:
    return scale.new_empty((kept.shape[0], columns), dtype=torch.float32)


LIBRARY.define(
    "dense_groups(Tensor codes, Tensor scale, Tensor kept, int columns, int bits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("dense_groups", _dense_groups, "CompositeExplicitAutograd")
LIBRARY.impl("dense_groups", _on_meta, "Meta")

dense_groups = torch.ops.gossamer.dense_groups.default
"""The float32 matrix [M, columns] of groups of 16 along its rows: `codes` [groups stored, 2 bits] uint8, two of 4 bits a byte,
the lower first, `scale` [groups stored] of any float type, `kept` [M, groups / 8] uint8, a bit a group, stored or not."""
