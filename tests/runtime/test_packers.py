"""Packings: the arrays say which element each value is, and are renewed from new values."""

import re

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.packing import (
    Blocks,
    BlockVectors,
    ByteWindows,
    Packing,
    Padded,
    Pairs,
    Panels,
    Quads,
    RowPairs,
    TileMap,
    Vnni,
    VnniMap,
    Windows,
)
from gossamer.runtime.packing import Packed, pack


def unsigned(array: Tensor) -> list[int]:
    return array.numpy().view(f"u{array.itemsize}").tolist()


def unpacked_windows(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Windows)
    lanes = packed.format.lanes
    bounds, origins, places, values = (
        array.view(-1, n) for array, n in zip(packed.components, (4, 1, lanes, lanes), strict=True)
    )
    # Of 64 lanes the bytes are in the order in which instructions put floats together.
    lane_of = torch.arange(lanes).view(4, 4, -1).transpose(0, 1).flatten().tolist() if lanes == 64 else range(lanes)
    dense, step = torch.zeros(-(-rows // lanes) * lanes, (-(-columns // lanes) + 1) * lanes), 0
    for group, (first, begin, middle, end) in enumerate(bounds.tolist()):
        assert step == first
        for run in range(begin, end):
            for _ in range(3 if run < middle else 2):
                for lane, place in zip(lane_of, unsigned(places[step]), strict=True):
                    assert place == 0 or 128 <= place < 128 + 2 * lanes
                    assert place or values[step, lane] == 0
                    if place:
                        dense[group * lanes + lane, int(origins[run]) * lanes + place - 128] += values[step, lane]
                step += 1
    assert step == len(values)
    assert not dense[rows:].any()
    assert not dense[:, columns:].any()
    return dense[:rows, :columns]


def unpacked_padded(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Padded)
    positions, coordinates, values = packed.components
    width = packed.format.columns
    panels = -(-columns // width)
    dense = torch.zeros(rows, panels, width)
    for line, (begin, end) in enumerate(zip(unsigned(positions)[:-1], unsigned(positions)[1:], strict=True)):
        assert (end - begin) % 4 == 0
        for scaled, value in zip(unsigned(coordinates)[begin:end], values[begin:end], strict=True):
            dense[line % rows, line // rows, scaled // 8] += value
    return dense.reshape(rows, panels * width)[:, :columns]


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


def unpacked_quads(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Quads)
    positions, coordinates, values = packed.components
    r, width = packed.format.rows, packed.format.width
    high, dense, blocks = -(-rows // r), torch.zeros(rows + r, columns + width), values.view(-1, r, 4)
    for line, (begin, end) in enumerate(zip(unsigned(positions)[:-1], unsigned(positions)[1:], strict=True)):
        assert (end - begin) % 4 == 0
        for p in range(begin, end):
            row, column = line % high * r, line // high * width + 4 * unsigned(coordinates)[p]
            dense[row : row + r, column : column + 4] += blocks[p]
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


def unpacked_vnnimap(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, VnniMap)
    positions, masks, values = packed.components
    height, wide = packed.format.rows, -(-columns // packed.format.COLUMNS) * packed.format.COLUMNS
    dense, at = torch.zeros(-(-rows // height) * height, wide), 0
    lines = iter(unsigned(masks))
    for strip in range(0, rows, height):
        assert unsigned(positions)[strip // height] == at
        for column in range(0, wide, 2):
            for half in range(strip, strip + height, 16):
                mask = next(lines)
                for bit in range(32):
                    if mask >> bit & 1:
                        dense[half + bit // 2, column + bit % 2] = values[at]
                        at += 1
    assert not list(lines)
    assert at + 32 == values.numel()
    return dense[:rows, :columns]


def unpacked_tilemap(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, TileMap)
    positions, masks, values = packed.components
    wide = -(-columns // packed.format.columns) * packed.format.columns
    dense, at = torch.zeros(-(-rows // 16) * 16, wide), 0
    lines = iter(unsigned(masks))
    for strip in range(0, rows, 16):
        assert unsigned(positions)[strip // 16] == at
        for column in range(0, wide, packed.format.columns):
            for row in range(strip, strip + 16):
                mask = next(lines)
                for bit in range(packed.format.columns):
                    if mask >> bit & 1:
                        dense[row, column + bit] = values[at]
                        at += 1
    assert not list(lines)
    assert at + packed.format.columns == values.numel()
    return dense[:rows, :columns]


def unpacked_byte_windows(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, ByteWindows)
    positions, windows, *order, places, values = packed.components
    strips, begins = -(-rows // 16), unsigned(positions)
    of_row = order[0].argsort()[:rows] if order else torch.arange(rows)
    assert not order or sorted(unsigned(order[0])) == list(range(strips * 16))
    dense = torch.zeros(strips * 16, -(-columns // 64) * 64)
    for strip in range(strips):
        of_strip = unsigned(windows)[begins[strip] : begins[strip + 1]]
        assert of_strip == sorted(of_strip)
        for at, window in enumerate(of_strip, begins[strip]):
            wanted, found = (array[64 * at : 64 * (at + 1)] for array in (unsigned(places), values.tolist()))
            for i, (place, value) in enumerate(zip(wanted, found, strict=True)):
                dense[strip * 16 + i // 4, window * 32 + place] += value
    assert begins[strips] == len(windows) == values.numel() // 64
    return dense[of_row, :columns]


def unpacked_panels(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, Panels)
    positions, coordinates, values = packed.components
    height, width = packed.format.rows, packed.format.width
    wide = 64 if width in (4, 64) else 32
    each, dense = wide // width, torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    for strip in range(-(-rows // height)):
        for p in range(unsigned(positions)[strip], unsigned(positions)[strip + 1]):
            where = [width * c + i for c in unsigned(coordinates)[each * p : each * (p + 1)] for i in range(width)]
            tiles = values[wide * height * p : wide * height * (p + 1)].view(height, wide)
            dense[strip * height : (strip + 1) * height].index_add_(1, torch.tensor(where), tiles)
    assert not dense[rows:].any()
    assert not dense[:, columns:].any()
    return dense[:rows, :columns]


def unpacked_row_pairs(packed: Packed, rows: int, columns: int) -> Tensor:
    assert isinstance(packed.format, RowPairs)
    positions, coordinates, order, values = packed.components
    group, width, band, val = RowPairs.GROUP, packed.format.width, RowPairs.band(rows), values.tolist()
    dense = torch.zeros(rows + rows % 2, -(-columns // width) * width)
    pairs = order.view(-1, 2)
    for number, (begin, end) in enumerate(zip(unsigned(positions)[:-1], unsigned(positions)[1:], strict=True)):
        origin, in_band = number // (len(dense) // 2) * width, number % (len(dense) // 2) * 2 // band
        assert (pairs[number] // band == in_band).all()
        groups = begin + (end - begin) // (2 * group) * 2 * group
        for p in range(begin, end):
            turn = (p - begin) // group if p < groups else p - begin
            row, column = int(pairs[number, turn % 2]), unsigned(coordinates)[p] // RowPairs.SCALE
            assert column < width
            dense[row, origin + column] += val[p]
    for panel in order.view(-(-columns // width), len(dense)):
        assert panel.sort().values.tolist() == list(range(len(dense)))
    assert not dense[rows:].any()
    assert not dense[:, columns:].any()
    return dense[:rows, :columns]


UNPACKED = {
    Windows: unpacked_windows,
    Padded: unpacked_padded,
    Vnni: unpacked_vnni,
    Pairs: unpacked_pairs,
    VnniMap: unpacked_vnnimap,
    TileMap: unpacked_tilemap,
    Quads: unpacked_quads,
    ByteWindows: unpacked_byte_windows,
    Panels: unpacked_panels,
    Blocks: unpacked_blocks,
    BlockVectors: unpacked_vectors,
    RowPairs: unpacked_row_pairs,
}
PACKINGS = [
    TileMap(1, 32),
    TileMap(0, 64),
    Windows(1, 16),
    Windows(0, 4),
    Windows(1, 64),
    Padded(1, 16),
    Padded(0, 192),
    Vnni(1, 32, 32),
    Vnni(0, 16, 4),
    Pairs(1, 16),
    Pairs(0, 64),
    Quads(1, 1, 16),
    Quads(0, 3, 64),
    ByteWindows(1, 16, 0),
    ByteWindows(0, 16, 1),
    Panels(1, 32, 1),
    Panels(0, 16, 2),
    Panels(1, 32, 32),
    Panels(1, 16, 4),
    Panels(0, 32, 64),
    Blocks(1, 4, 2, 16),
    Blocks(0, 1, 3, 6),
    BlockVectors(1, 4, 4, 2),
    BlockVectors(0, 16, 1, 1),
    RowPairs(1, 16),
    RowPairs(0, 64),
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
    with pytest.raises(FormatError, match=re.escape("padded(reduction=1, columns=16) stores matrices, the shape is (2, 3, 4)")):
        pack(torch.ones(2, 3, 4), Padded(1, 16))
