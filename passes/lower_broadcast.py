"""lower-broadcast: a `kernel.spmm` of the schedule "broadcast" becomes loops with tokens in lanes, for some tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "broadcast", tile = [32], ...} : ... tensor<..., "padded(...)">
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_tile32(...)               // or _tile16, _tile8 for what is left of the tokens
         func.func private @region_tile16(...)
           pack:    the tile of x, transposed, into the workspace: for each block of 256 columns [256][16] and a row of zeros
           for each panel of 1024 rows, each block of columns, each row:
             scf.for %p step 4 iter_args(4 vectors)    // the row's nonzeros in the block, filled up to a multiple of 4
               values[p..p + 4], coordinates[p..p + 4] as one load each
               4 times: vector.fma(a value in all lanes, x[its coordinate][0..15], one of the sums)
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

Beside lower-kblock: half a vector for no more tokens than that; one loop a row, of equal steps; values come four at a time,
because a load of one into all lanes takes as long as a load of x. Runs on functions whose storage is exposed (expose-storage).
Nothing is read or written past the end of a tensor; tokens past the last one repeat it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Padded
from gossamer.passes.encodings import storage_of_type
from gossamer.passes.family import Family, Matrix
from gossamer.passes.product import Operands, Product, products
from gossamer.passes.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    mask_of,
    narrowed,
    reserve_workspace,
    transpose,
    vector_of,
    widened,
    zeros,
)

_COLUMNS = ((0.25, 256), (0.07, 384), (0.0, 768))  # columns of a block at most, for weights denser than this
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_NONZERO = {0.5: 0.9, 1.0: 1.2, 2.0: 2.25}  # cycles by vectors of tokens
_ROW, _ELEMENT = 8.0, 0.4
_MOST = 32  # tokens up to which it may be the fastest


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


BROADCAST = Family("broadcast", "lower-broadcast", _storage, _tile, _cycles, most=_MOST)


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
        stored, tile = storage_of_type(ir.RankedTensorType(op.w.type)), integers(op.tile)
        if not isinstance(stored, Padded):
            raise CompileError(f"no broadcast schedule for a weight stored as {stored}")
        if tile not in ([self.lanes], [2 * self.lanes]):
            raise CompileError(f"tile {tile} is not one or two vectors of {self.lanes} tokens")
        (self.tokens,) = tile
        self.columns = stored.columns
        self.blocks = -(-self.K // self.columns)
        self.rows = min(_ROWS, self.groups * self.lanes)

    @property
    def workspace(self) -> int:
        """Bytes a thread needs: the packed tile of x and the sums of a panel of rows."""
        size = (self.blocks * (self.columns + 1) + self.rows) * self.tokens * byte_width(self.sum_type)
        return -(-size // 64) * 64


def _lower(spmm: _Spmm) -> None:
    widths = [w for w in (2 * spmm.lanes, spmm.lanes, spmm.lanes // 2) if 1 < w <= spmm.tokens]
    with spmm.op.location:
        tiles = {w: spmm.function(f"tile{w}", partial(_emit_tile, spmm, w)) for w in widths}
        with ir.InsertionPoint(spmm.op):
            tile = index(spmm.tokens)
            n_tiles = arith.ceildivui(memref.dim(spmm.storage.output, index(0)), tile)
            # With fewer token tiles than threads, the rows of the weight are shared out too.
            chunks = arith.ceildivui(spmm.storage.threads, arith.maxui(n_tiles, index(1)))
            chunks = arith.minui(index(spmm.groups), chunks)

            def body(task: ir.Value, offset: ir.Value) -> None:
                first = arith.muli(arith.divui(task, chunks), tile)
                spmm.call(tiles, offset, first, *spmm.row_range(arith.remui(task, chunks), chunks))

            spmm.parallel(arith.muli(n_tiles, chunks), spmm.workspace, body)
    spmm.storage.erase()


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
        self._pack()
        sums = self._sums()
        step = index(spmm.rows // spmm.lanes)
        with loop(self.operands.low, self.operands.high, step) as panels:
            panel = panels.induction_variable
            origin = arith.muli(panel, lanes)
            end = arith.muli(arith.minui(arith.addi(panel, step), self.operands.high), lanes)
            row_end = arith.minui(end, index(spmm.M))
            with loop(index(0), index(spmm.blocks), index(1)) as blocks:
                block = blocks.induction_variable
                panel = self._panel(block)
                first, last = (arith.cmpi(arith.CmpIPredicate.eq, block, index(b)) for b in (0, spmm.blocks - 1))
                with loop(origin, row_end, index(1)) as rows:
                    m = rows.induction_variable
                    slot = arith.subi(m, origin)
                    start = scf.IfOp(first, [self.vec] * len(self.at), has_else=True)
                    with ir.InsertionPoint(start.then_block):
                        scf.YieldOp([zeros(self.vec)] * len(self.at))
                    with ir.InsertionPoint(start.else_block):
                        scf.YieldOp([vector.load(self.vec, sums, [slot, t]) for t in self.at])
                    totals = self._row(panel, block, m, list(start.results))
                    if not spmm.epilogue.trivial:
                        totals = self._begun(totals, m, last)
                    for t, total in zip(self.at, totals, strict=True):
                        vector.store(total, sums, [slot, t])
            with loop(origin, row_end, index(self.lanes)) as groups:
                row = groups.induction_variable
                self._unpack(sums, arith.subi(row, origin), row)

    def _panel(self, block: ir.Value) -> ir.Value:
        """Where in this thread's workspace a block of columns of x is packed, as [columns + 1][width], flat."""
        type_ = ir.MemRefType.get([(self.spmm.columns + 1) * self.width], self.spmm.sum_type)
        at = arith.muli(block, index(self._panel_size))
        return memref.view(type_, self.operands.workspace, arith.addi(self.operands.offset, at), [])

    def _sums(self) -> ir.Value:
        """Where the sums of a panel of rows lie, as [rows][width]."""
        type_ = ir.MemRefType.get([self.spmm.rows, self.width], self.spmm.sum_type)
        after = arith.addi(self.operands.offset, index(self.spmm.blocks * self._panel_size))
        return memref.view(type_, self.operands.workspace, after, [])

    @property
    def _panel_size(self) -> int:
        return (self.spmm.columns + 1) * self.width * byte_width(self.spmm.sum_type)

    def _pack(self) -> None:
        """x[first + t, k] -> panel[k, t], zeros after each block; tokens past the last one repeat it."""
        spmm, lanes = self.spmm, self.lanes
        narrow = vector_of(lanes, ir.MemRefType(self.operands.x.type).element_type)
        last = arith.subi(self.memory.tokens, index(1))
        with loop(index(0), index(spmm.blocks), index(1)) as blocks:
            block = blocks.induction_variable
            origin, panel = arith.muli(block, index(spmm.columns)), self._panel(block)
            count = arith.minui(index(spmm.columns), arith.subi(index(spmm.K), origin))
            with loop(index(0), count, index(lanes)) as ks:
                k = ks.induction_variable
                mask = mask_of(lanes, arith.subi(count, k))
                for at in self.at:
                    start = arith.addi(self.operands.first, at)
                    rows = []
                    for r in range(lanes):
                        token = arith.minui(arith.addi(start, index(r)), last)
                        here = [token, arith.addi(origin, k)]
                        loaded = vector.maskedload(narrow, self.operands.x, here, mask, zeros(narrow))
                        rows.append(widened(loaded, self.vec))
                    for r, column in enumerate(transpose(rows)):
                        into = arith.muli(arith.addi(k, index(r)), index(self.width))
                        vector.store(column, panel, [arith.addi(into, at)])
            for at in self.at:
                vector.store(zeros(self.vec), panel, [arith.addi(index(spmm.columns * self.width), at)])

    def _row(self, panel: ir.Value, block: ir.Value, m: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + the products of the row's nonzeros in this block with their columns of x.

        Each of the four nonzeros of a step has sums of its own, for a multiply-add takes four cycles.
        """
        ways, vectors = (4, 2)[len(self.at) - 1], len(self.at)
        at = arith.addi(arith.muli(block, index(self.spmm.M)), m)
        begin = load_index(self.operands.positions, at)
        end = load_index(self.operands.positions, arith.addi(at, index(1)))
        several = sums + [zeros(self.vec)] * (vectors * (ways - 1))
        with loop(begin, end, index(Padded.GROUP), several) as groups:
            totals = list(groups.inner_iter_args)
            for i, (weight, column) in enumerate(self._group(groups.induction_variable)):
                for v, t in enumerate(self.at):
                    mine = i % ways * vectors + v
                    totals[mine] = vector.fma(weight, vector.load(self.vec, panel, [arith.addi(column, t)]), totals[mine])
            scf.YieldOp(totals)
        first, *others = (list(groups.results)[way * vectors : (way + 1) * vectors] for way in range(ways))
        for other in others:
            first = [arith.addf(a, b) for a, b in zip(first, other, strict=True)]
        return first

    def _group(self, p: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """Of the nonzeros from p on: the values, each in all lanes, and where their columns begin in a panel of x."""
        size = Padded.GROUP
        stored = vector_of(size, ir.MemRefType(self.operands.values.type).element_type)
        values = widened(vector.load(stored, self.operands.values, [p]), vector_of(size, self.spmm.sum_type))
        repeated = self._kept(vector.shuffle(values, values, [i % size for i in range(max(size, self.lanes))]))
        pairs = []
        for i, scaled in enumerate(self._coordinates(p)):
            weight = vector.shuffle(repeated, repeated, [lane // size * size + i for lane in range(self.lanes)])
            pairs.append((weight, arith.divui(arith.muli(scaled, index(self.width)), index(Padded.SCALE))))
        return pairs

    def _coordinates(self, p: ir.Value) -> list[ir.Value]:
        """The coordinates from p on, as they are stored.

        Whole vectors of x keep the load units busy: four coordinates are one load more. Half vectors leave them time for four.
        """
        if self.lanes < self.spmm.lanes:
            return [load_index(self.operands.coordinates, arith.addi(p, index(i))) for i in range(Padded.GROUP)]
        i16, i64 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(64)
        loaded = vector.load(vector_of(Padded.GROUP, i16), self.operands.coordinates, [p])
        together = vector.extract(vector.bitcast(vector_of(1, i64), loaded), [], [0])
        shifted = (arith.shrui(together, arith.constant(i64, 16 * i)) for i in range(Padded.GROUP))
        return [arith.index_castui(ir.IndexType.get(), arith.trunci(i16, each)) for each in shifted]

    def _kept(self, values: ir.Value) -> ir.Value:
        """`values`, which LLVM does not see through: it would load each of them into all lanes on its own."""
        bits = self.spmm.lanes * 8 * byte_width(self.spmm.sum_type)
        if bits == 128:
            return values
        return llvm.inline_asm(values.type, [values], "", "=v,0" if bits == 512 else "=x,0")

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
