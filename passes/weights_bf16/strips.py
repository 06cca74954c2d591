"""Products with a bf16 weight in blocks (`Vnni`), shared by the instruction sets that multiply pairs: strip by strip of rows.

func.func private @region_tile12(...)        tokens in groups of 12, the last group moved back so that none is past the end
  copy:      the tile of x into the workspace, if K is no multiple of a block or there are fewer tokens than a group has
  for each strip of the weight's rows, each group of the tile's tokens:
    multiply: the strip's blocks with x, which is read as it lies in memory   // the lowering's own
    store:    sums through the epilogue into y                                // token by token, 16 features a vector

A strip's blocks stay in the first-level cache while the tokens of the tile go by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import ByteWindows, Packing, Vnni, VnniMap
from gossamer.passes.framework.family import Matrix
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.product import Operands, Product
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, narrowed, vector_of, zeros

LANES = 16
"""Sums in a vector, and rows of the weight in a tile."""

_LINE = 32  # bf16 in a cache line


def storage_in_blocks(matrix: Matrix, feature: str, columns: Callable[[int], int | None]) -> Vnni | None:
    """Blocks of 16 or 32 rows, if the weight has such and the target the feature; `columns` gives the width for that of the
    weight's blocks."""
    if feature not in matrix.features or matrix.lanes != LANES or matrix.element != "bf16" or matrix.block is None:
        return None
    rows, width = matrix.block[0], columns(matrix.block[1])
    return Vnni(matrix.reduction, 32 if rows % 32 == 0 else 16, width) if rows % 16 == 0 and width else None


def tile_of(matrix: Matrix, stored: Format | Packing, feature: str, tile: tuple[int, ...]) -> tuple[int, ...] | None:
    """`tile` for blocks that these products can compute with."""
    fits = isinstance(stored, Vnni) and stored.rows <= 32 and stored.reduction == matrix.reduction
    return tile if fits and matrix.element == "bf16" and feature in matrix.features else None


@dataclass(frozen=True)
class Group:
    """What is multiplied at once: tokens of x from row `row` on, which is token `token`, and the blocks [begin, end) of the
    strip whose first row is `first_row`."""

    x: ir.Value
    row: ir.Value
    token: ir.Value
    begin: ir.Value
    end: ir.Value
    first_row: ir.Value


Multiply = Callable[[Operands, Group], None]


