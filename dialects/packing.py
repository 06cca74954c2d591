"""Packings: storages of a weight that `sparse_tensor` encodings cannot describe.

A `Packing` can be used in place of a `Format`. In IR it is a string in place of the encoding,
`tensor<768x3072xf32, "padded(reduction=1, columns=384)">`. `parse` reads either. A kind of packing is a frozen dataclass. Its
fields, all integers, are the facts that the kernel must know. `runtime/packers/fill.py` has a function that fills its arrays.
"""

import re
from dataclasses import dataclass, fields
from typing import ClassVar

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import Deltas, Fragments, QuadFragments, TwoFour, Vnm
from gossamer.dialects.packing_base import Component
from gossamer.dialects.packing_base import Packing as Packing
from gossamer.dialects.quantized_packings import Groups


@dataclass(frozen=True)
class Windows(Packing):
    """Rows in groups of `lanes`, one row in each lane, with nonzeros sorted into windows of columns that two registers hold.

    Columns are in blocks of `lanes`, and a window is two neighbouring blocks. A step has at most one nonzero of every row, and
    a window takes a few steps, in runs of 3 and of 2 (`RUNS`). A group has its runs of 3, then those of 2.

    bounds   for each group: its first step, its first run, its first run of 2, the end of its runs
    origins  for each run: the first block of its window
    places   for each step and lane: 128 + the column in the window; 0 if the row has no nonzero. With 64 lanes, lane
             16 v + 4 i + c is at place 16 i + 4 v + c, so that instructions which join the bytes leave them in order.
    values   for each step and lane; 0 if the row has no nonzero
    """

    kind: ClassVar[str] = "windows"
    RUNS: ClassVar[tuple[int, ...]] = (3, 2)
    lanes: int

    def __post_init__(self) -> None:
        self._check((self.lanes in (2, 4, 8, 16, 64), "lanes must be 2, 4, 8, 16 or 64"))

    def components(self) -> tuple[Component, ...]:
        return Component("bounds", 32), Component("origins", 32), Component("places", 8), Component("values", 0)


@dataclass(frozen=True)
class Padded(Packing):
    """K-blocked CSR with padded rows: panels of `columns` columns, each with its rows one after the other.

    The nonzeros of a row in a panel are padded to a multiple of 4 (`GROUP`), with the value 0 in the row's last column.
    `positions` say where each row begins. `coordinates` are columns of the panel times 8 (`SCALE`), so that x86 addresses x
    without a shift.
    """

    kind: ClassVar[str] = "padded"
    GROUP: ClassVar[int] = 4
    SCALE: ClassVar[int] = 8
    columns: int

    def __post_init__(self) -> None:
        most = (1 << 16) // self.SCALE - 1
        self._check((0 < self.columns <= most, f"columns must be from 1 to {most}"))

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("values", 0)


@dataclass(frozen=True)
class Vnni(Packing):
    """Blocks of `rows` x `columns`, row by row of blocks, laid out for instructions that multiply pairs of bf16.

    A block is rows / 16 tiles. A tile has a line for every two neighbours along K, with the pairs of 16 rows one after the
    other. `positions` say where each row of blocks begins, `coordinates` the places of its blocks along K, counted in blocks.
    Values beyond the edge of the tensor are 0.
    """

    kind: ClassVar[str] = "vnni"
    rows: int
    columns: int

    def __post_init__(self) -> None:
        self._check(
            (self.rows > 0 and self.rows % 16 == 0, "rows must be a multiple of 16"),
            (self.columns in (2, 4, 8, 16, 32), "columns must be 2, 4, 8, 16 or 32"),
        )

    @property
    def neighbours(self) -> int:
        return self.columns

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 32), Component("values", 0)


@dataclass(frozen=True)
class Blocks(Packing):
    """Dense blocks of `rows` x `columns`, in panels of `width` columns, and in a panel row by row of blocks.

    For each panel, `positions` say where each row of blocks begins. `coordinates` are the first column of each block in its
    panel. The values of a column of a block lie together. Those beyond the edge of the tensor are 0.
    """

    kind: ClassVar[str] = "blocks"
    rows: int
    columns: int
    width: int

    def __post_init__(self) -> None:
        self._check(
            (self.rows > 0 and self.columns > 0, "rows and columns must be positive"),
            (self.width > 0 and self.width % max(self.columns, 1) == 0, "width must be a multiple of columns"),
            (self.width <= 1 << 16, f"width must be at most {1 << 16}"),
        )

    @property
    def neighbours(self) -> int:
        return self.columns

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("values", 0)


@dataclass(frozen=True)
class BlockVectors(Packing):
    """Dense blocks of `depth` vectors side by side. A vector has `rows` x `columns` elements, row by row.

    `positions` say where the blocks of each `rows` rows begin. `coordinates` are the columns of the blocks, counted in vectors.
    Values beyond the edge of the tensor are 0.
    """

    kind: ClassVar[str] = "blockvec"
    rows: int
    columns: int
    depth: int

    def __post_init__(self) -> None:
        self._check((min(self.rows, self.columns, self.depth) > 0, "rows, columns and depth must be positive"))

    @property
    def neighbours(self) -> int:
        return self.columns * self.depth

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("values", 0)


