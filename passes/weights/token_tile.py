"""The tile of products with tokens in the lanes. It packs x feature-major, and stores the sums token-major.

scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
  func.call @region_tile64(...)               // or _tile32, _tile16 for the last tokens
func.func private @region_tile64(...)
  pack:    the tile of x, transposed, into the workspace as [K][64]
  ...                                         // sums, [rows][64]
  unpack:  16 rows of sums at a time, transposed, through the epilogue into y
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.loops.product import Operands, Product
from gossamer.passes.loops.vectors import byte_width, index, loop, mask_of, narrowed, transpose, vector_of, widened, zeros

CACHE_LINE = 64

Share = tuple[ir.Value, ir.Value]
"""Some vectors of tokens of a tile: (the first, the end)."""


@dataclass(frozen=True)
class TokenTile:
    """A tile of `vectors` vectors of `lanes` tokens of a product, in the function that works on `operands`.

    A vector that would reach past the last token is moved back if `moved`, so that it repeats tokens of other vectors. Else it
    repeats the last token. A moved vector needs only one address and constants.
    """

    product: Product
    operands: Operands
    vectors: int
    lanes: int
    moved: bool = False

    @property
    def vec(self) -> ir.VectorType:
        """A vector of sums."""
        return vector_of(self.lanes, self.product.sum_type)

    def at(self, v: int) -> ir.Value:
        """Returns the place where vector v begins in a row of the tile."""
        return index(v * self.lanes)

    def scratch(self, *rows: int) -> list[ir.Value]:
        """Returns parts of this thread's workspace: for each number in `rows`, a memref of so many rows of the tile."""
        width, at, buffers = self.vectors * self.lanes, self.operands.offset, []
        for number in rows:
            type_ = ir.MemRefType.get([number, width], self.product.sum_type)
            buffers.append(memref.view(type_, self.operands.workspace, at, []))
            at = arith.addi(at, index(number * width * byte_width(self.product.sum_type)))
        return buffers

    def pack(self, packed: ir.Value, columns: int, start: ir.Value | None = None) -> None:
        """Copies x[first + t, start + k] to packed[k, t] for k < columns, in whole vectors of k. Columns beyond K become zeros.

        Without a `start` it is 0.
        """
        lanes, narrow = self.lanes, vector_of(self.lanes, ir.MemRefType(self.operands.x.type).element_type)
        number = index(self.product.K)
        whole = self.product.K % (lanes if start is None else columns) == 0 and columns <= self.product.K
        with self._vectors_of_tokens(0, self.vectors) as (at, tokens), loop(index(0), index(columns), index(lanes)) as ks:
            k = ks.induction_variable
            column = k if start is None else arith.addi(start, k)
            mask, none = mask_of(lanes, arith.subi(number, column)), zeros(narrow)
            rows = []
            for token in tokens:
                at_x = [token, column]
                if whole:
                    loaded = vector.load(narrow, self.operands.x, at_x)
                else:
                    loaded = vector.maskedload(narrow, self.operands.x, at_x, mask, none)
                rows.append(widened(loaded, self.vec))
            for r, values in enumerate(transpose(rows)):
                vector.store(values, packed, [arith.addi(k, index(r)), at])

    @contextmanager
    def _vectors_of_tokens(self, low: int | ir.Value, high: int | ir.Value) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
        """Emits a loop over vectors of tokens. Yields where a vector begins in a row of the tile, and its existing tokens."""
        number, lanes = self.operands.memory.tokens, index(self.lanes)
        low, high = (index(each) if isinstance(each, int) else each for each in (low, high))
        with loop(low, high, index(1)) as vectors:
            at = arith.muli(vectors.induction_variable, lanes)
            start = arith.addi(self.operands.first, at)
            if self.moved:
                start = arith.minui(start, arith.subi(number, lanes))
            tokens = [arith.addi(start, index(r)) for r in range(self.lanes)]
            last = arith.subi(number, index(1))
            yield at, tokens if self.moved else [arith.minui(token, last) for token in tokens]

    def before(self, sums: list[ir.Value], m: ir.Value) -> list[ir.Value]:
        """Applies the part of the epilogue that works on vectors of tokens to the sums of row m."""
        read = self.operands.memory.by_feature(m)
        return [widened(self.product.epilogue.before(total, read), self.vec) for total in sums]

    def unpack(self, sums: ir.Value, slot: ir.Value, row: ir.Value, rows: int, share: Share | None = None) -> None:
        """Stores sums[slot + i, t] through the rest of the epilogue to out[first + t, row + i], for whole vectors of rows.

        With a `share`, it does so only for these vectors of tokens. Rows beyond the weight's last row are not stored.
        """
        lanes, epilogue, memory = self.lanes, self.product.epilogue, self.operands.memory
        crossing = vector_of(lanes, epilogue.crossing.type)
        whole = self.product.M % lcm(self.product.unit, rows) == 0
        low, high = share or (index(0), index(self.vectors))
        with self._vectors_of_tokens(low, high) as (at, tokens), loop(index(0), index(rows), index(lanes)) as offsets:
            offset = offsets.induction_variable
            group = [vector.load(self.vec, sums, [arith.addi(arith.addi(slot, offset), index(r)), at]) for r in range(lanes)]
            feature = arith.addi(row, offset)
            for r, values in enumerate(transpose(group)):
                finish = partial(epilogue.after, narrowed(values, crossing))
                # A token that occurs twice has the same sums in both places.
                if whole:
                    memory.store_whole(tokens[r], feature, finish)
                else:
                    memory.store_token(tokens[r], feature, lanes, finish)


def tile_bytes(product: Product, tokens: int, rows: int) -> int:
    """Returns the bytes that a thread needs for `rows` rows of a tile, and a cache line between it and the next thread's."""
    size = rows * tokens * byte_width(product.sum_type)
    return -(-size // CACHE_LINE) * CACHE_LINE + CACHE_LINE


def lower_by_tiles(
    product: Product, tokens: int, workspace: int, emit: Callable[[TokenTile], None], half: bool = False, moves: bool = False
) -> None:
    """Replaces the product's op by calls of functions for tiles of `tokens` tokens and fewer. emit(tile) builds their bodies.

    If `half`, the last few tokens may take half a vector. If `moves`, `TokenTile.pack` packs x, so that the last vector of a
    tile of several may be moved back: such a tile is only called for more tokens than one vector has.
    """
    lanes = product.lanes
    sizes = [(v, lanes) for v in (8, 4, 2, 1) if v * lanes <= tokens] + [(1, lanes // 2)] * (half and lanes > 2)
    with product.op.location:
        filled = {(v, n): partial(_fill, product, v, n, emit, moves and v > 1) for v, n in sizes}
        tiles = {v * n: product.function(f"tile{v * n}", fill) for (v, n), fill in filled.items()}
        product.by_tiles(tiles, workspace)


def _fill(
    product: Product, vectors: int, lanes: int, emit: Callable[[TokenTile], None], moved: bool, operands: Operands
) -> None:
    emit(TokenTile(product, operands, vectors, lanes, moved))