class Strips(Product):
    """A product with a weight in blocks of `height` x `width`; that of a map is up to the lowering.

    tile     tokens of a tile: where at most a fifth of the blocks is stored, and where more are
    aligned  whether x can be read as it lies in memory: its elements are the weight's, and K is a multiple of the width of a
             block
    """

    def __init__(self, op: Any, width: int = 2) -> None:
        super().__init__(op)
        stored = storage_of_type(ir.RankedTensorType(op.w.type))
        tile = integers(op.tile)
        if not isinstance(stored, (Vnni, VnniMap, ByteWindows)) or stored.rows > 2 * LANES or len(tile) != 2:
            raise CompileError(f"tile {tile} of a weight stored as {stored}: must be [tokens, tokens], blocks of 16 or 32 rows")
        self.tile = tile
        self.height, self.width = stored.rows, stored.columns if isinstance(stored, Vnni) else width
        self.halves = self.height // LANES
        self.groups = -(-self.M // self.height)
        self.padded_K = -(-self.K // self.width) * self.width
        self.element = ir.RankedTensorType(op.w.type).element_type
        self.aligned = self.padded_K == self.K and ir.RankedTensorType(op.x.type).element_type == self.element
        self.workspace = 0

    def in_groups(self, tokens: int, copied: int, multiply: Multiply) -> func.FuncOp:
        """A function that computes a tile of the tokens, `tokens` at a time, on a copy of that tile of x if it has `copied`
        tokens at most."""
        sums = tokens * self.height * byte_width(self.sum_type)
        self.workspace = max(self.workspace, sums + copied * self._copied_columns * byte_width(self.element))
        suffix = f"copied{tokens}" if copied else f"tile{tokens}"
        return self.function(suffix, lambda operands: self._emit(tokens, copied, multiply, operands))

    @property
    def _copied_columns(self) -> int:
        return -(-self.padded_K // _LINE) * _LINE

    def _tokens(self, positions: ir.Value) -> ir.Value:
        """The tokens of a tile, for a weight with these positions."""
        few, many = self.tile
        stored = load_index(positions, index(self.groups))
        sparse = arith.cmpi(arith.CmpIPredicate.ule, stored, index(self.groups * self.padded_K // self.width // 5))
        return arith.select(sparse, index(few), index(many))

    def sums(self, operands: Operands, tokens: int) -> ir.Value:
        """Memory for the sums of a group: [tokens, height]."""
        type_ = ir.MemRefType.get([tokens, self.height], self.sum_type)
        return memref.view(type_, operands.workspace, operands.offset, [])

    def store(self, operands: Operands, group: "Group", sums: ir.Value) -> None:
        """The sums of a group through the epilogue into y."""
        vec = vector_of(LANES, self.sum_type)
        with loop(index(0), index(ir.MemRefType(sums.type).shape[0]), index(1)) as tokens:
            t = tokens.induction_variable
            for half in range(self.halves):
                at = index(half * LANES)
                finish = partial(self.epilogue.every, vector.load(vec, sums, [t, at]))
                operands.memory.store_token(arith.addi(group.token, t), arith.addi(group.first_row, at), LANES, finish)

    def store_sums(self, operands: Operands, group: "Group", sums: list[ir.Value]) -> None:
        """The same for sums in registers, those of a token side by side."""
        memory = self.sums(operands, len(sums) // self.halves)
        for i, total in enumerate(sums):
            t, half = divmod(i, self.halves)
            vector.store(total, memory, [index(t), index(half * LANES)])
        self.store(operands, group, memory)

    def run_tiles(self, widths: Sequence[int], rows: int, multiply: Callable[[int, Operands, Group], None]) -> None:
        """As `run`, where tokens are multiplied `rows` at a time: the narrowest function takes fewer on a copy of x."""
        copied = 0 if self.aligned else max(self.tile)
        functions = [(n, self.in_groups(n, copied, partial(multiply, n))) for n in widths]
        if self.aligned:
            functions.append((0, self.in_groups(rows, rows, partial(multiply, rows))))
        self.run(functions)

    def run(self, functions: Sequence[tuple[int, func.FuncOp]]) -> None:
        """Share out tiles of tokens and, with fewer of these than threads, strips. Of the functions, which are named with the
        tokens that they need, the first one that is not too wide is called, or the last."""
        with ir.InsertionPoint(self.op):
            tile = self._tokens(self.buffers[1])
            tokens = memref.dim(self.storage.output, index(0))
            n_tiles = arith.ceildivui(tokens, tile)
            chunks = arith.ceildivui(self.storage.threads, arith.maxui(n_tiles, index(1)))
            chunks = arith.minui(index(self.groups), chunks)

            def body(task: ir.Value, offset: ir.Value) -> None:
                first = arith.muli(arith.divui(task, chunks), tile)
                low, high = self.row_range(arith.remui(task, chunks), chunks)
                arguments = [*self.buffers, *self.storage.outputs, self.storage.workspace, offset, first, low, high]
                _call_widest(tokens, functions, arguments)

            self.parallel(arith.muli(n_tiles, chunks), self.workspace, body)
        self.storage.erase()

    def _emit(self, width: int, copied: int, multiply: Multiply, operands: Operands) -> None:
        tokens = operands.memory.tokens
        end = arith.minui(arith.addi(operands.first, self._tokens(operands.positions)), tokens)
        last = arith.subi(arith.maxui(tokens, index(width)), index(width))
        x, start = operands.x, index(0)
        if copied:
            start = arith.minui(operands.first, last)
            sums = width * self.height * byte_width(self.sum_type)
            x = self._copy(operands, copied, sums, start, arith.maxui(end, arith.addi(start, index(width))))
        with loop(operands.low, operands.high, index(1)) as strips:
            strip = strips.induction_variable
            begin = load_index(operands.positions, strip)
            stop = load_index(operands.positions, arith.addi(strip, index(1)))
            with loop(operands.first, end, index(width)) as groups:
                token = arith.minui(groups.induction_variable, last)
                row = arith.muli(strip, index(self.height))
                multiply(operands, Group(x, arith.subi(token, start), token, begin, stop, row))

    def _copy(self, operands: Operands, most: int, offset: int, start: ir.Value, end: ir.Value) -> ir.Value:
        """The tokens [start, end) of x, with zeros after column K; tokens past the last one repeat it. At `offset` of the
        thread's workspace there is room for `most`."""
        columns = self._copied_columns
        at, type_ = arith.addi(operands.offset, index(offset)), ir.MemRefType.get([most, columns], self.element)
        copy = memref.view(type_, operands.workspace, at, [])
        given, line = ir.MemRefType(operands.x.type).element_type, vector_of(_LINE, self.element)
        last = arith.subi(operands.memory.tokens, index(1))
        with loop(start, end, index(1)) as tokens:
            token = arith.minui(tokens.induction_variable, last)
            with loop(index(0), index(columns), index(_LINE)) as lines:
                k = lines.induction_variable
                left = arith.subi(index(self.K), arith.minui(k, index(self.K)))
                at, mask = [token, arith.minui(k, index(self.K - 1))], mask_of(_LINE, left)
                read = vector.maskedload(vector_of(_LINE, given), operands.x, at, mask, zeros(vector_of(_LINE, given)))
                vector.store(self.as_copied(read, line), copy, [arith.subi(tokens.induction_variable, start), k])
        return copy

    def as_copied(self, read: ir.Value, line: ir.VectorType) -> ir.Value:
        """What a copy has in place of what was read of x."""
        return narrowed(read, line)


def _call_widest(tokens: ir.Value, functions: Sequence[tuple[int, func.FuncOp]], arguments: Sequence[ir.Value]) -> None:
    (needed, function), *others = functions
    if not others:
        func.CallOp(function, list(arguments))
        return
    choice = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, tokens, index(needed)), has_else=True)
    with ir.InsertionPoint(choice.then_block):
        func.CallOp(function, list(arguments))
        scf.YieldOp([])
    with ir.InsertionPoint(choice.else_block):
        _call_widest(tokens, others, arguments)
        scf.YieldOp([])
