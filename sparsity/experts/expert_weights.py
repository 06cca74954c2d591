"""The weight of one of several experts, kept as floats or as integers with scales."""

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError

INTEGERS = (torch.int8, torch.uint8)


def check_weight(name: str, weight: Tensor, scales: Tensor | None, columns: int, dtype: torch.dtype) -> None:
    """ArgumentError unless a weight [experts, rows, columns] is of this type, or of int8 or pairs of 4 bits with scales.

    scales  [experts, rows, groups]: one for each columns / groups integers of a row
    """
    if weight.dtype not in INTEGERS:
        if scales is not None:
            raise ArgumentError(f"{name} is {weight.dtype}, only weights of int8 and uint8 have scales")
        if weight.dtype != dtype:
            raise ArgumentError(f"{name} is {weight.dtype}, the tokens are {dtype}: convert one with .to(dtype)")
        stored = columns
    else:
        if scales is None or not scales.is_floating_point():
            raise ArgumentError(f"{name} of {weight.dtype} needs scales, floats [experts, rows, groups]")
        stored = columns if weight.dtype == torch.int8 else columns // 2
        if scales.shape[:2] != weight.shape[:2] or scales.dim() != 3:
            raise ArgumentError(f"the scales of {name} are {[*scales.shape]}, must be {[*weight.shape[:2]]} and groups")
        groups = scales.shape[2]
        if groups < 1 or columns % groups or (weight.dtype == torch.uint8 and columns // groups % 2):
            raise ArgumentError(f"the scales of {name} make {groups} groups of {columns} columns, which must be of one size")
    if weight.shape[2] != stored:
        raise ArgumentError(f"{name} has {weight.shape[2]} columns, tokens of {columns} elements need {stored}")


def floats_of(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A weight [..., rows, columns] in this type: uint8 holds two integers of 4 bits, the first in its lower half."""
    if scales is None:
        return weight.to(dtype)
    integers = weight
    if weight.dtype == torch.uint8:
        halves = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).to(torch.int8)
        integers = torch.where(halves > 7, halves - 16, halves)
    wide = torch.promote_types(scales.dtype, torch.float32)
    grouped = integers.unflatten(-1, (scales.shape[-1], -1)).to(wide) * scales.to(wide)[..., None]
    return grouped.flatten(-2).to(dtype)
