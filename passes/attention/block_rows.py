"""The frame of the lowerings of kernel.attend_blocks and its gradients: tasks, memory, and reading the table of the mask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, vector

from gossamer.dialects.attention import ADD, SIZES, STRIDED, TANH, TILE_KEYS, TILE_QUERIES, steps_of
from gossamer.passes.attention.query_tile import QueryTile, Rows
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.random_bits import at_least, constants, random_bits
from gossamer.passes.loops.vectors import index, load_index, parallel, reserve_workspace, splat_of, vector_of, zeros

_CHUNK = 16 << 10  # most bytes of rows between two updates of the sums: they stay in the first-level cache
_MOST = 8  # most tiles between two updates


@dataclass(frozen=True)
class Entry:
    """A tile of the table: its first key, whether it is partly hidden, the place of its words, and its first row of floats."""

    key: ir.Value
    partial: ir.Value
    words: ir.Value
    floats: ir.Value


Task = Callable[[ir.Value, ir.Value, ir.Value, list[ir.Value]], None]
"""Emits the work for a batch, a head and a row of tiles, with scratch memory."""


class BlockRows:
    """One of these ops. Its tasks are the rows of its table."""

    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.size = ir.IntegerAttr(op.head_size).value
        scale, *self.steps = steps_of(op.score)
        self.scale = float(scale)
        self.tile = QueryTile(self.size, bits)
        self.chunk = max(1, min(_MOST, _CHUNK // (4 * self.size * TILE_KEYS)))
        self.positions, self.tiles, self.words = (buffer_of(v) for v in (op.positions, op.tiles, op.words))
        self.floats = buffer_of(op.floats)
        self.dropout = ir.FloatAttr(op.dropout).value
        self.seed = None if op.seed is None else buffer_of(op.seed)
        strided = STRIDED[op.operation.name]
        names = [*SIZES, *(f"{name}_{of}" for name in strided for of in ("batch", "head", "row"))]
        self.sizes = dict(zip(names, op.sizes, strict=True))
        given = [name for name in strided if isinstance(getattr(op, name), ir.Value) and name in ("q", "k", "v", "gradient")]
        self.memory = {name: buffer_of(getattr(op, name)) for name in given}
        self.memory |= zip(strided[len(given) :], self.storage.outputs, strict=False)
        self.pairs_of = dict(zip(("q", "k", "v", "gradient"), (buffer_of(each) for each in op.pairs), strict=False))

    def replace(self, module: ir.Module, lanes: str, scratch: list[int], task: Task) -> None:
        """Replaces the op by one loop over all tiles of `lanes` ("queries" or "keys").

        `scratch` has the number of rows of each memory of a task.
        """
        space = 4 * TILE_QUERIES * sum(scratch)
        reserve_workspace(module, space)
        with ir.InsertionPoint(self.op):
            batch, count = self.pairs()
            rows = arith.ceildivui(self.sizes[lanes], index(TILE_QUERIES))
            with parallel(arith.muli(arith.muli(batch, count), rows)) as number:
                memory = self.scratch(arith.muli(thread_number(), index(space)), scratch)
                pair, row = arith.divui(number, rows), arith.remui(number, rows)
                task(arith.divui(pair, count), arith.remui(pair, count), row, memory)
        self.storage.erase()

    def pairs(self) -> tuple[ir.Value, ir.Value]:
        """Returns the numbers of batches and heads of the tasks."""
        return self.sizes["batch"], self.sizes["heads"]

    def pair(self, batch: ir.Value, head: ir.Value) -> ir.Value:
        """Returns the number of a head, counted over all batches."""
        return arith.addi(arith.muli(batch, self.sizes["heads"]), head)

    def listed(self, batch: ir.Value, head: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the begin and end of the tiles of a row of the table."""
        of_row, of_batch, of_head = (
            arith.muli(n, self.sizes[f"table_{name}"]) for n, name in ((row, "row"), (batch, "batch"), (head, "head"))
        )
        at = arith.addi(of_row, arith.addi(of_batch, of_head))
        return load_index(self.positions, at), load_index(self.positions, arith.addi(at, index(1)))

    def scratch(self, offset: ir.Value, rows: list[int]) -> list[ir.Value]:
        found = []
        for count in rows:
            found.append(memref.view(self.tile.memory(count), self.storage.workspace, offset, []))
            offset = arith.addi(offset, index(4 * TILE_QUERIES * count))
        return found

    def rows(self, name: str, batch: ir.Value, head: ir.Value, count: str, multiplied: bool = False) -> Rows:
        """Returns the rows of a head. If they are `multiplied` with a tile, these are the pairs of bf16 if the op has any."""
        base = arith.addi(arith.muli(batch, self.sizes[f"{name}_batch"]), arith.muli(head, self.sizes[f"{name}_head"]))
        memory = self.pairs_of.get(name, self.memory[name]) if multiplied else self.memory[name]
        return Rows(memory, base, self.sizes[f"{name}_row"], self.sizes[count])

    def products(self, rows: Rows, numbers: list[ir.Value], turned: ir.Value) -> list[list[ir.Value]]:
        """Returns the scaled products of rows of these numbers with a tile. A tile of f32 is scaled before, of pairs not."""
        found = self.tile.products(rows, numbers, turned)
        if not rows.in_pairs:
            return found
        scale = splat_of(self.tile.vec, self.scale)
        return [[arith.mulf(value, scale) for value in values] for values in found]

    def first_key(self, number: ir.Value) -> ir.Value:
        """Returns the first key of a tile of the table."""
        return arith.muli(arith.shrui(self._field(number, 0), index(1)), index(TILE_KEYS))

    def partial(self, number: ir.Value) -> ir.Value:
        """Whether a tile of the table is partly hidden."""
        return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(self._field(number, 0), index(1)), index(0))

    def entry(self, number: ir.Value) -> Entry:
        """Reads a tile of the table."""
        floats = arith.muli(self._field(number, 2), index(TILE_KEYS)) if ADD in self.steps else index(0)
        return Entry(
            self.first_key(number), self.partial(number), arith.muli(self._field(number, 1), index(TILE_QUERIES)), floats
        )

    def _field(self, number: ir.Value, field: int) -> ir.Value:
        return load_index(self.tiles, arith.addi(arith.muli(number, index(3)), index(field)))

    def scored(self, products: list[ir.Value], row: ir.Value) -> tuple[list[ir.Value], list[ir.Value] | None]:
        """Returns the scores of a key, and their derivatives by the products, None for 1. `row` is the key's row of floats."""
        values, derivatives = products, None
        for step in self.steps:
            if step == ADD:
                base = arith.muli(row, index(TILE_QUERIES))
                places = [arith.addi(base, index(v * self.tile.lanes)) for v in range(self.tile.vectors)]
                added = [vector.load(self.tile.vec, self.floats, [place]) for place in places]
                values = [arith.addf(a, b) for a, b in zip(values, added, strict=True)]
                continue
            if step == TANH:
                values = [math.tanh(value) for value in values]
                one = splat_of(self.tile.vec, 1.0)
                slopes = [arith.subf(one, arith.mulf(value, value)) for value in values]
            else:
                slopes = [splat_of(self.tile.vec, float(step))] * self.tile.vectors
                values = [arith.mulf(a, b) for a, b in zip(values, slopes, strict=True)]
            derivatives = (
                slopes if derivatives is None else [arith.mulf(a, b) for a, b in zip(derivatives, slopes, strict=True)]
            )
        return values, derivatives

    def seen(self, words: ir.Value) -> list[ir.Value]:
        """Loads the words of a tile, one in each lane."""
        lanes, i32 = self.tile.lanes, ir.IntegerType.get_signless(32)
        narrow, wide = vector_of(lanes, ir.IntegerType.get_signless(16)), vector_of(lanes, i32)
        places = [arith.addi(words, index(v * lanes)) for v in range(self.tile.vectors)]
        return [arith.extui(wide, vector.load(narrow, self.words, [place])) for place in places]

    def hidden(self, scores: list[ir.Value], seen: list[ir.Value], key: ir.Value, otherwise: float) -> list[ir.Value]:
        """Returns the scores of a key, with `otherwise` in the lanes of queries that do not see it."""
        i32 = ir.IntegerType.get_signless(32)
        bit = arith.shli(arith.constant(i32, 1), arith.index_cast(i32, key))
        wide = ir.VectorType(seen[0].type)
        bits = vector.broadcast(wide, bit)
        none = arith.constant(wide, ir.DenseElementsAttr.get_splat(wide, ir.IntegerAttr.get(i32, 0)))
        never = splat_of(self.tile.vec, otherwise)
        visible = [arith.cmpi(arith.CmpIPredicate.ne, arith.andi(word, bits), none) for word in seen]
        return [arith.select(sees, score, never) for sees, score in zip(visible, scores, strict=True)]

    def weight_numbers(self, pair: ir.Value, first: ir.Value, lanes: str) -> list[ir.Value]:
        """Returns the numbers of weights, for dropout, of the rows in lanes from `first` on, for a pair of batch and head.

        They are those of the first row of the other side. `kept` adds an offset for other rows.
        """
        i64, keys = ir.IntegerType.get_signless(64), self.sizes["keys"]
        of_lane = keys if lanes == "queries" else index(1)
        base = arith.muli(first, of_lane)
        base = arith.addi(base, arith.muli(pair, arith.muli(self.sizes["queries"], keys)))
        wide, found = vector_of(self.tile.lanes, i64), []
        step = vector.broadcast(wide, arith.index_cast(i64, of_lane))
        for v in range(self.tile.vectors):
            places = constants(wide, range(v * self.tile.lanes, (v + 1) * self.tile.lanes))
            found.append(arith.addi(vector.broadcast(wide, arith.index_cast(i64, base)), arith.muli(places, step)))
        return found

    def kept(self, numbers: list[ir.Value], offset: ir.Value) -> list[ir.Value]:
        """Returns the factors of dropout for weights of these numbers, plus the offset of a row of the other side."""
        i64, vec = ir.IntegerType.get_signless(64), self.tile.vec
        key, factors = memref.load(self.seed, [index(0)]), []
        for number in numbers:
            counter = arith.addi(number, vector.broadcast(number.type, arith.index_cast(i64, offset)))
            keeps = at_least(random_bits(counter, key), self.dropout)
            factors.append(arith.select(keeps, splat_of(vec, 1 / (1 - self.dropout)), zeros(vec)))
        return factors
