"""`GroupedLinear` is an nn.Linear whose weight has groups of 16 integers along its rows, kept or dropped, each with a scale.

y[t, m] = sum_k x[t, k] w[m, k] + bias[m]        w[m, 16 g + i] = scale[m, g] q[m, g, i], or 0 if the group is dropped

It is for the few tokens of a decoder, which spends its time on reading weights: a kept group has 8 bytes (4 bits) or 16
(8 bits), and a scale (GQSA, Zeng et al., 2025). Inputs stay floats.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.dialects.errors import FormatError, GossamerError
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime.grouped_values import dense_groups, joined, mask_of_groups, parts
from gossamer.sparsity.quantization.kept_types import KeepsTypes
from gossamer.sparsity.quantization.quantized_linear import check_finite

GROUP = Groups.COLUMNS


class GroupedLinear(KeepsTypes, nn.Linear):
    """A linear layer with a weight of 4- or 8-bit integers in groups.

    weight_groups  uint8 [lines, 8 or 16]: a line with the integers of each kept group, then all scales and the bits of kept
                   groups (see runtime/grouped_values.py); one buffer, because torch.compile checks each before every call
    weight_codes   [groups kept, 8 or 16], uint8: signed integers; of 4 bits two in a byte, the first in its lower half
    weight_scale   [groups kept], bfloat16
    weight_kept    [out_features, groups / 8], uint8: a bit for each group, least significant first
    weight         the weight as floats, in its original dtype or that of a conversion; computed at each access, never written

    The input has any floating type, [..., in_features]; the result has the same type, and sums are in float32. The weight has
    no gradient. Checkpoints may keep other groups, and another number of groups.
    """

    weight_groups: Tensor
    _bits: int

    @classmethod
    def of(cls, linear: nn.Linear, bits: int) -> Self:
        """Turns a linear layer into a quantized one in place, so that hooks on it and references to it stay valid.

        GossamerError if its weight has a NaN or an infinity, or more columns than the packing can number.
        """
        weight = linear.weight.detach()
        groups = grouped(weight, bits)
        del linear._parameters["weight"]
        return cls.become(linear, groups, weight.dtype)

    @classmethod
    def become(cls, linear: nn.Linear, groups: Tensor, dtype: torch.dtype) -> Self:
        """Turns a linear layer without a weight into one with these groups, in place; `dtype` is that of `weight`."""
        linear.__class__ = cls
        made: Any = linear
        made._dtype, made._bits = dtype, groups.shape[1] * 8 // GROUP
        made.register_buffer("weight_groups", groups)
        return made

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as floats."""
        return self._floats().to(self._dtype)

    @property
    def weight_codes(self) -> Tensor:
        """The integers, a view of `weight_groups`."""
        return self._parts[0]

    @property
    def weight_scale(self) -> Tensor:
        """The scales, a view of `weight_groups`."""
        return self._parts[1]

    @property
    def weight_kept(self) -> Tensor:
        """The bits of kept groups, a view of `weight_groups`."""
        return self._parts[2]

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return parts(self.weight_groups, self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Computes what nn.Linear computes, with sums in float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self._floats(), bias).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int{self._bits} in groups of {GROUP}"

    def check_groups(self, name: str, groups: Tensor) -> None:
        """FormatError, with the layer's name, if groups do not fit this layer."""
        width = self.weight_groups.shape[1]
        if groups.dtype != torch.uint8 or groups.dim() != 2 or groups.shape[1] != width:
            raise FormatError(f"'{name}': its groups are lines of {width} bytes, not {groups.dtype} {tuple(groups.shape)}")
        try:
            codes, _, kept = parts(groups, self.out_features, self.in_features)
        except FormatError as problem:
            raise FormatError(f"'{name}': {problem}") from None
        here = mask_of_groups(kept, -(-self.in_features // GROUP))
        beyond = int(mask_of_groups(kept, kept.shape[1] * 8).sum()) - int(here.sum())
        if beyond or int(here.sum()) != len(codes):
            raise FormatError(f"'{name}': its bits keep {int(here.sum()) + beyond} groups, there are {len(codes)}")

    def _floats(self) -> Tensor:
        return dense_groups(self.weight_groups, self.out_features, self.in_features, self._bits)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads as nn.Linear does, also another number of groups."""
        given = state_dict.get(prefix + "weight_groups")
        if given is not None:
            self.check_groups(prefix.removesuffix("."), given)
            self.make_room(given)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def make_room(self, given: Tensor) -> None:
        """Gives the buffer the size of other groups, because its size depends on the number of kept groups."""
        if self.weight_groups.shape != given.shape:
            self.weight_groups = self.weight_groups.new_empty(given.shape)


def grouped(weight: Tensor, bits: int) -> Tensor:
    """Returns a matrix as `weight_groups`. It keeps groups with a nonzero.

    For each group it tries two scales, which map the largest element to -2^(bits - 1), or to at most 2^(bits - 1) - 1. It takes
    the one with the smaller squared error. GossamerError for matrices that are not finite, or have too many columns.
    """
    check_finite(weight)
    check_columns(weight.shape[1])
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    mask = (groups != 0).any(2)
    codes, scale = _rounded(groups[mask], 1 << bits - 1)
    if bits == 4:
        codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    places = 1 << torch.arange(8, device=weight.device)
    kept = (F.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)) * places).sum(2).to(torch.uint8)
    return joined(codes.view(torch.uint8), scale, kept)


def check_columns(columns: int) -> None:
    """GossamerError for more columns than the packing of kernels can number."""
    if columns > Groups.WIDEST:
        raise GossamerError(
            f"a weight of {columns} columns has too many for groups: at most {Groups.WIDEST}. `skip` this layer, "
            "or use int8 without groups"
        )


def _rounded(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the integers, int8, and the scale of each group, bfloat16."""
    if not len(groups):
        return groups.to(torch.int8), groups.new_zeros(0, dtype=torch.bfloat16)
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    least = torch.finfo(torch.bfloat16).tiny
    ways = []
    for scale in (extreme / -most, extreme.abs() / (most - 1)):
        away = scale.abs() < least
        scale = torch.where(away, torch.full_like(scale, least), scale).to(torch.bfloat16)
        integers = (groups / scale.float()).round().clamp_(-most, most - 1)
        ways.append((integers.to(torch.int8), scale, (integers * scale.float() - groups).square().sum(1, keepdim=True)))
    (low, low_scale, low_error), (high, high_scale, high_error) = ways
    better = low_error < high_error
    return torch.where(better, low, high), torch.where(better, low_scale, high_scale).flatten()
