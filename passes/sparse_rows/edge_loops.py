"""The frame of the lowerings of attention over edges. It splits the rows of a CSR pattern, and computes the score of an entry.

scf.parallel (%part) = ...                     rows that begin in the part's share of the entries
  for each group of heads: func.call @region_heads(operands, outputs, workspace, offset, first head, low, high)

Heads are independent of each other. A group has as many as fit, with their features, into half the registers.
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

_AHEAD = 16  # how many entries ahead to prefetch: lines arrive in time, and are not evicted before they are used
_LINE = 64  # bytes of a cache line
VECTORS = 16  # vectors of sums in registers; the other registers are for the operands
COMMON = ("direction", "seed")
"""Operands that are the same for all rows and columns."""
ROW_SIDE = {"target": ("target", "queries", "statistics", "gradient", "delta"), "source": ("source", "keys", "values")}
"""For each side: the operands that are read by row of the pattern. Those of the other side are read by column."""


@dataclass(frozen=True)
class Rows:
    """The arguments of a function: memrefs by name, the group's first head, and rows [low, high)."""

    memory: dict[str, ir.Value]
    outputs: tuple[ir.Value, ...]
    workspace: ir.Value
    offset: ir.Value
    first_head: ir.Value
    low: ir.Value
    high: ir.Value


