"""Stores tables in less memory, in the form for `gossamer::sum_bags`. nonzero_rows.py has tables of nonzeros.

tables  [rows, columns] of int8 or float16, or uint8 [rows, (columns + 1) / 2] with signed integers of four bits: byte k has
        column k in its low bits and column (columns + 1) / 2 + k in its high bits
scales  [rows], f32, the factor of a row of integers; empty for float16
"""

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.bags.nonzero_rows import bytes_of_bits, rows_of

_MOST = {8: 127, 4: 7}


def quantized_rows(table: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns a table in 16, 8 or 4 bits, in the form for the operation, and the scales of its rows.

    Integers are symmetric. For 4 bits, a few scales are tried for each row, and the one with the least squared error is taken.
    It may clip the largest elements.
    """
    wide = table.detach().float()
    if bits == 16:
        return wide.half(), wide.new_empty(0)
    most = _MOST[bits]
    largest = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) if wide.shape[1] else wide.new_ones(len(wide))
    shares = (1.0,) if bits == 8 else (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
    best, codes, scales = torch.full_like(largest, torch.inf), torch.zeros_like(wide, dtype=torch.int8), largest / most
    for share in shares:
        scale = largest * (share / most)
        rounded = (wide / scale[:, None]).round_().clamp_(-most, most)
        error = (rounded * scale[:, None] - wide).square_().sum(1)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        codes = torch.where(better[:, None], rounded.to(torch.int8), codes)
    return (codes if bits == 8 else _in_pairs(codes)), scales


def is_of_nonzeros(scale: Tensor | None) -> bool:
    """Whether a table stores nonzeros: then it has bits in place of scales."""
    return scale is not None and scale.dtype is torch.uint8


def check_table(table: Tensor, columns: int, scale: Tensor | None) -> None:
    """ArgumentError unless a table has this number of columns and, if it is in few bits, the right dtype and scales."""
    if scale is not None and is_of_nonzeros(scale):
        width = bytes_of_bits(columns)
        if table.dtype is not torch.float32 or table.dim() != 1 or scale.dim() != 2 or scale.shape[1] != width:
            raise ArgumentError(
                f"sum_bags: nonzeros {table.dtype} {list(table.shape)} and bits {list(scale.shape)} must be float32 "
                f"[nonzeros] and [rows, {width}]"
            )
        return
    width, is_float = -(-columns // 2) if table.dtype is torch.uint8 else columns, table.is_floating_point()
    if table.dim() != 2 or table.shape[1] != width:
        raise ArgumentError(f"sum_bags: a table of {table.dtype} {list(table.shape)} must be [rows, {width}]")
    if scale is None:
        return
    if table.dtype not in (torch.int8, torch.uint8, torch.float16, torch.bfloat16):
        raise ArgumentError(f"sum_bags: a table in few bits is {table.dtype}, must be int8, uint8, float16 or bfloat16")
    if not is_float and not (scale.dtype is torch.float32 and scale.shape == table.shape[:1] and scale.is_contiguous()):
        raise ArgumentError(
            f"sum_bags: scales are {scale.dtype} {list(scale.shape)}, must be float32 [{table.shape[0]}], contiguous"
        )


def floats_of(table: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Returns a stored table as f32 [rows, columns]."""
    if is_of_nonzeros(scales):
        return rows_of(table, scales, columns)
    if table.dtype is torch.uint8:
        signed = table.view(torch.int8)
        table = torch.cat([(signed << 4) >> 4, signed >> 4], 1)[:, :columns]
    return table.float() if table.is_floating_point() else table.float() * scales[:, None]


def _in_pairs(codes: Tensor) -> Tensor:
    half = -(-codes.shape[1] // 2)
    high = torch.nn.functional.pad(codes[:, half:], (0, 2 * half - codes.shape[1]))
    return ((codes[:, :half] & 15) | (high << 4)).view(torch.uint8)
