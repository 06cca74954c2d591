"""The product of a strip of a weight in panels (`Panels`) with a tile of tokens, on AMX. The weight is the left factor.

for each panel of the strip:                                // 2 x 2 tiles of sums, or 1 x 4
  copy the panel's columns of x, in lines, into memory      // unless they are neighbours, which x already has in lines
  x86.amx.tile_mulf(16 rows x 32 columns of the panel, 32 columns x 16 tokens, sums)      // tile_muli of 64 columns of int8
x86.amx.tile_store the sums
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.packing import Panels
from gossamer.passes.loops.inner_loop import InnerLoop
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of
from gossamer.passes.weights_bf16.bf16_columns import pairs_of

ROWS, TOKENS = 16, 16
"""Rows and tokens of a tile of sums."""

LINES = 16
"""Lines of a tile of x. A line has 64 bytes: for each token, the neighbouring columns that are multiplied together."""

_SUMS = 4  # number of tiles of sums; AMX has eight tiles


@dataclass(frozen=True)
class TilePanels(InnerLoop):
    """Inner loops for a weight of bf16 in panels.

    x is packed as columns (bf16_columns.py) if panels have single columns, else as lines (bf16_pairs.py). `gathered` is memory
    for the columns of a panel; None if the columns of a panel are neighbours, whose lines are read in place.
    """

    storage: Panels
    gathered: ir.Value | None

    @property
    def at_once(self) -> int:
        """All vectors of a tile."""
        return self.vectors

    def store(self, group: ir.Value, sums: ir.Value, token: ir.Value) -> None:
        """Stores the products of a strip into `sums`, [rows, tokens]."""
        tiles = _at_once(self.storage)
        for v in range(0, self.vectors, tiles):
            self._multiply(group, sums, range(v, min(v + tiles, self.vectors)))

    def row(self, group: ir.Value, slot: ir.Value) -> ir.Value:
        """Returns the row of a slot. The rows of a strip are neighbours."""
        return arith.addi(arith.muli(group, index(self.storage.rows)), slot)

    def line(self, panel: ir.Value, number: ir.Value, vectors: range) -> list[ir.Value]:
        """Returns a line of a panel's columns of x, for each vector of tokens."""
        if self.storage.width == 1:
            first = arith.addi(arith.muli(panel, index(self.storage.columns)), arith.muli(number, index(2)))
            columns = [load_index(self.coordinates, arith.addi(first, index(i))) for i in (0, 1)]
            return pairs_of(self.packed, vectors, *columns)
        return self.lines_at(load_index(self.coordinates, arith.addi(arith.muli(panel, index(LINES)), number)), vectors)

    def lines_at(self, at: ir.Value, vectors: range) -> list[ir.Value]:
        """Returns the line of x at a place, for each vector of tokens."""
        element, width = ir.MemRefType(self.packed.type).element_type, self._line
        return [vector.load(vector_of(width, element), self.packed, [at, index(v * width)]) for v in vectors]

    @property
    def _line(self) -> int:
        """Elements of a line for a vector of tokens."""
        return TOKENS * self.storage.columns // LINES

    def _multiply(self, strip: ir.Value, sums: ir.Value, vectors: range) -> None:
        columns, element = self.storage.columns, ir.MemRefType(self.packed.type).element_type
        total_element = ir.MemRefType(sums.type).element_type
        factor = ir.Type.parse(f"!x86.amx.tile<{ROWS}x{columns}x{element}>")
        total = ir.Type.parse(f"!x86.amx.tile<{ROWS}x{TOKENS}x{total_element}>")
        multiply = x86.TileMulIOp if isinstance(element, ir.IntegerType) else x86.TileMulFOp
        halves, size = self.storage.rows // ROWS, ROWS * columns
        begin, end = self.entries(strip)
        nothing = [x86.TileZeroOp(total).result for _ in range(halves) for _ in vectors]
        with loop(begin, end, index(1), nothing) as panels:
            panel = panels.induction_variable
            x = [x86.TileLoadOp(factor, *place).result for place in self._columns(panel, vectors)]
            start, before = arith.muli(panel, index(halves * size)), iter(panels.inner_iter_args)
            found = []
            for half in range(halves):
                place = arith.addi(start, index(half * size))
                weight = x86.TileLoadOp(factor, self.values, [place], stride=index(columns)).result
                found += [multiply(weight, tokens, next(before)).result for tokens in x]
            scf.YieldOp(found)
        places = [(half, v) for half in range(halves) for v in vectors]
        for (half, v), result in zip(places, panels.results, strict=True):
            x86.TileStoreOp(sums, [index(half * ROWS), index(v * TOKENS)], result)

    def _columns(self, panel: ir.Value, vectors: range) -> list[tuple[ir.Value, list[ir.Value]]]:
        """Returns where the panel's columns of x begin, for each vector of tokens. Gathers them first if necessary."""
        if self.gathered is None:
            line = arith.muli(load_index(self.coordinates, panel), index(LINES))
            return [(self.packed, [line, index(v * self._line)]) for v in vectors]
        with loop(index(0), index(LINES), index(1)) as lines:
            number = lines.induction_variable
            for slot, line in enumerate(self.line(panel, number, vectors)):
                vector.store(line, self.gathered, [index(slot), number, index(0)])
        return [(self.gathered, [index(slot), index(0), index(0)]) for slot in range(len(vectors))]


def tile_panels(
    weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int, storage: Panels
) -> TilePanels:
    """Returns the inner loops for bf16. Call it in the first block of a function, where it may allocate memory."""
    gathered = None if storage.width == storage.columns else memory_of_panel(packed, vectors, storage)
    return TilePanels(weight, packed, vec, vectors, storage, gathered)


def memory_of_panel(packed: ir.Value, vectors: int, storage: Panels) -> ir.Value:
    """Returns memory for the columns of x of a panel."""
    shape = [min(vectors, _at_once(storage)), LINES, TOKENS * storage.columns // LINES]
    type_ = ir.MemRefType.get(shape, ir.MemRefType(packed.type).element_type)
    with ir.InsertionPoint.at_block_begin(ir.InsertionPoint.current.block):  # after a loop, LLVM would allocate it each time
        return memref.alloca(type_, [], [], alignment=64)


def _at_once(storage: Panels) -> int:
    """Returns the number of vectors of tokens whose sums are in tiles."""
    return _SUMS // (storage.rows // ROWS)
