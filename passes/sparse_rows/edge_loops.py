"""What the lowerings of attention over edges share: rows of a CSR pattern in parts of equal work, and the score of an entry.

scf.parallel (%part) = ...                     rows that begin in the part's share of the entries
  for each group of heads: func.call @region_heads(operands, outputs, workspace, offset, first head, low, high)

A group has as many heads as fit, with their features, into half the registers; each is a problem of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, vector

from gossamer.dialects.edges import operands_of
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.passes.loops.buffers import Storage, buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.heads_in_lanes import dot, spread
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.random_bits import at_least, constants, random_bits
from gossamer.passes.loops.row_shares import parts_of, rows_of
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    mask_of,
    parallel,
    reserve_workspace,
    splat_of,
    vector_of,
    zeros,
)

_AHEAD = 16  # entries: what is asked for now is there when it is needed, and not yet replaced
_LINE = 64  # bytes that memory is read in
VECTORS = 16  # sums in registers, as many as leave room for what they are made of
COMMON = ("direction", "seed")
"""What is the same for all rows and columns."""
ROW_SIDE = {"target": ("target", "queries", "statistics", "gradient", "delta"), "source": ("source", "keys", "values")}
"""What is read by row of the pattern, and what by column, seen from the target side; the source side exchanges them."""


@dataclass(frozen=True)
class Rows:
    """What a function works on: memrefs by name, the group's first head, and rows [low, high)."""

    memory: dict[str, ir.Value]
    outputs: tuple[ir.Value, ...]
    workspace: ir.Value
    offset: ir.Value
    first_head: ir.Value
    low: ir.Value
    high: ir.Value


