"""What products with tokens in the lanes share: a tile of tokens, packed feature-major, summed up, and stored token-major.

scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
  func.call @region_tile64(...)               // or _tile32, _tile16 for what is left of the tokens
func.func private @region_tile64(...)
  pack:    the tile of x, transposed, into the workspace as [K][64]
  ...                                         // sums, [rows][64]
  unpack:  16 rows of sums at a time, transposed, through the epilogue into y
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.loops.product import Operands, Product
from gossamer.passes.loops.vectors import byte_width, index, loop, mask_of, narrowed, transpose, vector_of, widened, zeros

CACHE_LINE = 64


@dataclass(frozen=True)
class TokenTile:
    """A tile of `vectors` vectors of `lanes` tokens of a product, in the function that works on `operands`."""

    product: Product
    operands: Operands
    vectors: int
    lanes: int

    @property
    def vec(self) -> ir.VectorType:
        """A vector of sums."""
        return vector_of(self.lanes, self.product.sum_type)

    def at(self, v: int) -> ir.Value:
        """Where vector v begins in a row of the tile."""
        return index(v * self.lanes)

    def scratch(self, *rows: int) -> list[ir.Value]:
        """This thread's part of the workspace: for each number a memref of so many rows of the tile."""
        width, at, buffers = self.vectors * self.lanes, self.operands.offset, []
        for number in rows:
            type_ = ir.MemRefType.get([number, width], self.product.sum_type)
            buffers.append(memref.view(type_, self.operands.workspace, at, []))
            at = arith.addi(at, index(number * width * byte_width(self.product.sum_type)))
        return buffers

    def pack(self, packed: ir.Value, padded: int) -> None:
        """x[first + t, k] -> packed[k, t], zeros for K <= k < padded; tokens past the last one repeat it."""
        lanes, narrow = self.lanes, vector_of(self.lanes, ir.MemRefType(self.operands.x.type).element_type)
        columns, last = index(self.product.K), arith.subi(self.operands.memory.tokens, index(1))
        with loop(index(0), index(padded), index(lanes)) as ks:
            k = ks.induction_variable
            mask = mask_of(lanes, arith.subi(columns, k))
            for v in range(self.vectors):
                start = arith.addi(self.operands.first, self.at(v))
                rows = []
                for r in range(lanes):
                    token = arith.minui(arith.addi(start, index(r)), last)
                    loaded = vector.maskedload(narrow, self.operands.x, [token, k], mask, zeros(narrow))
                    rows.append(widened(loaded, self.vec))
                for r, column in enumerate(transpose(rows)):
                    vector.store(column, packed, [arith.addi(k, index(r)), self.at(v)])

    def before(self, sums: list[ir.Value], m: ir.Value) -> list[ir.Value]:
        """What the epilogue does to the sums of row m while its lanes are tokens, one vector after the other."""
        read = self.operands.memory.by_feature(m)
        return [widened(self.product.epilogue.before(total, read), self.vec) for total in sums]

    def unpack(self, sums: ir.Value, slot: ir.Value, row: ir.Value) -> None:
        """sums[slot + i, t] -> out[first + t, row + i] through the rest of the epilogue, for one group of rows."""
        lanes, epilogue = self.lanes, self.product.epilogue
        crossing = vector_of(lanes, epilogue.crossing.type)
        for v in range(self.vectors):
            group = [vector.load(self.vec, sums, [arith.addi(slot, index(r)), self.at(v)]) for r in range(lanes)]
            for r, values in enumerate(transpose(group)):
                token = arith.addi(self.operands.first, index(v * lanes + r))
                finish = partial(epilogue.after, narrowed(values, crossing))
                self.operands.memory.store_token(token, row, lanes, finish)


def tile_bytes(product: Product, tokens: int, rows: int) -> int:
    """Workspace that a thread needs for `rows` rows of a tile, with one cache line between it and the next thread's."""
    size = rows * tokens * byte_width(product.sum_type)
    return -(-size // CACHE_LINE) * CACHE_LINE + CACHE_LINE


def lower_by_tiles(
    product: Product, tokens: int, workspace: int, emit: Callable[[TokenTile], None], half: bool = False
) -> None:
    """Replace the product's op by calls for tiles of `tokens` tokens, `half` a vector for the last few if asked for;
    emit(tile) builds the body of a function."""
    lanes = product.lanes
    sizes = [(v, lanes) for v in (8, 4, 2, 1) if v * lanes <= tokens] + [(1, lanes // 2)] * (half and lanes > 2)
    with product.op.location:
        tiles = {v * n: product.function(f"tile{v * n}", partial(_fill, product, v, n, emit)) for v, n in sizes}
        product.by_tiles(tiles, workspace)


def _fill(product: Product, vectors: int, lanes: int, emit: Callable[[TokenTile], None], operands: Operands) -> None:
    emit(TokenTile(product, operands, vectors, lanes))