@dataclass(frozen=True)
class Quads(Packing):
    """Blocks of `rows` x 4 for dot products of bytes, in panels of `width` columns, and in a panel row by row of blocks.

    For each panel, `positions` say where each row of blocks begins. `coordinates` are the places of the blocks in their panel,
    counted in 4 columns. The 4 values of a row of a block lie together. Those beyond the edge of the tensor are 0. A row of
    blocks is padded to a multiple of 4 (`GROUP`), with blocks of zeros at the first column of the panel.
    """

    kind: ClassVar[str] = "quads"
    COLUMNS: ClassVar[int] = 4
    GROUP: ClassVar[int] = 4
    rows: int
    width: int

    def __post_init__(self) -> None:
        self._check(
            (self.rows > 0, "rows must be positive"),
            (0 < self.width <= 1 << 18 and self.width % 4 == 0, f"width must be a multiple of 4 up to {1 << 18}"),
        )

    @property
    def neighbours(self) -> int:
        return self.COLUMNS

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("values", 0)


@dataclass(frozen=True)
class Pairs(Packing):
    """The nonzeros of each row in pairs, in blocks of `width` columns. A last odd one is paired with a 0 in the same column.

    `positions` say where the pairs of each row of a block begin, block by block. Each pair has two `coordinates`, its columns
    within the block.
    """

    kind: ClassVar[str] = "pairs"
    width: int

    def __post_init__(self) -> None:
        self._check((0 < self.width <= 1 << 16, "width must be 1 to 65536"))

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("values", 0)


@dataclass(frozen=True)
class VnniMap(Packing):
    """All blocks of a `Vnni` of `rows` x 32, one after the other: a bit for each element, and the nonzeros in that order.

    A mask is for a line: the pairs of 16 rows, in two columns side by side. `positions` say where the values of each strip of
    rows begin. A line of zeros follows the last value, so that a whole line can be loaded from any place.
    """

    kind: ClassVar[str] = "vnnimap"
    COLUMNS: ClassVar[int] = 32
    rows: int

    def __post_init__(self) -> None:
        self._check((self.rows in (16, 32), "rows must be 16 or 32"))

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("masks", 32), Component("values", 0)


@dataclass(frozen=True)
class TileMap(Packing):
    """All tiles of 16 rows x `columns`: a bit for each element, and the nonzeros in that order.

    A mask is for a row of a tile. The tiles of 16 rows follow each other along K. `positions` say where the values of each 16
    rows begin. A row of zeros follows the last value, so that a whole row of a tile can be loaded from any place.
    """

    kind: ClassVar[str] = "tilemap"
    rows: ClassVar[int] = 16
    columns: int

    def __post_init__(self) -> None:
        self._check((self.columns in (32, 64), "columns must be 32 or 64"))

    @property
    def neighbours(self) -> int:
        return self.columns

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("masks", self.columns), Component("values", 0)


@dataclass(frozen=True)
class ByteWindows(Packing):
    """Strips of `rows` rows in lines. A line has up to four nonzeros of each row, within a window of 64 columns (a register of
    bytes).

    The next line has the window of the first nonzero that no line has yet. Windows begin at every `STEP`-th column, so that
    rows with many nonzeros in one place can catch up in the next window. `positions` are the first line of each strip,
    `windows` the window of each line, `places` the column of each value in its window. Padding is 0 in places and values. The
    rows of a strip are neighbours. If `sorted` is 1, they are rows that need similar numbers of lines, and `order` has the row
    at each place.
    """

    kind: ClassVar[str] = "bytewindows"
    COLUMNS: ClassVar[int] = 64
    STEP: ClassVar[int] = 32
    TOGETHER: ClassVar[int] = 4
    rows: int
    sorted: int

    def __post_init__(self) -> None:
        self._check((self.rows == 16, "rows must be 16"), (self.sorted in (0, 1), "sorted must be 0 or 1"))

    def components(self) -> tuple[Component, ...]:
        order = (Component("order", 32),) if self.sorted else ()
        return Component("positions", 32), Component("windows", 32), *order, Component("places", 8), Component("values", 0)


