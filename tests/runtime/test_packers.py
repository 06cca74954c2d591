"""Packings: the arrays say which element each value is, and are renewed from new values."""

import re

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.packing import Bitmap, Blocks, BlockVectors, Packing, Pairs, Vnni
from gossamer.runtime.packing import Packed, pack


def unsigned(array: Tensor) -> list[int]:
    return array.numpy().view(f"u{array.itemsize}").tolist()


def unpacked_bitmap(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Bitmap)
    positions, masks, values = packed.components
    lanes, dense, at = packed.format.lanes, torch.zeros(rows, columns), 0
    vectors = -(-columns // lanes)
    for row in range(rows):
        assert unsigned(positions)[row] == at
        for vector, mask in enumerate(unsigned(masks)[row * vectors : (row + 1) * vectors]):
            for lane in range(lanes):
                if mask >> lane & 1:
                    dense[row, vector * lanes + lane] = values[at]
                    at += 1
    assert unsigned(positions)[rows] == at == values.numel()
    return dense


def unpacked_vnni(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Vnni)
    positions, coordinates, values = packed.components
    height, width = packed.format.rows, packed.format.columns
    dense = torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    blocks = values.view(-1, height // 16, width // 2, 16, 2)
    for strip in range(-(-rows // height)):
        for p in range(unsigned(positions)[strip], unsigned(positions)[strip + 1]):
            column = unsigned(coordinates)[p] * width
            for half, tile in enumerate(blocks[p]):
                row = strip * height + 16 * half
                dense[row : row + 16, column : column + width] = tile.permute(1, 0, 2).reshape(16, width)
    assert not dense[rows:].any()
    assert not dense[:, columns:].any()
    return dense[:rows, :columns]


def unpacked_pairs(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Pairs)
    positions, coordinates, values = packed.components
    dense, width = torch.zeros(rows, columns), packed.format.width
    for block in range(-(-columns // width)):
        for row in range(rows):
            at = block * rows + row
            begin, end = (2 * unsigned(positions)[i] for i in (at, at + 1))
            for column, value in zip(unsigned(coordinates)[begin:end], values[begin:end], strict=True):
                dense[row, block * width + column] += value
    return dense


def unpacked_blocks(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Blocks)
    positions, coordinates, values = packed.components
    r, c, width = packed.format.rows, packed.format.columns, packed.format.width
    high, dense = -(-rows // r), torch.zeros(rows + r, columns + width)
    blocks = values.view(-1, c, r)
    for line, (begin, end) in enumerate(zip(unsigned(positions)[:-1], unsigned(positions)[1:], strict=True)):
        for p in range(begin, end):
            row, column = line % high * r, line // high * width + unsigned(coordinates)[p]
            dense[row : row + r, column : column + c] = blocks[p].t()
    assert not dense[rows:].any()
    assert not dense[:, columns:].any()
    return dense[:rows, :columns]


def unpacked_vectors(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, BlockVectors)
    positions, coordinates, values = packed.components
    r, c, depth = packed.format.rows, packed.format.columns, packed.format.depth
    dense, blocks = torch.zeros(rows + r, columns + c * depth), values.view(-1, depth, r, c)
    for line, (begin, end) in enumerate(zip(unsigned(positions)[:-1], unsigned(positions)[1:], strict=True)):
        for p in range(begin, end):
            row, column = line * r, unsigned(coordinates)[p] * c
            dense[row : row + r, column : column + depth * c] = blocks[p].transpose(0, 1).reshape(r, depth * c)
    assert not dense[rows:].any()
    assert not dense[:, columns:].any()
    return dense[:rows, :columns]


UNPACKED = {
    Bitmap: unpacked_bitmap,
    Vnni: unpacked_vnni,
    Pairs: unpacked_pairs,
    Blocks: unpacked_blocks,
    BlockVectors: unpacked_vectors,
}
PACKINGS = [
    Bitmap(1, 16),
    Bitmap(0, 8),
    Vnni(1, 32, 32),
    Vnni(0, 16, 4),
    Pairs(1, 16),
    Pairs(0, 64),
    Blocks(1, 4, 2, 16),
    Blocks(0, 1, 3, 6),
    BlockVectors(1, 4, 4, 2),
    BlockVectors(0, 16, 1, 1),
]
SHAPES = [(7, 40), (16, 16), (1, 1), (33, 50), (0, 4), (4, 0)]


def weight(rows: int, columns: int, density: float = 0.4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * (torch.rand(rows, columns) < density)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_comes_back(packing: Packing, shape: tuple[int, int]) -> None:
    dense = weight(*shape)
    packed = pack(dense if packing.reduction == 1 else dense.t().contiguous(), packing)
    assert torch.equal(UNPACKED[type(packing)](packed, *shape), dense)
    assert [c.ndim for c in packed.components] == [1] * len(packing.components())
    assert [c.itemsize * 8 for c in packed.components] == [c.bits or 32 for c in packing.components()]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_new_values_are_taken_over_and_a_new_pattern_is_not(packing: Packing) -> None:
    dense = weight(70, 70)
    dense[32:] = dense[:, 32:] = 0  # whole blocks
    packed = pack(dense, packing)
    assert packed.matches(dense)
    assert not packed.matches(2 * dense)
    assert packed.refresh(2 * dense)
    assert packed.matches(2 * dense)
    assert torch.equal(packed.values, pack(2 * dense, packing).values)
    assert not packed.refresh(dense + 1)
    assert packed.matches(2 * dense)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(FormatError, match=re.escape("bitmap(reduction=1, lanes=16) stores matrices, the shape is (2, 3, 4)")):
        pack(torch.ones(2, 3, 4), Bitmap(1, 16))
