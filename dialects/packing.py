"""Packings: storage of a weight that `sparse_tensor` encodings cannot say.

A `Packing` stands where a `Format` can stand. In IR it is a string in place of the encoding,
`tensor<768x3072xf32, "padded(reduction=1, columns=384)">`; `parse` reads either. A kind is a frozen dataclass whose fields, all
integers, are what the kernel must know; `runtime/packers/fill.py` has a function that fills its arrays.
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
    """Rows in groups of `lanes`, one row a lane, their nonzeros sorted into windows of columns that two registers hold.

    Columns are in blocks of `lanes`; a window is two neighbouring blocks. It takes a few steps, each one nonzero of every row
    at most. The steps of a window come in runs of 3 and of 2 (`RUNS`). Per group: the runs of 3, then those of 2.

    bounds   per group four numbers: its first step, its first run, its first run of 2, the end of its runs
    origins  per run: the first block of its window
    places   per step and lane: 128 + the column in the window; 0 where the row has nothing. Of 64 lanes the one of lane
             16 v + 4 i + c comes (16 i + 4 v + c)th: so bytes are looked up that instructions put together in order
    values   per step and lane; 0 where the row has nothing
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
    """K-blocked CSR whose rows are filled up: panels of `columns` columns, in each the rows one after the other.

    The nonzeros of a row in a panel come in groups of 4 (`GROUP`). `positions` say where they begin, `coordinates` in which
    column of the panel they are, times 8 (`SCALE`), so that x86 finds x there without a shift. To fill up: the value 0 in
    the row's last column.
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

    A block is rows / 16 tiles, one of which has a line for every two neighbours along K: the pairs of 16 rows one after the
    other. `positions` say where each row of blocks begins, `coordinates` where along K its blocks lie, counted in blocks.
    What a block holds beyond the edge of the tensor is 0.
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
    """Dense blocks of `rows` x `columns`, panel by panel of `width` columns, in a panel row by row of blocks.

    `positions` say where in each panel the blocks of each row of blocks begin, `coordinates` in which column of the panel each
    block begins. The values of a column of a block lie together; beyond the edge of the tensor they are 0.
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
    """Dense blocks in vectors of `rows` x `columns` elements, row by row; `depth` vectors side by side make a block.

    `positions` say where the blocks of each `rows` rows begin, `coordinates` in which column each begins, counted in vectors.
    Beyond the edge of the tensor the values are 0.
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
    """Blocks of `rows` x 4, panel by panel of `width` columns, in a panel row by row of blocks: for dot products of bytes.

    `positions` say where in each panel the blocks of each row of blocks begin, `coordinates` where in the panel each block
    lies, counted in 4 columns. The 4 values of a row of a block lie together; beyond the edge of the tensor they are 0. The
    blocks of a row of them come in groups of 4 (`GROUP`), filled up with zeros at the panel's begin.
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
    """The nonzeros of each row two by two, in blocks of `width` columns; an odd one is followed by a 0 in the same column.

    `positions` say where the pairs of each row of a block begin, block by block. Each pair has two `coordinates`, the columns
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
    """All blocks of a `Vnni` of `rows` x 32, one after the other, as a bit for each element and the nonzeros in that order.

    A mask stands for a line, the pairs of 16 rows, the lines of two columns side by side. `positions` say where the values of
    each strip of rows begin. A line of zeros follows the last one, so that a whole line can be loaded anywhere.
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
    """All tiles of 16 rows x `columns`, as a bit for each element and the nonzeros in that order.

    A mask stands for a row of a tile; the tiles of 16 rows lie side by side. `positions` say where the values of each 16 rows
    begin. A row of zeros follows the last one, so that a whole row of a tile can be loaded anywhere.
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
    """Strips of `rows` rows as lines: four nonzeros of each row at most, in a window of 64 columns, a register of bytes.

    From the first column on, the next line has the window in which the first nonzero lies that no line has yet: windows begin
    at each `STEP`-th column, so that rows with many nonzeros in one place catch up later. `positions` say at which line each
    strip begins, `windows` which window each line has, `places` in which column of it a value lies. What fills up is 0 in both.
    The rows of a strip are neighbours, or, where they are `sorted` (1), rows that need like numbers of lines: `order` has the
    row at each place.
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
    """Strips of `rows` rows, each as the columns that have a nonzero in it, `width` neighbours at a time, in panels.

    A panel has 32 `columns` of bf16, or 64 of int8, whose neighbours are 4 or all of them. `positions` say where the panels of
    each strip begin. A panel has columns / width `coordinates`, counted in `width` columns; the last of its strip fills up,
    with values of 0. Its values are rows / 16 tiles of 16 rows x its columns.
    """

    kind: ClassVar[str] = "panels"
    COLUMNS: ClassVar[dict[int, int]] = {1: 32, 2: 32, 32: 32, 4: 64, 64: 64}
    """Of a panel, by the width."""
    rows: int
    width: int

    def __post_init__(self) -> None:
        self._check(
            (self.rows in (16, 32), "rows must be 16 or 32"),
            (self.width in self.COLUMNS, "width must be 1, 2 or 32 of bf16, 4 or 64 of int8"),
        )

    @property
    def columns(self) -> int:
        """Of a panel."""
        return self.COLUMNS[self.width]

    @property
    def neighbours(self) -> int:
        return self.width

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 32), Component("values", 0)


@dataclass(frozen=True)
class RowPairs(Packing):
    """Two rows of about equally many nonzeros at a time, panel by panel of `width` columns.

    In each panel the rows of a band (`band`) are ordered by their nonzeros, most first, and two that follow each other are a
    pair: `order` has its rows. The nonzeros of the two rows come in turn: 4 of each (`GROUP`) as long as both have 4, then one
    of each. `positions` say where those of each pair begin, `coordinates` are as in `Padded`. A row that has fewer than the
    other is filled up: with the value 0 in its last column, or in that of the other row where it has no nonzero. A row more
    than there are is empty.
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
        """How many of so many rows are ordered together: about 64, a multiple of 16; bands are what threads share out."""
        bands = 4 * max(1, -(-rows // 256))
        return max(1, -(-rows // (16 * bands))) * 16

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("coordinates", 16), Component("order", 32), Component("values", 0)


@dataclass(frozen=True)
class Slices(Packing):
    """SELL-C-sigma (Kreutzer et al., 2014): rows sorted by length, `lanes` of them a slice, one row a lane, longest first.

    A slice takes as many steps as its longest row has entries. Places where a row has no entry any more hold some other.

    positions    per slice: its first step; then the end
    common       per slice: the steps in which each of its rows has an entry
    origins      per slice: its first row if its rows follow each other, else -1
    bases        per slice: the first of the columns that its coordinates count from
    rows         per slice and lane; the last slice is filled up with its first row
    lengths      per slice and lane: entries, 0 to fill up
    starts       per step: its first column if its columns follow each other, lane by lane; -2 - c if they are among the
                 2 x lanes from c on, for vectors of 512 bits; else -1
    coordinates  per step and lane, of `width` bits: the column less c, or less the base of the slice
    original     the words of the values that `values` was made of, or nothing
    hash         64 bits that the kernel makes of `original`
    values       per step and lane
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
    """The packing of `kind(field=1, ...)`, with or without quotes. FormatError for anything else."""
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
    """The storage that the text of a tensor type's encoding stands for. FormatError if it is neither."""
    return parse_packing(text) if text.startswith('"') else Format.parse(text)