@dataclass(frozen=True)
class Panels(Packing):
    """Strips of `rows` rows. A strip stores the columns in which it has a nonzero, `width` neighbours at a time, in panels.

    A panel has 32 `columns` of bf16, or 64 of int8 (then `width` is 4 or 64). `positions` say where the panels of each strip
    begin. A panel has columns / width `coordinates`, counted in `width` columns. The last panel of a strip is padded with
    values of 0. The values of a panel are rows / 16 tiles of 16 rows x its columns.
    """

    kind: ClassVar[str] = "panels"
    COLUMNS: ClassVar[dict[int, int]] = {1: 32, 2: 32, 32: 32, 4: 64, 64: 64}
    """Columns of a panel, by the width."""
    rows: int
    width: int

    def __post_init__(self) -> None:
        self._check(
            (self.rows in (16, 32), "rows must be 16 or 32"),
            (self.width in self.COLUMNS, "width must be 1, 2 or 32 of bf16, 4 or 64 of int8"),
        )

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return self.COLUMNS[self.width]

    @property
    def neighbours(self) -> int:
        return self.width

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 32), Component("values", 0)


@dataclass(frozen=True)
class RowPairs(Packing):
    """Pairs of rows with about equally many nonzeros, in panels of `width` columns.

    In each panel, the rows of a band (`band`) are sorted by their nonzeros, most first. Each two consecutive rows are a pair,
    and `order` has its rows. The nonzeros of the two rows alternate: 4 of each (`GROUP`) as long as both have 4, then one of
    each. `positions` say where each pair begins. `coordinates` are as in `Padded`. The shorter row is padded with the value 0
    in its last column, or, if it has no nonzero, in the last column of the other. A row beyond the last one is empty.
    """

    kind: ClassVar[str] = "rowpairs"
    GROUP: ClassVar[int] = Padded.GROUP
    SCALE: ClassVar[int] = Padded.SCALE
    WIDEST: ClassVar[int] = (1 << 16) // SCALE - 1
    width: int

    def __post_init__(self) -> None:
        self._check((0 < self.width <= self.WIDEST, f"width must be from 1 to {self.WIDEST}"))

    @staticmethod
    def band(rows: int) -> int:
        """Returns the rows of a band, which are sorted together: about 64, a multiple of 16. Threads share out bands."""
        bands = 4 * max(1, -(-rows // 256))
        return max(1, -(-rows // (16 * bands))) * 16

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("order", 32), Component("values", 0)


@dataclass(frozen=True)
class Slices(Packing):
    """SELL-C-sigma (Kreutzer et al., 2014): rows sorted by length, longest first. `lanes` rows are a slice, one in each lane.

    A slice has as many steps as its longest row has entries. After the end of a shorter row, its places repeat another entry.

    positions    for each slice: its first step; then the end
    common       for each slice: the number of steps in which all its rows have an entry
    origins      for each slice: its first row if its rows are consecutive, else -1
    bases        for each slice: the column from which its coordinates count
    rows         for each slice and lane: the row. The last slice is padded with its first row.
    lengths      for each slice and lane: the number of entries; 0 for padding
    starts       for each step: its first column if the columns of its lanes are consecutive; -2 - c if they are among the
                 2 x lanes columns from c on (for vectors of 512 bits); else -1
    coordinates  for each step and lane, in `width` bits: the column minus c, or minus the base of the slice
    original     the words of the values from which `values` was made, or empty
    hash         64 bits, which the kernel computes from `original`
    values       for each step and lane
    """

    kind: ClassVar[str] = "slices"
    lanes: int
    width: int

    def __post_init__(self) -> None:
        self._check(
            (self.lanes in (2, 4, 8, 16), "lanes must be 2, 4, 8 or 16"), (self.width in (16, 32), "width must be 16 or 32")
        )

    def components(self) -> tuple[Component, ...]:
        before = ("positions", "common", "origins", "bases", "rows", "lengths", "starts")
        words = (*(Component(name, 32) for name in before), Component("coordinates", self.width))
        return *words, Component("original", 32), Component("hash", 32), Component("values", 0)


_KINDS = (
    Windows, Padded, Vnni, Blocks, BlockVectors, RowPairs, Pairs, Quads, VnniMap, TileMap, ByteWindows, Panels, Slices,
    TwoFour, Vnm, Fragments, QuadFragments, Deltas, Groups,
)  # fmt: skip
KINDS: dict[str, type[Packing]] = {kind.kind: kind for kind in _KINDS}


def parse_packing(text: str) -> Packing:
    """Returns the packing of a text `kind(field=1, ...)`, with or without quotes. FormatError for any other text."""
    match = re.fullmatch(r'"?(\w+)\((.*)\)"?', text.strip())
    kind = KINDS.get(match[1]) if match else None
    if match is None or kind is None:
        raise FormatError(f"{text} is no packing, there are {', '.join(KINDS)}")
    given = dict(re.findall(r"(\w+)=(\d+)", match[2]))
    names = [field.name for field in fields(kind)]
    if list(given) != names or match[2] != ", ".join(f"{name}={given[name]}" for name in names):
        raise FormatError(f"{text} must be {match[1]}({', '.join(f'{name}=…' for name in names)})")
    return kind(**{name: int(number) for name, number in given.items()})


def parse(text: str) -> Format | Packing:
    """Returns the format or packing of the text of a tensor type's encoding. FormatError if it is neither."""
    return parse_packing(text) if text.startswith('"') else Format.parse(text)
