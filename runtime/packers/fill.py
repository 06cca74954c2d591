"""Makes the arrays of each kind of packing from the places of the nonzeros: `fill`, which `runtime.packing.pack` calls.

Each kind has a function below, or a file beside this one. It returns the arrays without the values, and `source`: for each
value, its index in the flat dense matrix, or `nowhere` for zeros that only fill up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gossamer.dialects.errors import FormatError
from gossamer.dialects.gpu_packings import Deltas, Fragments, QuadFragments, TwoFour, Vnm
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
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime.packers import byte_windows, deltas, fragments, row_pairs, two_four, windows
from gossamer.runtime.packers.nonzeros import divided, nonzero_mask, nonzero_places

_INTEGER = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True)
class Rows:
    """The matrix to pack, with its rows first even if the dense tensor is stored transposed.

    nonzero  [M, K] of bool
    places   [M, K], the index of each element in the flat dense tensor
    """

    nonzero: torch.Tensor
    places: torch.Tensor

    @cached_property
    def counts(self) -> torch.Tensor:
        """The number of nonzeros of each row."""
        return self.nonzero.sum(1)

    @property
    def nowhere(self) -> int:
        """The source of zeros that only fill up."""
        return self.places.numel()


Fill = Callable[[Any, Rows], tuple[list[torch.Tensor], torch.Tensor]]


def fill(packing: Packing, dense: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the arrays of a packing of `dense` except the values, and the sources of the values (see `packing.Packed`).

    Raises FormatError if `dense` is no matrix, or does not fit the packing.
    """
    if dense.ndim != 2:
        raise FormatError(f"{packing} stores matrices, the shape is {tuple(dense.shape)}")
    places = torch.arange(dense.numel(), dtype=torch.int32 if dense.numel() < 1 << 31 else torch.int64).view(dense.shape)
    nonzero = nonzero_mask(dense).cpu()
    if packing.reduction == 0:
        nonzero, places = nonzero.t().contiguous(), places.t()
    arrays, source = _FILL[type(packing)](packing, Rows(nonzero, places))
    return checked(packing, arrays), source


