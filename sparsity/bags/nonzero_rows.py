"""Stores tables as nonzeros, in the form for `gossamer::sum_bags`. They may have rows of zeros, or zeros anywhere.

nonzeros  f32, row by row
bits      uint8 [rows, 2 x columns / 16, rounded up]: bit c % 8 of byte c / 8 says whether column c is a nonzero

With 64 columns and 90 % zeros, a row takes 34 bytes in place of 256, and a row of zeros takes 8. The starts of rows are
computed from the bits once, and take 4 bytes for each row.
"""

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.remembered import Remembered

_ONES = torch.tensor([number.bit_count() for number in range(256)], dtype=torch.uint8)
_starts = Remembered[Tensor]()


def nonzero_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nonzeros of a table and their bits. ArgumentError for 2^31 nonzeros or more."""
    there = table.detach() != 0
    values = table.detach()[there].float()
    if len(values) >= 1 << 31:
        raise ArgumentError(f"a table of {len(values)} nonzeros cannot be stored: there may be at most 2^31")
    padded = torch.nn.functional.pad(there, (0, -there.shape[1] % 16))
    return values, torch.from_numpy(np.packbits(padded.numpy(), axis=1, bitorder="little"))


def bytes_of_bits(columns: int) -> int:
    """Returns the number of bytes for the bits of a row."""
    return 2 * -(-columns // 16)


def starts_of(nonzeros: Tensor, bits: Tensor) -> Tensor:
    """Returns where the nonzeros of each row begin: [rows], int32. ArgumentError if the numbers of bits and nonzeros differ."""
    return _starts.get([bits, nonzeros], (), lambda: _counted(nonzeros, bits))


def rows_of(nonzeros: Tensor, bits: Tensor, columns: int) -> Tensor:
    """Returns the table as f32 [rows, columns]."""
    each = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    there = each.flatten(1)[:, :columns].bool()
    return nonzeros.new_zeros(there.shape).masked_scatter(there, nonzeros)


def _counted(nonzeros: Tensor, bits: Tensor) -> Tensor:
    counts = _ONES[bits.int()].sum(1, dtype=torch.int64)
    ends = counts.cumsum(0)
    if int(counts.sum()) != len(nonzeros):
        raise ArgumentError(f"a table has {len(nonzeros)} nonzeros and {int(counts.sum())} bits that are set")
    return (ends - counts).int()
