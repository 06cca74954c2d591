"""SDDMM over many tokens at the entries of whole blocks of bf16, as the gradient of a weight in blocks is.

    v[p] = sum_t x[t, r] y[t, c]      →      pack pairs of x, pack pairs of y, a block's sums at once by dot products

The blocks are found in CSR, 32 x 32 or 16 x 16, when a pattern is new.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.remembered import Remembered
from gossamer.runtime.target import host
from gossamer.sparsity.kernels.compile_kernel import RegionKernel, compile_region
from gossamer.sparsity.kernels.warm_memory import empty

_WIDTHS = (32, 16)


@dataclass(frozen=True, eq=False)
class WholeBlocks:
    """A matrix in CSR that consists of blocks: where those of each row of blocks begin, the column of each, counted in blocks,
    and how wide and high they are."""

    positions: Tensor
    coordinates: Tensor
    width: int

    @classmethod
    def of(cls, positions: Tensor, coordinates: Tensor, columns: int) -> "WholeBlocks | None":
        """The blocks of a matrix with ascending columns in its rows; None if there are others."""
        for width in _WIDTHS:
            found = _blocks(positions.long(), coordinates, columns, width)
            if found is not None:
                return cls(*found, width)
        return None

    def sampled(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum over tokens of x[t, row] * y[t, column] for the entries, in the order of CSR; x and y are contiguous."""
        out = empty([self.coordinates.numel() * self.width**2], x.dtype)
        _sample(self.width)([self.positions, self.coordinates, *(_packed(each, self.width) for each in (x, y))], out)
        return out


def whole_blocks(positions: Tensor, coordinates: Tensor, columns: int, dtype: torch.dtype) -> WholeBlocks | None:
    """The blocks of a matrix, which are found once; None where there are none, or no dot products of its type here."""
    if dtype is not torch.bfloat16 or "avx512bf16" not in host().instructions or not coordinates.numel():
        return None
    return _known.get([positions, coordinates], (columns,), lambda: WholeBlocks.of(positions, coordinates, columns))


_known: Remembered[WholeBlocks | None] = Remembered(most=256)


def _blocks(positions: Tensor, coordinates: Tensor, columns: int, width: int) -> tuple[Tensor, Tensor] | None:
    rows, lengths = positions.numel() - 1, positions.diff()
    if rows % width or columns % width or bool((lengths % width).any()):
        return None
    if bool((lengths.view(-1, width) != lengths[::width, None]).any()):
        return None
    runs = coordinates.view(-1, width)  # rows begin at multiples of the width
    starts = runs[:, 0].long()
    if bool((starts % width).any()) or bool((runs - runs[:, :1] != torch.arange(width)).any()):
        return None
    begins = positions // width
    row = torch.repeat_interleave(torch.arange(rows), lengths // width)
    above = begins[row // width * width] + torch.arange(starts.numel()) - begins[row]
    if bool((starts != starts[above]).any()):
        return None
    return (positions[::width] // width**2).int(), (starts[row % width == 0] // width).int()


def _packed(x: Tensor, width: int) -> Tensor:
    tokens, features = x.shape
    out = empty([features // width, -(-tokens // 2), 2 * width], x.dtype)
    _pack(width)([x], out)
    return out


@cache
def _pack(width: int) -> RegionKernel:
    x, packed = "tensor<?x?xbf16>", _pairs(width)
    return compile_region(
        f"""
        func.func @region(%x: {x}) -> {packed} {{
          %packed = "kernel.pack_token_pairs"(%x) : ({x}) -> {packed}
          return %packed : {packed}
        }}""",
        schedule="token-blocks",
    )


@cache
def _sample(width: int) -> RegionKernel:
    integers, packed, values = f"tensor<?x{ELEMENTS[torch.int32]}>", _pairs(width), "tensor<?xbf16>"
    return compile_region(
        f"""
        func.func @region(%positions: {integers}, %coordinates: {integers}, %x: {packed}, %y: {packed}) -> {values} {{
          %values = "kernel.sample_blocks"(%positions, %coordinates, %x, %y)
            : ({integers}, {integers}, {packed}, {packed}) -> {values}
          return %values : {values}
        }}""",
        schedule="token-blocks",
    )


def _pairs(width: int) -> str:
    return f"tensor<?x?x{2 * width}xbf16>"
