"""lower-broadcast: a `kernel.spmm` of the schedule "broadcast" becomes loops with tokens in lanes.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "broadcast", tile = [32], ...} : ... tensor<..., "padded(...)">
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_tile32(...)               // or _tile16, _tile8 for what is left of the tokens
         func.func private @region_tile16(...)
           pack:    the tile of x, transposed, into the workspace as [K][16]
           for each panel of 1024 rows, each block of 256 columns, each row:
             scf.for %p step 4 iter_args(4 vectors)    // padded_loop.py: its nonzeros in the block, four at a time
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

Beside lower-kblock: half a vector for no more tokens than that; one loop a row, of equal steps. Runs on functions whose storage
is exposed (expose-storage). Nothing is read or written past the end of a tensor; tokens past the last one repeat it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Padded
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, Product, lanes_of, products, shape_of, stored_of
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    loop,
    mask_of,
    narrowed,
    reserve_workspace,
    transpose,
    vector_of,
    widened,
    zeros,
)
from gossamer.passes.weights.padded_loop import PaddedRows

_COLUMNS = ((0.25, 256), (0.07, 384), (0.0, 768))  # columns of a block at most, for weights denser than this
_IN_CHAINS = 4  # vectors of tokens of a tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_NONZERO = {0.5: 0.9, 1.0: 1.2, 2.0: 2.25}  # cycles by vectors of tokens
_ROW, _ELEMENT = 8.0, 0.4


def _storage(matrix: Matrix) -> Padded:
    """Blocks as equal as can be: narrow, for x stays in the first-level cache, but each with some nonzeros of a row."""
    widest = next((columns for denser, columns in _COLUMNS if matrix.density > denser), _COLUMNS[-1][1])
    blocks = -(-matrix.columns // widest)
    return Padded(matrix.reduction, -(-matrix.columns // (16 * blocks)) * 16)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    return (2 * matrix.lanes,) if isinstance(stored, Padded) and stored.reduction == matrix.reduction else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: c(v) a nonzero, of which a row gets 1.5 more in every block to fill up; 8 M blocks for
    starts and ends of rows; 0.4 (K + M) v L for the transposes of x and y."""
    m, k, lanes = matrix.rows, matrix.columns, matrix.lanes
    blocks = -(-k // _storage(matrix).columns)
    full, left = divmod(tokens, 2 * lanes)
    tiles = [2.0] * full + ([0.5 if 2 * left <= lanes else 1.0 if left <= lanes else 2.0] if left else [])
    stored = matrix.nonzeros + 1.5 * m * blocks
    return sum(stored * _NONZERO[v] + _ROW * m * blocks + _ELEMENT * (k + m) * v * lanes for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), lanes, stored = shape_of(op), lanes_of(op), stored_of(op, Padded)
    inner = partial(PaddedRows, rows=rows, columns=stored.columns, lanes=lanes)
    return ChainProduct(_IN_CHAINS * lanes, 1, rows, -(-columns // stored.columns), None, inner)


BROADCAST = Family("broadcast", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerBroadcast:
    """Lower products of padded rows to scf and vector."""

    name: ClassVar[str] = "lower-broadcast"

    def run(self, module: ir.Module) -> None:
        for op in products(module, BROADCAST.name):
            spmm = _Spmm(op)
            reserve_workspace(module, spmm.workspace)
            _lower(spmm)


class _Spmm(Product):
    """A kernel.spmm, tiled by `tokens`."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        stored, tile = stored_of(op, Padded), integers(op.tile)
        if tile not in ([self.lanes], [2 * self.lanes]):
            raise CompileError(f"tile {tile} is not one or two vectors of {self.lanes} tokens")
        (self.tokens,) = tile
        self.columns = stored.columns
        self.blocks = -(-self.K // self.columns)
        self.rows = min(_ROWS, self.groups * self.lanes)
        self.padded_K = -(-self.K // self.lanes) * self.lanes

    @property
    def workspace(self) -> int:
        """Bytes a thread needs: the packed tile of x and the sums of a panel of rows."""
        size = (self.padded_K + self.rows) * self.tokens * byte_width(self.sum_type)
        return -(-size // 64) * 64

    def work_before(self, row: ir.Value) -> ir.Value:
        """By nonzeros: where a row of a block starts and ends costs about as much as four."""
        return self.stored_before(row, self.blocks, 4)


def _lower(spmm: _Spmm) -> None:
    widths = [w for w in (2 * spmm.lanes, spmm.lanes, spmm.lanes // 2) if 1 < w <= spmm.tokens]
    with spmm.op.location:
        tiles = {w: spmm.function(f"tile{w}", partial(_emit_tile, spmm, w)) for w in widths}
        spmm.by_tiles(tiles, spmm.workspace)


def _emit_tile(spmm: _Spmm, width: int, operands: Operands) -> None:
    _Tile(spmm, width, operands).emit()


class _Tile:
    """Emits the body of a function that computes `width` tokens, in vectors of `lanes`."""

    def __init__(self, spmm: _Spmm, width: int, operands: Operands) -> None:
        self.spmm, self.width, self.lanes = spmm, width, min(width, spmm.lanes)
        self.operands, self.memory = operands, operands.memory
        self.vec = vector_of(self.lanes, spmm.sum_type)
        self.at = [index(t) for t in range(0, width, self.lanes)]

    def emit(self) -> None:
        spmm, lanes = self.spmm, index(self.spmm.lanes)
        packed, sums = self._scratch()
        self._pack(packed)
        shape = spmm.M, spmm.columns, spmm.lanes
        nonzeros = PaddedRows(self.operands.weight, packed, self.vec, len(self.at), *shape)
        step = index(spmm.rows // spmm.lanes)
        with loop(self.operands.low, self.operands.high, step) as panels:
            panel = panels.induction_variable
            origin = arith.muli(panel, lanes)
            end = arith.muli(arith.minui(arith.addi(panel, step), self.operands.high), lanes)
            row_end = arith.minui(end, index(spmm.M))
            with loop(index(0), index(spmm.blocks), index(1)) as blocks:
                block = blocks.induction_variable
                first, last = (arith.cmpi(arith.CmpIPredicate.eq, block, index(b)) for b in (0, spmm.blocks - 1))
                with loop(origin, row_end, index(1)) as rows:
                    m = rows.induction_variable
                    slot = arith.subi(m, origin)
                    start = scf.IfOp(first, [self.vec] * len(self.at), has_else=True)
                    with ir.InsertionPoint(start.then_block):
                        scf.YieldOp([zeros(self.vec)] * len(self.at))
                    with ir.InsertionPoint(start.else_block):
                        scf.YieldOp([vector.load(self.vec, sums, [slot, t]) for t in self.at])
                    totals = nonzeros.add(block, m, list(start.results))
                    if not spmm.epilogue.trivial:
                        totals = self._begun(totals, m, last)
                    for t, total in zip(self.at, totals, strict=True):
                        vector.store(total, sums, [slot, t])
            with loop(origin, row_end, index(self.lanes)) as groups:
                row = groups.induction_variable
                self._unpack(sums, arith.subi(row, origin), row)

    def _scratch(self) -> tuple[ir.Value, ir.Value]:
        """This thread's part of the workspace: x as [K][width] and the sums of a panel of rows as [rows][width]."""
        size = self.width * byte_width(self.spmm.sum_type)
        types = [ir.MemRefType.get([rows, self.width], self.spmm.sum_type) for rows in (self.spmm.padded_K, self.spmm.rows)]
        after = arith.addi(self.operands.offset, index(self.spmm.padded_K * size))
        packed, sums = (
            memref.view(t, self.operands.workspace, at, []) for t, at in zip(types, (self.operands.offset, after), strict=True)
        )
        return packed, sums

    def _pack(self, packed: ir.Value) -> None:
        """x[first + t, k] -> packed[k, t]; tokens past the last one repeat it."""
        spmm, lanes = self.spmm, self.lanes
        narrow = vector_of(lanes, ir.MemRefType(self.operands.x.type).element_type)
        last = arith.subi(self.memory.tokens, index(1))
        with loop(index(0), index(spmm.K), index(lanes)) as ks:
            k = ks.induction_variable
            mask = mask_of(lanes, arith.subi(index(spmm.K), k))
            for at in self.at:
                start = arith.addi(self.operands.first, at)
                rows = []
                for r in range(lanes):
                    token = arith.minui(arith.addi(start, index(r)), last)
                    loaded = vector.maskedload(narrow, self.operands.x, [token, k], mask, zeros(narrow))
                    rows.append(widened(loaded, self.vec))
                for r, column in enumerate(transpose(rows)):
                    vector.store(column, packed, [arith.addi(k, index(r)), at])

    def _begun(self, totals: list[ir.Value], m: ir.Value, last: ir.Value) -> list[ir.Value]:
        """In the last block, what the epilogue begins with on the sums of a row; else the sums."""
        finish = scf.IfOp(last, [self.vec] * len(totals), has_else=True)
        with ir.InsertionPoint(finish.then_block):
            read = self.memory.by_feature(m)
            scf.YieldOp([widened(self.spmm.epilogue.before(t, read), self.vec) for t in totals])
        with ir.InsertionPoint(finish.else_block):
            scf.YieldOp(totals)
        return list(finish.results)

    def _unpack(self, sums: ir.Value, slot: ir.Value, row: ir.Value) -> None:
        """sums[slot + i, t] -> out[first + t, row + i] through the rest of the epilogue, for as many rows as lanes."""
        lanes, epilogue = self.lanes, self.spmm.epilogue
        crossing = vector_of(lanes, epilogue.crossing.type)
        for at in self.at:
            group = [vector.load(self.vec, sums, [arith.addi(slot, index(r)), at]) for r in range(lanes)]
            for r, values in enumerate(transpose(group)):
                token = arith.addi(arith.addi(self.operands.first, at), index(r))
                self.memory.store_token(token, row, lanes, partial(epilogue.after, narrowed(values, crossing)))
