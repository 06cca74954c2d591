"""lower-sample-tokens: lowers a `kernel.sample_tokens` to a loop over the rows of a matrix, with a row of x in registers.

before   %v = "kernel.sample_tokens"(%positions, %coordinates, %x, %y) : (..., tensor<?x?x128xf32>, ...) -> tensor<?xf32>
after    scf.parallel (%part) = ...                                  // entries of the part
           for each tile i of tokens, for each row r of the part
             load the 8 vectors of x[i, r]                            // 128 tokens
             for each 16 entries (r, c) of the row
               16 sums += x[i, r] * y[i, c]                           // for each, 8 multiply-adds that read y
               add up the lanes of the 16 vectors of sums together, to 16 values

The last entries of a row are computed four at a time; entries past the last one repeat it. The coordinates of
`kernel.sample_places` are places in y. Its tiles have any width and are cut into pieces of 8 vectors. The last piece of a
tile is a loop over vectors, the last of which is masked. Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, first_row, parts_of
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    mask_of,
    parallel,
    sums_across,
    vector_of,
    zeros,
)

_REST = 4  # entries at once if a row has fewer than a vector of them left; a power of two


@dataclass(frozen=True)
class LowerSampleTokens:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in (*walk(module, "kernel.sample_tokens"), *walk(module, "kernel.sample_places")):
            with op.location:
                _Sample(op, self.bits).lower()


class _Sample:
    def __init__(self, op: ir.Operation, bits: int) -> None:
        self.op, self.storage = op, storage_of(op)
        self.positions, self.coordinates, self.x, self.y = (buffer_of(operand) for operand in op.operands)
        packed = ir.MemRefType(self.x.type)
        self.lanes = bits // 8 // byte_width(packed.element_type)
        self.vec, self.placed = vector_of(self.lanes, packed.element_type), ir.MemRefType(self.y.type).rank == 2
        self.vectors = registers(bits) // 4 if self.placed else packed.shape[2] // self.lanes

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            rows = arith.subi(memref.dim(self.positions, index(0)), index(1))
            entries, tiles = memref.dim(self.storage.output, index(0)), memref.dim(self.x, index(0))
            width = memref.dim(self.x, index(2))
            vectors = arith.ceildivui(width, index(self.lanes)) if self.placed else index(self.vectors)
            parts = parts_of(entries, arith.muli(tiles, vectors), self.storage.threads)
            with parallel(parts) as part:
                begin, end = ends_of(entries, part, parts)
                # The row before the first one that begins in the part may have entries in it.
                low = first_row(self.positions, rows, begin, rows_count=False)
                low = arith.subi(low, arith.minui(low, index(1)))
                high = first_row(self.positions, rows, end, rows_count=False)
                with loop(index(0), tiles, index(1)) as each_tile:
                    tile = each_tile.induction_variable
                    if self.placed:
                        self._pieces(tile, width, (low, high), (begin, end))
                    else:
                        whole = _Piece(tile, index(0), None)
                        with loop(low, high, index(1)) as each_row:
                            self._row(whole, each_row.induction_variable, begin, end)
        self.storage.erase()

    def _pieces(
        self, tile: ir.Value, width: ir.Value, rows: tuple[ir.Value, ir.Value], part: tuple[ir.Value, ir.Value]
    ) -> None:
        """Computes a tile piece by piece."""
        size = index(self.vectors * self.lanes)
        with loop(index(0), width, size) as pieces:
            first = pieces.induction_variable
            left = arith.subi(width, first)
            choice = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, left, size), has_else=True)
            for block, piece in (
                (choice.then_block, _Piece(tile, first, None)),
                (choice.else_block, _Piece(tile, first, left)),
            ):
                with ir.InsertionPoint(block):
                    with loop(*rows, index(1)) as each_row:
                        self._row(piece, each_row.induction_variable, *part)
                    scf.YieldOp([])

    def _row(self, piece: "_Piece", row: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Adds a piece of a tile to the entries of a row in [begin, end)."""
        begin = arith.maxui(load_index(self.positions, row), begin)
        end = arith.minui(load_index(self.positions, arith.addi(row, index(1))), end)
        count = arith.maxsi(arith.subi(end, begin), index(0))
        whole = arith.addi(begin, arith.subi(count, arith.remui(count, index(self.lanes))))
        if piece.left is None:
            held = [self._x(piece, row, index(v * self.lanes)) for v in range(self.vectors)]
            totals = partial(self._whole, piece, held)
        else:
            totals = partial(self._rest, piece, piece.left, row)
        with loop(begin, whole, index(self.lanes)) as groups:
            first = groups.induction_variable
            places = [arith.addi(first, index(n)) for n in range(self.lanes)]
            total = totals([load_index(self.coordinates, entry) for entry in places])
            vector.store(self._with_earlier(total, piece, first), self.storage.output, [first])
        last = arith.subi(end, index(1))
        with loop(whole, end, index(_REST)) as groups:
            first = groups.induction_variable
            places = [arith.minui(arith.addi(first, index(n)), last) for n in range(_REST)]
            mask = mask_of(_REST, arith.subi(end, first))
            total = totals([load_index(self.coordinates, entry) for entry in places])
            vector.maskedstore(self.storage.output, [first], mask, self._with_earlier(total, piece, first, mask))

    def _whole(self, piece: "_Piece", held: Sequence[ir.Value], columns: Sequence[ir.Value]) -> ir.Value:
        """Returns the sums over a whole piece for some columns of the row whose vectors are `held` in registers."""
        sums = [zeros(self.vec)] * len(columns)
        for v, x in enumerate(held):
            sums = self._added(piece, index(v * self.lanes), x, columns, sums, None)
        return sums_across(sums)

    def _rest(self, piece: "_Piece", left: ir.Value, row: ir.Value, columns: Sequence[ir.Value]) -> ir.Value:
        """Returns the same sums for a piece that has only `left` tokens."""
        over = arith.remui(left, index(self.lanes))
        whole = arith.subi(left, over)
        with loop(index(0), whole, index(self.lanes), [zeros(self.vec)] * len(columns)) as steps:
            at = steps.induction_variable
            scf.YieldOp(self._added(piece, at, self._x(piece, row, at), columns, list(steps.inner_iter_args), None))
        choice = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, over, index(0)), [self.vec] * len(columns), has_else=True)
        with ir.InsertionPoint(choice.then_block):
            mask = mask_of(self.lanes, over)
            x = self._x(piece, row, whole, mask)
            scf.YieldOp(self._added(piece, whole, x, columns, list(steps.results), mask))
        with ir.InsertionPoint(choice.else_block):
            scf.YieldOp(steps.results)
        return sums_across(list(choice.results))

    def _added(
        self,
        piece: "_Piece",
        at: ir.Value,
        x: ir.Value,
        columns: Sequence[ir.Value],
        sums: Sequence[ir.Value],
        mask: ir.Value | None,
    ) -> list[ir.Value]:
        """Returns the sums plus a vector of tokens of the row times those of each column."""
        at = arith.addi(piece.first, at)
        places = [[arith.addi(column, at)] if self.placed else [column, at] for column in columns]
        read = [self._load(self.y, [piece.tile, *place], mask) for place in places]
        return [vector.fma(x, y, total) for y, total in zip(read, sums, strict=True)]

    def _x(self, piece: "_Piece", row: ir.Value, at: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        return self._load(self.x, [piece.tile, row, arith.addi(piece.first, at)], mask)

    def _load(self, buffer: ir.Value, at: list[ir.Value], mask: ir.Value | None) -> ir.Value:
        if mask is None:
            return vector.load(self.vec, buffer, at)
        return vector.maskedload(self.vec, buffer, at, mask, zeros(self.vec))

    def _with_earlier(self, total: ir.Value, piece: "_Piece", first: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Returns the sum of this piece and of earlier ones for these entries."""
        type_ = ir.VectorType(total.type)
        if mask is None:
            earlier = vector.load(type_, self.storage.output, [first])
        else:
            earlier = vector.maskedload(type_, self.storage.output, [first], mask, zeros(type_))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.ori(piece.tile, piece.first), index(0))
        return arith.addf(total, arith.select(is_first, zeros(type_), earlier))


@dataclass(frozen=True)
class _Piece:
    """Tokens of a tile from the first one on: a whole piece, or only `left` tokens if that is given."""

    tile: ir.Value
    first: ir.Value
    left: ir.Value | None
