"""The product of a strip of a weight in panels (`Panels`) with a tile of tokens, on AMX: the weight is the left tile.

for each panel of the strip:                                // 2 x 2 tiles of sums, or 1 x 4
  the panel's columns of x, two by two, into memory         // if they are no 32 neighbours, which x has in that order
  x86.amx.tile_mulf(16 rows x 32 columns of the panel, 32 columns x 16 tokens, sums)
x86.amx.tile_store the sums
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.packing import Panels
from gossamer.passes.loops.inner_loop import InnerLoop
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of
from gossamer.passes.weights_bf16.bf16_columns import LINE, pairs_of

ROWS, TOKENS = 16, 16
"""Of a tile of sums."""

_COLUMNS = Panels.COLUMNS
_PAIRS = _COLUMNS // 2
_SUMS = 4  # tiles of sums, of eight tiles


@dataclass(frozen=True)
class TilePanels(InnerLoop):
    """For a weight in panels; x is packed as columns (bf16_columns.py) if they come one at a time, as lines (bf16_pairs.py) if
    they are neighbours. `gathered` is memory for the columns of a panel; None if they are neighbours in x."""

    storage: Panels
    gathered: ir.Value | None

    def store(self, group: ir.Value, sums: ir.Value) -> None:
        """The products of a strip into `sums`, [rows, tokens]."""
        at_once = _SUMS // (self.storage.rows // ROWS)
        for v in range(0, self.vectors, at_once):
            self._multiply(group, sums, range(v, min(v + at_once, self.vectors)))

    def row(self, group: ir.Value, slot: ir.Value) -> ir.Value:
        """Rows of a strip are neighbours."""
        return arith.addi(arith.muli(group, index(self.storage.rows)), slot)

    def _multiply(self, strip: ir.Value, sums: ir.Value, vectors: range) -> None:
        factor, total = (ir.Type.parse(f"!x86.amx.tile<16x{columns}>") for columns in (f"{_COLUMNS}xbf16", f"{TOKENS}xf32"))
        halves, size = self.storage.rows // ROWS, ROWS * _COLUMNS
        begin, end = self.entries(strip)
        nothing = [x86.TileZeroOp(total).result for _ in range(halves) for _ in vectors]
        with loop(begin, end, index(1), nothing) as panels:
            panel = panels.induction_variable
            x = [x86.TileLoadOp(factor, *place).result for place in self._columns(panel, vectors)]
            start, before = arith.muli(panel, index(halves * size)), iter(panels.inner_iter_args)
            found = []
            for half in range(halves):
                place = arith.addi(start, index(half * size))
                weight = x86.TileLoadOp(factor, self.values, [place], stride=index(_COLUMNS)).result
                found += [x86.TileMulFOp(weight, tokens, next(before)).result for tokens in x]
            scf.YieldOp(found)
        places = [(half, v) for half in range(halves) for v in vectors]
        for (half, v), result in zip(places, panels.results, strict=True):
            x86.TileStoreOp(sums, [index(half * ROWS), index(v * TOKENS)], result)

    def _columns(self, panel: ir.Value, vectors: range) -> list[tuple[ir.Value, list[ir.Value]]]:
        """Where the panel's columns of x begin, for each vector of tokens."""
        if self.gathered is None:
            line = arith.muli(load_index(self.coordinates, panel), index(_PAIRS))
            return [(self.packed, [line, index(v * LINE)]) for v in vectors]
        with loop(index(0), index(_PAIRS), index(1)) as pairs:
            pair = pairs.induction_variable
            for slot, line in enumerate(self._pair(panel, pair, vectors)):
                vector.store(line, self.gathered, [index(slot), pair, index(0)])
        return [(self.gathered, [index(slot), index(0), index(0)]) for slot in range(len(vectors))]

    def _pair(self, panel: ir.Value, pair: ir.Value, vectors: range) -> list[ir.Value]:
        """Two columns of a panel, side by side."""
        if self.storage.width == 1:
            first = arith.addi(arith.muli(panel, index(_COLUMNS)), arith.muli(pair, index(2)))
            columns = [load_index(self.coordinates, arith.addi(first, index(i))) for i in (0, 1)]
            return pairs_of(self.packed, vectors, *columns)
        at = load_index(self.coordinates, arith.addi(arith.muli(panel, index(_PAIRS)), pair))
        line = vector_of(LINE, ir.MemRefType(self.packed.type).element_type)
        return [vector.load(line, self.packed, [at, index(v * LINE)]) for v in vectors]


def tile_panels(
    weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int, storage: Panels
) -> TilePanels:
    """The inner loops in the first block of a function, with memory of it if they need some."""
    gathered = None
    if storage.width != _COLUMNS:
        slots = min(vectors, _SUMS // (storage.rows // ROWS))
        type_ = ir.MemRefType.get([slots, _PAIRS, LINE], ir.MemRefType(packed.type).element_type)
        with ir.InsertionPoint.at_block_begin(ir.InsertionPoint.current.block):  # after a loop, LLVM would not make it once
            gathered = memref.alloca(type_, [], [], alignment=64)
    return TilePanels(weight, packed, vec, vectors, storage, gathered)