def checked(packing: Packing, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the arrays (without the values) in the packing's widths. Raises FormatError for positions that do not fit."""
    components = packing.components()[: -packing.coded]
    for array, component in zip(arrays, components, strict=True):
        if component.name == "positions" and array.numel() and int(array.max()) >= 1 << component.bits - 1:
            raise FormatError(f"{packing}: {component.name} up to {int(array.max())} do not fit {component.bits} bits")
    widths = [_INTEGER[component.bits] for component in components]
    return [array.to(width).flatten() for array, width in zip(arrays, widths, strict=True)]


def positions(counts: torch.Tensor) -> torch.Tensor:
    """Returns where each piece begins, for consecutive pieces with these lengths, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _vnni(packing: Vnni, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    m, k = rows.nonzero.shape
    r, c = packing.rows, packing.columns
    edges, (high, wide) = (0, -k % c, 0, -m % r), (-(-m // r), -(-k // c))
    occupied = torch.nn.functional.pad(rows.nonzero, edges).view(high, r, wide, c).any(3).any(1)
    places = torch.nn.functional.pad(rows.places, edges, value=rows.nowhere)
    pairs = places.reshape(high, r // 16, 16, wide, c // 2, 2).permute(0, 3, 1, 4, 2, 5)
    return [positions(occupied.sum(1)), occupied.nonzero()[:, 1]], pairs[occupied].flatten()


def _blocks(packing: Blocks, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    counts, block, places = _panels_of_blocks(rows, packing.rows, packing.columns, packing.width)
    return [positions(counts), block * packing.columns], places.transpose(1, 2).flatten()


def _quads(packing: Quads, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    counts, block, places = _panels_of_blocks(rows, packing.rows, packing.COLUMNS, packing.width)
    filled = -(-counts // packing.GROUP) * packing.GROUP
    begins = positions(filled)
    at = torch.arange(block.numel()) + (begins[:-1] - positions(counts)[:-1]).repeat_interleave(counts)
    coordinates = block.new_zeros(int(begins[-1]))
    coordinates[at] = block
    source = places.new_full((coordinates.numel(), *places.shape[1:]), rows.nowhere)
    source[at] = places
    return [begins, coordinates], source.flatten()


def _panels_of_blocks(rows: Rows, r: int, c: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns, for rows of r x c blocks, panel by panel: the number of blocks in each, each block's number in its panel, and
    its places [r, c]."""
    m, k = rows.nonzero.shape
    edges, panels = (0, -k % width, 0, -m % r), -(-k // width)
    cut = (-(-m // r), r, panels, width // c, c)
    nonzero = torch.nn.functional.pad(rows.nonzero, edges).view(cut)
    occupied = nonzero.any(4).any(1).transpose(0, 1)
    places = torch.nn.functional.pad(rows.places, edges, value=rows.nowhere)
    by_block = places.reshape(cut).permute(2, 0, 3, 1, 4)
    return occupied.sum(2).flatten(), occupied.nonzero()[:, 2], by_block[occupied]


def _padded(packing: Padded, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    (m, k), width = rows.nonzero.shape, packing.columns
    panels = -(-k // width)
    # In the order of storage: panel, row, column.
    nonzero = torch.nn.functional.pad(rows.nonzero, (0, -k % width)).view(m, panels, width).transpose(0, 1)
    line, column = divided(nonzero_places(nonzero, rows.places.dtype), width)
    (begins, coordinates), at = padded(packing, positions(torch.bincount(line, minlength=panels * m)), column)
    source = rows.places.new_full((int(begins[-1]),), rows.nowhere)
    panel, row = divided(line, m)
    down, across = rows.places.stride()  # places count row by row, or column by column
    source[at] = row * down + (panel * width + column) * across
    return [begins, coordinates], source


def padded(packing: Padded, starts: torch.Tensor, column: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the arrays of a `Padded` except the values, and the place of each entry in them.

    starts  where the entries of each row of each panel begin, panel by panel, and where the last ones end
    column  the column of each entry, within its panel
    """
    counts = starts.diff()
    filled = -(-counts // packing.GROUP) * packing.GROUP
    begins = positions(filled)
    at = torch.arange(column.numel()) + (begins[:-1] - starts[:-1]).repeat_interleave(counts)
    some = counts > 0
    coordinates = column[starts[1:][some] - 1].repeat_interleave(filled[some])
    coordinates[at] = column
    return [begins, coordinates * packing.SCALE], at


def _windows(packing: Windows, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return windows.fill(packing, rows.nonzero, rows.places)


def _two_four(packing: TwoFour, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return two_four.fill(packing, rows.nonzero, rows.places, rows.nowhere)


def _block_vectors(packing: BlockVectors, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    (m, k), r, c, depth = rows.nonzero.shape, packing.rows, packing.columns, packing.depth
    edges, high, wide = (0, -k % (c * depth), 0, -m % r), -(-m // r), -(-k // (c * depth))
    occupied = torch.nn.functional.pad(rows.nonzero, edges).view(high, r, wide, c * depth).any(3).any(1)
    places = torch.nn.functional.pad(rows.places, edges, value=rows.nowhere)
    vectors = places.reshape(high, r, wide, depth, c).permute(0, 2, 3, 1, 4)
    return [positions(occupied.sum(1)), occupied.nonzero()[:, 1] * depth], vectors[occupied].flatten()


def _pairs(packing: Pairs, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    (m, k), width = rows.nonzero.shape, packing.width
    blocks = -(-k // width)
    by_block = torch.nn.functional.pad(rows.nonzero, (0, blocks * width - k)).view(m, blocks, width).transpose(0, 1)
    counts = by_block.sum(2).flatten()
    starts = positions((counts + 1) // 2)
    block, row, column = by_block.nonzero().unbind(1)
    line = block * m + row
    place = 2 * starts[line] + torch.arange(line.numel()) - positions(counts)[line]
    coordinates = torch.zeros(2 * int(starts[-1]), dtype=column.dtype)
    coordinates[place] = column
    source = torch.full((coordinates.numel(),), rows.nowhere, dtype=rows.places.dtype)
    source[place] = rows.places[row, block * width + column]
    spare = 2 * starts[1:][counts % 2 == 1] - 1
    coordinates[spare] = coordinates[spare - 1]
    return [starts, coordinates], source


def _groups(packing: Groups, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    (m, k), width, height, together = rows.nonzero.shape, packing.COLUMNS, packing.ROWS, packing.TOGETHER
    edges, cut = (0, -k % width), (m, -(-k // width), width)
    if cut[1] >= 1 << packing.places:
        raise FormatError(f"{packing}: of {k} columns its coordinates can tell {width * ((1 << packing.places) - 1)}")
    kept = torch.nn.functional.pad(rows.nonzero, edges).view(cut).any(2)
    counts = kept.sum(1)
    entries = torch.nn.functional.pad(-(-counts // together), (0, -m % height))
    block = torch.arange(len(entries)) // packing.BLOCK
    order = torch.argsort(block * (cut[1] + 1) - entries, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    begins = positions(entries[order].view(-1, height).amax(1))
    row, group = kept.nonzero().unbind(1)
    rank = torch.arange(len(row)) - positions(counts)[row]
    line, at = begins[place[row] // height] + rank // together, place[row] % height
    at = (line * height + at) * together + rank % together
    coordinates = torch.full((int(begins[-1]) * height * together,), cut[1])
    coordinates[at] = group
    places = torch.nn.functional.pad(rows.places, edges, value=rows.nowhere).reshape(cut)
    source = places.new_full((len(coordinates), width), rows.nowhere)
    source[at] = places[row, group]
    return [begins, place % packing.BLOCK, coordinates], source.flatten()


def _vnnimap(packing: VnniMap, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the arrays of strips of rows, padded to whole blocks, as lines of the pairs of 16 rows."""
    (m, k), r, c = rows.nonzero.shape, packing.rows, packing.COLUMNS
    cut = (-(-m // r), r // 16, 16, -(-k // c) * c // 2, 2)
    return _map(rows, (r, c), 32, lambda matrix: matrix.reshape(cut).permute(0, 3, 1, 2, 4))


def _tile_map(packing: TileMap, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the arrays of strips of 16 rows, padded to whole tiles, as rows of tiles."""
    (m, k), r, c = rows.nonzero.shape, packing.rows, packing.columns
    cut = (-(-m // r), r, -(-k // c), c)
    return _map(rows, (r, c), c, lambda matrix: matrix.reshape(cut).transpose(1, 2))


def _map(
    rows: Rows, block: tuple[int, int], width: int, in_order: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns positions and masks of a matrix that is padded to whole blocks and brought `in_order`. A mask has `width` bits,
    one for each element."""
    (m, k), (r, c) = rows.nonzero.shape, block
    nonzero, places = (
        in_order(torch.nn.functional.pad(matrix, (0, -k % c, 0, -m % r), value=value))
        for matrix, value in ((rows.nonzero, False), (rows.places, rows.nowhere))
    )
    bits = nonzero.reshape(-1, width).to(torch.int64) << torch.arange(width)
    source = torch.cat([places[nonzero], rows.places.new_full((width,), rows.nowhere)])
    return [positions(nonzero.flatten(1).sum(1)), bits.sum(1)], source


def _byte_windows(packing: ByteWindows, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return byte_windows.fill(packing, rows.nonzero, rows.places, rows.nowhere)


def _panels(packing: Panels, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    (m, k), r, width = rows.nonzero.shape, packing.rows, packing.width
    edges, cut, each = (0, -k % width, 0, -m % r), (-(-m // r), r, -(-k // width), width), packing.columns // width
    occupied = torch.nn.functional.pad(rows.nonzero, edges).view(cut).any(3).any(1)
    counts = occupied.sum(1)
    panels = -(-counts // each)
    starts = positions(panels)
    strip, group = occupied.nonzero().unbind(1)
    place = each * starts[strip] + torch.arange(strip.numel()) - positions(counts)[strip]
    last = counts.new_zeros(cut[0]).scatter_reduce_(0, strip, group, "amax")
    coordinates = last.repeat_interleave(each * panels)
    coordinates[place] = group
    by_group = torch.nn.functional.pad(rows.places, edges, value=rows.nowhere).view(cut).transpose(1, 2)
    source = by_group.new_full((each * int(starts[-1]), r, width), rows.nowhere)
    source[place] = by_group[strip, group]
    return [starts, coordinates], source.view(-1, each, r, width).transpose(1, 2).flatten()


def _row_pairs(packing: RowPairs, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return row_pairs.fill(packing, rows.nonzero, rows.places, rows.nowhere)


def _vnm(packing: Vnm, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return two_four.fill_selected(packing, rows.nonzero, rows.places, rows.nowhere)


def _fragments(packing: Fragments, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return fragments.fill(packing, rows.nonzero, rows.places, rows.nowhere)


def _deltas(packing: Deltas, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    return deltas.fill(packing, rows.nonzero, rows.places, rows.nowhere)


_FILL: dict[type[Packing], Fill] = {
    Padded: _padded,
    Windows: _windows,
    Vnni: _vnni,
    Blocks: _blocks,
    BlockVectors: _block_vectors,
    RowPairs: _row_pairs,
    Pairs: _pairs,
    Quads: _quads,
    Panels: _panels,
    VnniMap: _vnnimap,
    TileMap: _tile_map,
    ByteWindows: _byte_windows,
    TwoFour: _two_four,
    Vnm: _vnm,
    Fragments: _fragments,
    QuadFragments: _fragments,
    Deltas: _deltas,
    Groups: _groups,
}