@dataclass(frozen=True)
class Entry:
    """An entry of a row.

    number  its place in the pattern's values
    own     the operands of its row, which were read before, by name
    """

    number: ir.Value
    row: ir.Value
    column: ir.Value
    own: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The score of an entry, a value for each head, with the terms that its gradient needs.

    raw      the score before leaky_relu
    product  the product of query and key, or of direction and leaky_relu(query + key)
    joined   with a direction: query + key, in vectors of the heads' elements
    """

    raw: ir.Value
    product: ir.Value | None
    joined: tuple[ir.Value, ...] = ()


class EdgeRows:
    """Heads, sizes and operands of a kernel.attend_edges or kernel.attend_edges_grad, on the given side of the pattern.

    heads     number of heads
    features  elements of a head in values
    size      elements of a head in queries and keys; 0 without them
    group     heads that are computed at once
    width     lanes of a vector with one value for each head of a group
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
        # With a direction, leaky_relu is applied to query + key, else to the score.
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
        """Replaces the op by calls of a function whose body `emit` builds. A thread has `scratch` elements of workspace."""
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
        """Returns the bounds of the entries [begin, end) of a row."""
        begin, end = (load_index(rows.memory["positions"], at) for at in (row, arith.addi(row, index(1))))
        return begin, end

    def entry(self, rows: Rows, place: ir.Value, row: ir.Value, own: dict[str, Any]) -> Entry:
        """Returns the entry at a place of the pattern."""
        number = load_index(rows.memory["entry"], place) if "entry" in self.names else place
        return Entry(number, row, load_index(rows.memory["coordinates"], place), own)

    def read_row(self, rows: Rows, row: ir.Value) -> dict[str, Any]:
        """Reads all operands of a row that do not depend on its entries. Returns them by name."""
        own = {name: self._read(rows, name, row) for name in ROW_SIDE[self.side] if name in self.names}
        if self.directed:
            own["direction"] = self.load_columns(rows.memory["direction"], index(0), rows.first_head, self.size)
        return own

    def read(self, rows: Rows, name: str, entry: Entry) -> Any:
        """Returns the part of an operand that an entry needs: one value for each head, or vectors of the heads' elements."""
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
        """Loads a value for each head of the group. Further lanes are zeros."""
        if self.width == self.group:
            return vector.load(self.short, buffer, [row, at])
        return vector.maskedload(self.short, buffer, [row, at], mask_of(self.width, index(self.group)), zeros(self.short))

    def store_heads(self, value: ir.Value, buffer: ir.Value, row: ir.Value, at: ir.Value) -> None:
        """Stores a value for each head of the group."""
        if self.width == self.group:
            vector.store(value, buffer, [row, at])
        else:
            vector.maskedstore(buffer, [row, at], mask_of(self.width, index(self.group)), value)

    def places(self, first_head: ir.Value, size: int) -> list[tuple[ir.Value, ir.Value | None]]:
        """Returns for each vector of the group's elements, `size` for each head, its first column and its mask.

        The mask is None for whole vectors.
        """
        base, total = arith.muli(first_head, index(size)), self.group * size
        whole = [(arith.addi(base, index(at)), None) for at in range(0, total - total % self.lanes, self.lanes)]
        if total % self.lanes == 0:
            return list(whole)
        last = arith.addi(base, index(total - total % self.lanes))
        return [*whole, (last, mask_of(self.lanes, index(total % self.lanes)))]

    def load_columns(self, buffer: ir.Value, row: ir.Value, first_head: ir.Value, size: int) -> list[ir.Value]:
        """Loads the group's elements of a row of a matrix."""
        return [self.load_vector(buffer, row, *place) for place in self.places(first_head, size)]

    def load_vector(self, buffer: ir.Value, row: ir.Value, column: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Loads one vector of a row."""
        if mask is None:
            return vector.load(self.vec, buffer, [row, column])
        return vector.maskedload(self.vec, buffer, [row, column], mask, zeros(self.vec))

    def store_vector(self, value: ir.Value, buffer: ir.Value, row: ir.Value, column: ir.Value, mask: ir.Value | None) -> None:
        """Stores one vector of a row."""
        if mask is None:
            vector.store(value, buffer, [row, column])
        else:
            vector.maskedstore(buffer, [row, column], mask, value)

    def prefetch(self, rows: Rows, place: ir.Value) -> None:
        """Prefetches the operands that are read by column for the entry `_AHEAD` places further, in whichever row it is."""
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
        """Computes the score of an entry."""
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
        """Returns the factors of dropout for `lanes` weights: those of the group's heads at entry `number`, then at the next
        entries."""
        type_, i64 = vector_of(lanes, self.element), ir.IntegerType.get_signless(64)
        first = arith.addi(arith.muli(number, index(self.heads)), rows.first_head)
        places = constants(vector_of(lanes, i64), [n // self.width * self.heads + n % self.width for n in range(lanes)])
        counter = arith.addi(vector.broadcast(places.type, arith.index_cast(i64, first)), places)
        bits = random_bits(counter, memref.load(rows.memory["seed"], [index(0)]))
        return arith.select(at_least(bits, self.dropout), splat_of(type_, 1 / (1 - self.dropout)), zeros(type_))

    def factor(self, rows: Rows, entry: Entry) -> ir.Value:
        """Returns scale times the entry's weight, in all lanes."""
        scale = arith.constant(self.element, self.scale)
        if self.weighted:
            scale = arith.mulf(scale, memref.load(rows.memory["weight"], [entry.number]))
        return vector.broadcast(self.short, scale)

    def dots(self, left: list[ir.Value], right: list[ir.Value], size: int) -> ir.Value:
        """Returns for each head of the group the product of two vectors of `size` elements."""
        return dot(left, right, self.group, size, self.width)

    def spread(self, values: ir.Value, size: int) -> list[ir.Value]:
        """Repeats the value of each head for all of its elements."""
        return spread(values, self.group, size, self.lanes)

    def activated(self, raw: ir.Value) -> ir.Value:
        """Returns leaky_relu(raw, slope)."""
        return self.leaky(raw, raw, self.slope)

    def activation_slope(self, raw: ir.Value, gradient: ir.Value) -> ir.Value:
        """Returns the gradient of raw from that of leaky_relu(raw)."""
        return self.leaky(raw, gradient, self.slope)

    @staticmethod
    def leaky(raw: ir.Value, value: ir.Value, slope: float) -> ir.Value:
        """Returns the value, times `slope` in lanes whose raw is not positive. Slope 0 is relu, which makes 0 of infinity."""
        if slope == 1:
            return value
        type_ = ir.VectorType(raw.type)
        if slope == 0:
            return arith.select(arith.cmpf(arith.CmpFPredicate.OLE, raw, zeros(type_)), zeros(type_), value)
        positive = arith.cmpf(arith.CmpFPredicate.OGT, raw, zeros(type_))
        return arith.select(positive, value, arith.mulf(value, splat_of(type_, slope)))
