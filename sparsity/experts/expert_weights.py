"""`Weight`: the weights of several experts, as floats or as integers with scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError

INTEGERS = (torch.int8, torch.uint8)


@dataclass(frozen=True)
class Weight:
    """A linear layer for each expert.

    values  [experts, rows, columns]: floats, or int8, or uint8 with two integers of 4 bits, the first in the lower half
    scales  for integers: [experts, rows, groups], one for each columns / groups integers of a row
    bias    [experts, rows]
    """

    values: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @property
    def rows(self) -> int:
        """The rows of an expert's weight."""
        return self.values.shape[1]

    @property
    def columns(self) -> int:
        """The columns of an expert's weight."""
        return self.values.shape[2] * (2 if self.four else 1)

    @property
    def four(self) -> bool:
        """Whether the values are integers of 4 bits."""
        return self.values.dtype == torch.uint8

    def check(self, name: str, columns: int, dtype: torch.dtype) -> None:
        """ArgumentError unless the weight fits tokens with this number of columns and dtype."""
        values, scales = self.values, self.scales
        if values.dtype not in INTEGERS:
            if scales is not None:
                raise ArgumentError(f"{name} is {values.dtype}, only weights of int8 and uint8 have scales: leave them out")
            if values.dtype != dtype:
                raise ArgumentError(f"{name} is {values.dtype}, the tokens are {dtype}: convert one with .to(dtype)")
        elif scales is None or not scales.is_floating_point():
            raise ArgumentError(f"{name} of {values.dtype} needs scales, floats [experts, rows, groups]")
        elif scales.dim() != 3 or scales.shape[:2] != values.shape[:2]:
            raise ArgumentError(f"the scales of {name} are {[*scales.shape]}, must be {[*values.shape[:2]]} and groups")
        if self.columns != columns:
            raise ArgumentError(f"{name} has {self.columns} columns, the tokens have {columns} elements: both must be equal")
        groups = 1 if scales is None else scales.shape[2]
        if groups < 1 or columns % groups or (self.four and columns // groups % 2):
            raise ArgumentError(f"the scales of {name} make {groups} groups of {columns} columns, which must be of one size")

    def turned(self, dtype: torch.dtype) -> "Weight":
        """Returns the transposed weight of each expert, as floats of this dtype, without the bias."""
        values = self.values if self.scales is None else floats_of(self.values, self.scales, dtype)
        return Weight(values.mT, None, None)

    def of(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns the weight of an expert as floats, and its bias."""
        own = floats_of(self.values[expert], None if self.scales is None else self.scales[expert], dtype)
        return own, None if self.bias is None else self.bias[expert].to(dtype)


def floats_of(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns a weight [..., rows, columns] as floats of this dtype."""
    if scales is None:
        return values.to(dtype)
    integers = values
    if values.dtype == torch.uint8:
        halves = torch.stack([values & 15, values >> 4], -1).flatten(-2).to(torch.int8)
        integers = torch.where(halves > 7, halves - 16, halves)
    wide = torch.promote_types(scales.dtype, torch.float32)
    grouped = integers.unflatten(-1, (scales.shape[-1], -1)).to(wide) * scales.to(wide)[..., None]
    return grouped.flatten(-2).to(dtype)
