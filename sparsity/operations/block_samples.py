"""Computes SDDMM over many tokens for entries in whole blocks of bf16, such as the gradient of a weight in blocks.

    v[p] = sum_t x[t, r] y[t, c]      →      pack pairs of x, pack pairs of y, a block's sums at once by dot products

It looks for blocks of 32 x 32 or 16 x 16 in CSR when a pattern is new.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.dialects.token_tiles import PackTokenPairsOp, SampleBlocksOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.remembered import Remembered
from gossamer.runtime.target import host
from gossamer.sparsity.compiler.op_kernels import run

_WIDTHS = (32, 16)


@dataclass(frozen=True, eq=False)
class WholeBlocks:
    """A matrix in CSR that consists of square blocks.

    positions    where each row of blocks begins
    coordinates  the column of each block, counted in blocks
    width        rows and columns of a block
    """

    positions: Tensor
    coordinates: Tensor
    width: int

    @classmethod
    def of(cls, positions: Tensor, coordinates: Tensor, columns: int) -> "WholeBlocks | None":
        """Returns the blocks of a matrix with ascending columns in its rows, None if it has entries in no whole block."""
        for width in _WIDTHS:
            found = _blocks(positions.long(), coordinates, columns, width)
            if found is not None:
                return cls(*found, width)
        return None

    def sampled(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the sum over tokens of x[t, row] * y[t, column] for each entry, in the order of CSR. x, y: contiguous."""
        out = empty([self.coordinates.numel() * self.width**2], x.dtype)
        run(SampleBlocksOp, [self.positions, self.coordinates, *(_packed(each, self.width) for each in (x, y))], [out])
        return out


def whole_blocks(positions: Tensor, coordinates: Tensor, columns: int, dtype: torch.dtype) -> WholeBlocks | None:
    """Returns the blocks of a matrix (remembered), None if it has none, or this CPU has no dot products of its dtype."""
    multiplies = dtype is torch.bfloat16 and "bf16dots" in host().instructions and host().vector_bits == 512
    if not multiplies or not coordinates.numel():
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
    run(PackTokenPairsOp, [x], [out])
    return out