@dataclass(frozen=True)
class Entry:
    """An entry of a row: its number in the pattern's order, its row and its column, and what has been read for the row."""

    number: ir.Value
    row: ir.Value
    column: ir.Value
    own: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The score of an entry before leaky_relu, a value a head, and what it is made of.

    product  of query and key, or of direction and leaky_relu(query + key)
    joined   query + key where there is a direction, in vectors of the heads' elements
    """

    raw: ir.Value
    product: ir.Value | None
    joined: tuple[ir.Value, ...] = ()


class EdgeRows:
    """Heads, sizes and operands of a kernel.attend_edges or kernel.attend_edges_grad, on the given side of the pattern.

    heads, features, size  heads; elements of a head in values, and in queries and keys (0 without)
    group                  heads that are computed at once; `width` lanes hold one value for each of them
    """

    def __init__(self, op: Any, bits: int, side: str) -> None:
        self.op, self.side = op, side
        self.storage: Storage = storage_of(op.operation)
        operands = operands_of(op)
        self.names = list(operands)
        pattern = ir.RankedTensorType(op.a.type)
        if Format.parse(str(pattern.encoding)).levels != Format.CSR.levels:
            raise CompileError(f"{op.operation.name} at {op.location}: its pattern is {pattern}, must be CSR")
        arrays = zip(("positions", "coordinates", "weight"), sparse_buffers_of(op.a), strict=True)
        self.buffers = dict(arrays) | {name: buffer_of(operand) for name, operand in operands.items()}
        self.weighted = ir.IntegerAttr(op.weighted).value == 1
        self.scale, self.dropout = (ir.FloatAttr(a).value for a in (op.scale, op.dropout))
        # leaky_relu is around the score, or around query + key.
        self.directed = "direction" in self.names
        slope: float = ir.FloatAttr(op.slope).value
        self.slope, self.inner_slope = (1.0, slope) if self.directed else (slope, 1.0)
        self.heads = ir.IntegerAttr(op.heads).value
        self.element = ir.MemRefType(self.buffers["values"].type).element_type
        self.lanes = bits // ir.FloatType(self.element).width
        self.features = self._columns("values") // self.heads
        self.size = self._columns("keys") // self.heads if "keys" in self.names else 0
        widest = max(self.features, self.size)
        fitting = [n for n in range(1, min(self.heads, self.lanes) + 1) if self.heads % n == 0]
        self.group = max(n for n in fitting if n == 1 or n * widest <= VECTORS * self.lanes)
        self.width = 1 << (self.group - 1).bit_length()
        self.vec, self.short = vector_of(self.lanes, self.element), vector_of(self.width, self.element)

    def _columns(self, name: str) -> int:
        return ir.MemRefType(self.buffers[name].type).shape[1]

    def lower(self, scratch: int, emit: Callable[[Rows], None]) -> None:
        """Replace the op by calls of the function whose body `emit` builds, with `scratch` elements a thread."""
        function = self._function(emit)
        space = scratch * byte_width(self.element)
        module = self.op.operation.parent.parent.opview
        reserve_workspace(module, space)
        with ir.InsertionPoint(self.op):
            positions, coordinates = self.buffers["positions"], self.buffers["coordinates"]
            rows = arith.subi(memref.dim(positions, index(0)), index(1))
            entries = memref.dim(coordinates, index(0))
            each = -(-self.heads * (self.features + self.size) // self.lanes) + 8
            parts = parts_of(entries, index(each), self.storage.threads)
            with parallel(parts) as part:
                low, high = rows_of(positions, rows, entries, part, parts)
                offset = arith.muli(thread_number(), index(space))
                with loop(index(0), index(self.heads), index(self.group)) as groups:
                    memory = [*self.buffers.values(), *self.storage.outputs, self.storage.workspace]
                    func.CallOp(function, [*memory, offset, groups.induction_variable, low, high])
        self.storage.erase()

    def _function(self, emit: Callable[[Rows], None]) -> func.FuncOp:
        parent = self.op.operation.parent.opview
        values = [*self.buffers.values(), *self.storage.outputs, self.storage.workspace]
        types = [value.type for value in values] + [ir.IndexType.get()] * 4
        with ir.InsertionPoint(parent):
            function = func.FuncOp(f"{parent.name.value}_heads", (types, []), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            *memory, workspace, offset, first_head, low, high = function.entry_block.arguments
            outputs = tuple(memory[len(self.buffers) :])
            emit(Rows(dict(zip(self.buffers, memory, strict=False)), outputs, workspace, offset, first_head, low, high))
            func.ReturnOp([])
        return function

    # Reading

    def bounds(self, rows: Rows, row: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The entries [begin, end) of a row."""
        begin, end = (load_index(rows.memory["positions"], at) for at in (row, arith.addi(row, index(1))))
        return begin, end

    def entry(self, rows: Rows, place: ir.Value, row: ir.Value, own: dict[str, Any]) -> Entry:
        """The entry that is stored at a place of the pattern."""
        number = load_index(rows.memory["entry"], place) if "entry" in self.names else place
        return Entry(number, row, load_index(rows.memory["coordinates"], place), own)

    def read_row(self, rows: Rows, row: ir.Value) -> dict[str, Any]:
        """All that belongs to a row and not to its entries, by name."""
        own = {name: self._read(rows, name, row) for name in ROW_SIDE[self.side] if name in self.names}
        if self.directed:
            own["direction"] = self.load_columns(rows.memory["direction"], index(0), rows.first_head, self.size)
        return own

    def read(self, rows: Rows, name: str, entry: Entry) -> Any:
        """What an entry takes of a term: one value a head, or vectors of the heads' elements."""
        known = entry.own.get(name)
        if known is not None:
            return known
        if name != "edge":
            return self._read(rows, name, entry.column)
        if self._columns("edge") == self.heads:
            return self.load_heads(rows.memory["edge"], entry.number, rows.first_head)
        return vector.broadcast(self.short, memref.load(rows.memory["edge"], [entry.number, index(0)]))

    def _read(self, rows: Rows, name: str, row: ir.Value) -> Any:
        buffer = rows.memory[name]
        if name in ("values", "gradient"):
            return self.load_columns(buffer, row, rows.first_head, self.features)
        if name in ("queries", "keys"):
            return self.load_columns(buffer, row, rows.first_head, self.size)
        if name == "statistics":
            second = arith.addi(rows.first_head, index(self.heads))
            return self.load_heads(buffer, row, rows.first_head), self.load_heads(buffer, row, second)
        return self.load_heads(buffer, row, rows.first_head)

    def load_heads(self, buffer: ir.Value, row: ir.Value, at: ir.Value) -> ir.Value:
        """A value for each head of the group, zeros behind them."""
        if self.width == self.group:
            return vector.load(self.short, buffer, [row, at])
        return vector.maskedload(self.short, buffer, [row, at], mask_of(self.width, index(self.group)), zeros(self.short))

    def store_heads(self, value: ir.Value, buffer: ir.Value, row: ir.Value, at: ir.Value) -> None:
        """The inverse of `load_heads`."""
        if self.width == self.group:
            vector.store(value, buffer, [row, at])
        else:
            vector.maskedstore(buffer, [row, at], mask_of(self.width, index(self.group)), value)

    def places(self, first_head: ir.Value, size: int) -> list[tuple[ir.Value, ir.Value | None]]:
        """The column where each vector of the group's elements begins, `size` a head, and the mask of one that is not whole."""
        base, total = arith.muli(first_head, index(size)), self.group * size
        whole = [(arith.addi(base, index(at)), None) for at in range(0, total - total % self.lanes, self.lanes)]
        if total % self.lanes == 0:
            return list(whole)
        last = arith.addi(base, index(total - total % self.lanes))
        return [*whole, (last, mask_of(self.lanes, index(total % self.lanes)))]

    def load_columns(self, buffer: ir.Value, row: ir.Value, first_head: ir.Value, size: int) -> list[ir.Value]:
        """The group's elements in a row of a matrix."""
        return [self.load_vector(buffer, row, *place) for place in self.places(first_head, size)]

    def load_vector(self, buffer: ir.Value, row: ir.Value, column: ir.Value, mask: ir.Value | None) -> ir.Value:
        """One vector of a row."""
        if mask is None:
            return vector.load(self.vec, buffer, [row, column])
        return vector.maskedload(self.vec, buffer, [row, column], mask, zeros(self.vec))

    def store_vector(self, value: ir.Value, buffer: ir.Value, row: ir.Value, column: ir.Value, mask: ir.Value | None) -> None:
        """The inverse of `load_vector`."""
        if mask is None:
            vector.store(value, buffer, [row, column])
        else:
            vector.maskedstore(buffer, [row, column], mask, value)

    def prefetch(self, rows: Rows, place: ir.Value) -> None:
        """Ask for what is read by column for an entry some places ahead, whichever row that is in."""
        last = arith.subi(memref.dim(rows.memory["coordinates"], index(0)), index(1))
        ahead = arith.minui(arith.addi(place, index(_AHEAD)), last)
        column = load_index(rows.memory["coordinates"], ahead)
        for name in self.names:
            if name in (*ROW_SIDE[self.side], *COMMON, "edge", "entry"):
                continue
            width = 1 if name == "statistics" else self._columns(name) // self.heads
            first = arith.muli(rows.first_head, index(width))
            ends = [first, arith.addi(first, index(self.heads))] if name == "statistics" else [first]
            for end in ends:
                for at in range(0, self.group * width, _LINE // byte_width(self.element)):
                    memref.prefetch(rows.memory[name], [column, arith.addi(end, index(at))], False, 3, True)

    # Computing

    def score(self, rows: Rows, entry: Entry) -> Score:
        """That of an entry."""
        total, product = None, None
        joined: tuple[ir.Value, ...] = ()
        for name in ("target", "source", "edge"):
            if name in self.names:
                term = self.read(rows, name, entry)
                total = term if total is None else arith.addf(total, term)
        if self.size:
            left, right = self.read(rows, "queries", entry), self.read(rows, "keys", entry)
            if self.directed:
                joined = tuple(arith.addf(a, b) for a, b in zip(left, right, strict=True))
                left, right = entry.own["direction"], [self.leaky(each, each, self.inner_slope) for each in joined]
            product = self.dots(left, right, self.size)
            factor = self.factor(rows, entry)
            total = arith.mulf(product, factor) if total is None else vector.fma(product, factor, total)
        return Score(zeros(self.short) if total is None else total, product, joined)

    def kept(self, rows: Rows, number: ir.Value, lanes: int) -> ir.Value:
        """What dropout multiplies weights with, for `lanes` values of the heads of the group: of entry `number`, and from those
        on that follow it."""
        type_, i64 = vector_of(lanes, self.element), ir.IntegerType.get_signless(64)
        first = arith.addi(arith.muli(number, index(self.heads)), rows.first_head)
        places = constants(vector_of(lanes, i64), [n // self.width * self.heads + n % self.width for n in range(lanes)])
        counter = arith.addi(vector.broadcast(places.type, arith.index_cast(i64, first)), places)
        bits = random_bits(counter, memref.load(rows.memory["seed"], [index(0)]))
        return arith.select(at_least(bits, self.dropout), splat_of(type_, 1 / (1 - self.dropout)), zeros(type_))

    def factor(self, rows: Rows, entry: Entry) -> ir.Value:
        """scale times the entry's weight, in all lanes."""
        scale = arith.constant(self.element, self.scale)
        if self.weighted:
            scale = arith.mulf(scale, memref.load(rows.memory["weight"], [entry.number]))
        return vector.broadcast(self.short, scale)

    def dots(self, left: list[ir.Value], right: list[ir.Value], size: int) -> ir.Value:
        """For each head of the group the product of two vectors of `size` elements."""
        return dot(left, right, self.group, size, self.width)

    def spread(self, values: ir.Value, size: int) -> list[ir.Value]:
        """A value for each head at all of its elements."""
        return spread(values, self.group, size, self.lanes)

    def activated(self, raw: ir.Value) -> ir.Value:
        """leaky_relu(raw, slope)"""
        return self.leaky(raw, raw, self.slope)

    def activation_slope(self, raw: ir.Value, gradient: ir.Value) -> ir.Value:
        """The gradient of raw for that of leaky_relu(raw)."""
        return self.leaky(raw, gradient, self.slope)

    @staticmethod
    def leaky(raw: ir.Value, value: ir.Value, slope: float) -> ir.Value:
        """The value, times `slope` where raw is not positive."""
        if slope == 1:
            return value
        type_ = ir.VectorType(raw.type)
        positive = arith.cmpf(arith.CmpFPredicate.OGT, raw, zeros(type_))
        return arith.select(positive, value, arith.mulf(value, splat_of(type_, slope)))
