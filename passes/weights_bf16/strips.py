"""The frame of products with a bf16 weight in blocks (`Vnni`), for all instruction sets that multiply pairs.

func.func private @region_tile12(...)        tokens in groups of 12; the last group is moved back so that none is past the end
  copy:      the tile of x into the workspace, if K is no multiple of a block or there are fewer tokens than in a group
  for each strip of the weight's rows, each group of the tile's tokens:
    multiply: the strip's blocks with x, unpacked                             // each lowering has its own
    store:    sums through the epilogue into y                                // token by token, in vectors of 16 features

The blocks of a strip stay in the first-level cache while all tokens of the tile are multiplied.
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
"""Number of sums in a vector, and of the weight's rows in a tile."""

_LINE = 32  # number of bf16 in a cache line


def storage_in_blocks(matrix: Matrix, feature: str, columns: Callable[[int], int | None]) -> Vnni | None:
    """Returns blocks of 16 or 32 rows; None if the weight has no such blocks or the target lacks the feature. `columns` maps
    the width of the weight's blocks to that of the stored ones, or None."""
    if feature not in matrix.features or matrix.lanes != LANES or matrix.element != "bf16" or matrix.block is None:
        return None
    rows, width = matrix.block[0], columns(matrix.block[1])
    return Vnni(matrix.reduction, 32 if rows % 32 == 0 else 16, width) if rows % 16 == 0 and width else None


def tile_of(matrix: Matrix, stored: Format | Packing, feature: str, tile: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns `tile` for blocks that these products can multiply; None for other storages."""
    fits = isinstance(stored, Vnni) and stored.rows <= 32 and stored.reduction == matrix.reduction
    return tile if fits and matrix.element == "bf16" and feature in matrix.features else None


@dataclass(frozen=True)
class Group:
    """A group of tokens and a strip that are multiplied together.

    x, row      tokens of `x` from row `row` on
    token       the number of the first of them
    begin, end  the blocks [begin, end) of the strip
    first_row   the first row of the strip
    """

    x: ir.Value
    row: ir.Value
    token: ir.Value
    begin: ir.Value
    end: ir.Value
    first_row: ir.Value


Multiply = Callable[[Operands, Group], None]


class Strips(Product):
    """A product with a weight in blocks of `height` x `width`. For a map, the lowering gives the width.

    tile     tokens of a tile if at most a fifth of the blocks is stored, and if more are
    aligned  whether x can be read unpacked: it has the weight's element type, and K is a multiple of the width of a block
    """

    def __init__(self, op: Any, width: int = 2) -> None:
        stored = storage_of_type(ir.RankedTensorType(op.w.type))
        tile = integers(op.tile)
        if not isinstance(stored, (Vnni, VnniMap, ByteWindows)) or stored.rows > 2 * LANES or len(tile) != 2:
            raise CompileError(f"tile {tile} of a weight stored as {stored}: must be [tokens, tokens], blocks of 16 or 32 rows")
        super().__init__(op, stored.rows)
        self.tile = tile
        self.height, self.width = stored.rows, stored.columns if isinstance(stored, Vnni) else width
        self.halves = self.height // LANES
        self.padded_K = -(-self.K // self.width) * self.width
        self.element = ir.RankedTensorType(op.w.type).element_type
        self.aligned = self.padded_K == self.K and ir.RankedTensorType(op.x.type).element_type == self.element
        self.workspace = 0

    def in_groups(self, tokens: int, copied: int, multiply: Multiply) -> func.FuncOp:
        """Returns a function that computes a tile of tokens, `tokens` at a time. If `copied`, it works on a copy of the tile's
        x, which has at most `copied` tokens."""
        sums = tokens * self.height * byte_width(self.sum_type)
        self.workspace = max(self.workspace, sums + copied * self._copied_columns * byte_width(self.element))
        suffix = f"copied{tokens}" if copied else f"tile{tokens}"
        return self.function(suffix, lambda operands: self._emit(tokens, copied, multiply, operands))

    @property
    def _copied_columns(self) -> int:
        return -(-self.padded_K // _LINE) * _LINE

    def _tokens(self, positions: ir.Value) -> ir.Value:
        """Returns the tokens of a tile, for a weight with these positions."""
        few, many = self.tile
        stored = load_index(positions, index(self.groups))
        sparse = arith.cmpi(arith.CmpIPredicate.ule, stored, index(self.groups * self.padded_K // self.width // 5))
        return arith.select(sparse, index(few), index(many))

    def sums(self, operands: Operands, tokens: int) -> ir.Value:
        """Returns memory for the sums of a group: [tokens, height]."""
        type_ = ir.MemRefType.get([tokens, self.height], self.sum_type)
        return memref.view(type_, operands.workspace, operands.offset, [])

    def store(self, operands: Operands, group: "Group", sums: ir.Value) -> None:
        """Stores the sums of a group through the epilogue into y."""
        vec = vector_of(LANES, self.sum_type)
        with loop(index(0), index(ir.MemRefType(sums.type).shape[0]), index(1)) as tokens:
            t = tokens.induction_variable
            for half in range(self.halves):
                at = index(half * LANES)
                finish = partial(self.epilogue.every, vector.load(vec, sums, [t, at]))
                operands.memory.store_token(arith.addi(group.token, t), arith.addi(group.first_row, at), LANES, finish)

    def store_sums(self, operands: Operands, group: "Group", sums: list[ir.Value]) -> None:
        """Stores sums in registers, those of a token side by side, through the epilogue into y."""
        memory = self.sums(operands, len(sums) // self.halves)
        for i, total in enumerate(sums):
            t, half = divmod(i, self.halves)
            vector.store(total, memory, [index(t), index(half * LANES)])
        self.store(operands, group, memory)

    def run_tiles(self, widths: Sequence[int], rows: int, multiply: Callable[[int, Operands, Group], None]) -> None:
        """Runs functions for tokens in multiples of `rows`, as `run` does. Fewer than `rows` tokens take a copy of x."""
        copied = 0 if self.aligned else max(self.tile)
        functions = [(n, self.in_groups(n, copied, partial(multiply, n))) for n in widths]
        if self.aligned:
            functions.append((0, self.in_groups(rows, rows, partial(multiply, rows))))
        self.run(functions)

    def run(self, functions: Sequence[tuple[int, func.FuncOp]]) -> None:
        """Replaces the op by calls that share out tiles of tokens and, if there are fewer tiles than threads, strips.

        Each function comes with the tokens that it needs. The first one that does not need too many is called, or the last.
        """
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
        """Copies the tokens [start, end) of x to `offset` of the thread's workspace, which has room for `most`.

        Zeros follow column K. Tokens past the last one repeat it.
        """
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
        """Converts a vector of x for the copy."""
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
