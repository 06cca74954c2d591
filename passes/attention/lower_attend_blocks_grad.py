"""lower-attend-blocks-grad: lowers the gradients of `kernel.attend_blocks` to loops over tiles of queries, or of keys.

before   %dq = "kernel.attend_blocks_of_queries"(%q, %k, %v, %gradient, %statistics, %delta, ...)
after    scf.parallel (%task) = ...                           // batch x heads x tiles of 32 queries
           for each few tiles of 16 keys that the table lists
             p[key][query] = exp(<k, q> * scale - statistics), 0 where hidden
             s[key][query] = p * (<v, gradient> - delta)
             sums[d][query] += sum_key k[key][d] s[key][query]
           sums * scale into %dq

Gradients of keys and values are computed in the same way, with keys in the lanes. The queries of all heads that share the keys
follow each other. If the numbers that are added to the scores have a gradient, a task has all batches and heads that
share these numbers. Both loops recompute the scores and the dropout (Dao et al., "FlashAttention", 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.attention import ADD, FILLED_LOW, LOW, TILE_KEYS, TILE_QUERIES
from gossamer.passes.attention.block_rows import BlockRows, Entry
from gossamer.passes.attention.query_tile import Rows, WeightedRows
from gossamer.passes.codegen.online_softmax import power
from gossamer.passes.loops.buffers import buffer_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, loop, mask_of, splat_of, zeros

PerRow = Callable[[ir.Value], tuple[list[ir.Value], list[ir.Value]]]
"""Returns vectors of statistics and delta of the queries, for a row of the other side."""

Put = Callable[[ir.Value, ir.Value, list[ir.Value], list[ir.Value], list[ir.Value]], None]


@dataclass(frozen=True)
class LowerAttendBlocksGrad:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for side, lowering in (("queries", _OfQueries), ("keys", _OfKeys), ("scores", _OfScores)):
            for op in walk(module, f"kernel.attend_blocks_of_{side}"):
                with op.location:
                    lowering(op.opview, self.bits).lower(module)


@dataclass(frozen=True)
class Kept:
    """The numbers of the weights in lanes for dropout, and the offset to add for a row of the other side."""

    numbers: list[ir.Value]
    offset: Callable[[ir.Value], ir.Value]


class _Gradient(BlockRows):
    def weights(
        self,
        start: ir.Value,
        count: ir.Value,
        others: tuple[Rows, Rows],
        turned: tuple[ir.Value, ir.Value],
        of_query: PerRow,
        kept: Kept | None,
        put: Put,
    ) -> None:
        """Computes p and s of `count` tiles from `start` on.

        others  the rows of the other side: keys and values, or queries and gradients
        turned  the same of the tile in lanes
        put     takes, for a row of the other side: its slot, its number, p, s, and the gradient of the score, which is s
                without the derivatives of the score function
        """
        with loop(index(0), count, index(1)) as tiles:
            entry = self.entry(arith.addi(start, tiles.induction_variable))
            slot = arith.muli(tiles.induction_variable, index(TILE_KEYS))
            choice = scf.IfOp(entry.partial, has_else=True)
            for block, masked in ((choice.then_block, True), (choice.else_block, False)):
                with ir.InsertionPoint(block):
                    self._tile_weights(entry, masked, slot, others, turned, of_query, kept, put)
                    scf.YieldOp([])

    def _tile_weights(
        self,
        entry: Entry,
        masked: bool,
        slot: ir.Value,
        others: tuple[Rows, Rows],
        turned: tuple[ir.Value, ir.Value],
        of_query: PerRow,
        kept: Kept | None,
        put: Put,
    ) -> None:
        tile = self.tile
        seen = self.seen(entry.words) if masked else None
        with loop(index(0), index(TILE_KEYS), index(tile.at_once)) as rows:
            numbers = [arith.addi(rows.induction_variable, index(n)) for n in range(tile.at_once)]
            each = [arith.addi(entry.key, number) for number in numbers]
            scores = self.products(others[0], each, turned[0])
            gradients = tile.products(others[1], each, turned[1])
            for number, products, gradient in zip(numbers, scores, gradients, strict=True):
                row = arith.addi(entry.key, number)
                score, derivatives = self.scored(products, arith.addi(entry.floats, number))
                statistics, delta = of_query(row)
                low = self._low(score) if ADD in self.steps else None
                if low is not None:  # they count as equal, and are not in the statistics
                    score = [arith.select(each, zeros(tile.vec), x) for each, x in zip(low[0], score, strict=True)]
                p = [power(*each) for each in zip(score, statistics, strict=True)]
                left = p
                if kept is not None:
                    factors = self.kept(kept.numbers, kept.offset(row))
                    left, gradient = ([arith.mulf(a, f) for a, f in zip(x, factors, strict=True)] for x in (p, gradient))
                of_score = [arith.mulf(a, arith.subf(g, d)) for a, g, d in zip(p, gradient, delta, strict=True)]
                if low is not None:
                    of_score = [arith.select(each, zeros(tile.vec), x) for each, x in zip(low[1], of_score, strict=True)]
                s = of_score
                if derivatives is not None:
                    s = [arith.mulf(a, b) for a, b in zip(s, derivatives, strict=True)]
                if seen is not None:  # the last step, because hidden numbers may be NaN
                    left, s, of_score = (self.hidden(each, seen, number, 0.0) for each in (left, s, of_score))
                put(arith.addi(slot, number), row, left, s, of_score)

    def _low(self, score: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        """Returns the scores that are below LOW, and those of them that the mask has put in place of others."""
        less = arith.CmpFPredicate.OLT
        low = [arith.cmpf(less, x, splat_of(self.tile.vec, LOW)) for x in score]
        added = [arith.cmpf(less, x, splat_of(self.tile.vec, FILLED_LOW * 1.25)) for x in score]
        no = arith.constant(added[0].type, ir.DenseElementsAttr.get_splat(added[0].type, ir.BoolAttr.get(False)))
        return low, [arith.select(a, no, b) for a, b in zip(added, low, strict=True)]

    def into(self, *memories: ir.Value) -> Put:
        """Returns a function that stores s, or p and s, in memories with a row for each slot."""

        def put(slot: ir.Value, _row: ir.Value, p: list[ir.Value], s: list[ir.Value], _of_score: list[ir.Value]) -> None:
            for values, memory in zip((p, s)[-len(memories) :], memories, strict=True):
                self.tile.store(values, memory, slot)

        return put

    def add(self, sums: ir.Value, start: ir.Value, count: ir.Value, others: Rows, weights: ir.Value) -> None:
        """Adds the weighted rows of the other side in `count` tiles to the sums."""

        def place_of(group: ir.Value, number: ir.Value) -> tuple[ir.Value, ir.Value]:
            return others.memory, others.at(arith.addi(self.first_key(arith.addi(start, group)), number))

        def partial(group: ir.Value) -> ir.Value:
            return self.partial(arith.addi(start, group))

        self.tile.add_weighted(sums, None, WeightedRows(count, TILE_KEYS, weights, place_of, partial))

    def scales(self) -> list[ir.Value]:
        return [splat_of(self.tile.vec, self.scale)] * self.tile.vectors

    def per_query(self) -> tuple[ir.Value, ir.Value]:
        """Returns the memories of statistics and delta."""
        return buffer_of(self.op.statistics), buffer_of(self.op.delta)


class _OfQueries(_Gradient):
    def lower(self, module: ir.Module) -> None:
        """Replaces the op by loops."""
        padded = self.tile.padded
        self.replace(module, "queries", [padded, padded, padded, self.chunk * TILE_KEYS], self._row)

    def _row(self, batch: ir.Value, head: ir.Value, row: ir.Value, scratch: list[ir.Value]) -> None:
        tile, (turned, gradients, sums, scores) = self.tile, scratch
        first, shared = arith.muli(row, index(TILE_QUERIES)), arith.divui(head, self.sizes["group"])
        k, v = (self.rows(name, batch, shared, "keys", multiplied=True) for name in ("k", "v"))
        added = self.rows("k", batch, shared, "keys")
        q, gradient = (self.rows(name, batch, head, "queries", multiplied=True) for name in ("q", "gradient"))
        tile.turn(q, first, turned, self.scales()[0])
        tile.turn(gradient, first, gradients, splat_of(tile.vec, 1.0))
        tile.clear(sums)
        statistics, delta = (self._lanes(memory, self.pair(batch, head), first) for memory in self.per_query())
        kept = None
        if self.dropout:
            kept = Kept(self.weight_numbers(self.pair(batch, head), first, "queries"), lambda key: key)
        with loop(*self.listed(batch, head, row), index(self.chunk)) as chunks:
            start = chunks.induction_variable
            count = arith.minui(arith.subi(self.listed(batch, head, row)[1], start), index(self.chunk))
            of_query = lambda _: (statistics, delta)
            self.weights(start, count, (k, v), (turned, gradients), of_query, kept, self.into(scores))
            self.add(sums, start, count, added, scores)
        tile.scale(sums, self.scales())
        tile.turn_back(sums, self.rows("of_q", batch, head, "queries"), first)

    def _lanes(self, memory: ir.Value, pair: ir.Value, first: ir.Value) -> list[ir.Value]:
        """Loads the values of the queries in lanes."""
        tile, queries = self.tile, self.sizes["queries"]
        base, left = arith.addi(arith.muli(pair, queries), first), arith.subi(queries, first)
        found = []
        for v in range(tile.vectors):
            behind = index(v * tile.lanes)
            mask = mask_of(tile.lanes, arith.subi(arith.maxui(left, behind), behind))
            found.append(vector.maskedload(tile.vec, memory, [arith.addi(base, behind)], mask, zeros(tile.vec)))
        return found


class _OfKeys(_Gradient):
    def pairs(self) -> tuple[ir.Value, ir.Value]:
        return self.sizes["batch"], arith.divui(self.sizes["heads"], self.sizes["group"])

    def lower(self, module: ir.Module) -> None:
        """Replaces the op by loops."""
        self.replace(module, "keys", [*[self.tile.padded] * 4, *[self.chunk * TILE_KEYS] * 2], self._row)

    def _row(self, batch: ir.Value, head: ir.Value, row: ir.Value, scratch: list[ir.Value]) -> None:
        tile, (keys, values, of_k, of_v, p, s) = self.tile, scratch
        first = arith.muli(row, index(TILE_QUERIES))
        self.turn_keys(batch, head, first, keys, values)
        tile.clear(of_k)
        tile.clear(of_v)
        with loop(index(0), self.sizes["group"], index(1)) as group:
            own = arith.addi(arith.muli(head, self.sizes["group"]), group.induction_variable)

            def add(start: ir.Value, count: ir.Value, q: Rows, gradient: Rows) -> None:
                self.add(of_v, start, count, gradient, p)
                self.add(of_k, start, count, q, s)

            self.of_head(batch, own, row, (keys, values), self.put(batch, own, first, p, s), add)
        tile.scale(of_k, self.scales())
        tile.turn_back(of_k, self.rows("of_k", batch, head, "keys"), first)
        tile.turn_back(of_v, self.rows("of_v", batch, head, "keys"), first)

    def put(self, _batch: ir.Value, _head: ir.Value, _first: ir.Value, p: ir.Value, s: ir.Value) -> Put:
        """Returns the function that stores the weights of a head for the keys from `first` on."""
        return self.into(p, s)

    def turn_keys(self, batch: ir.Value, head: ir.Value, first: ir.Value, keys: ir.Value, values: ir.Value) -> None:
        """Transposes a tile of keys, scaled, and of values."""
        tile = self.tile
        tile.turn(self.rows("k", batch, head, "keys", multiplied=True), first, keys, self.scales()[0])
        tile.turn(self.rows("v", batch, head, "keys", multiplied=True), first, values, splat_of(tile.vec, 1.0))

    def of_head(
        self,
        batch: ir.Value,
        head: ir.Value,
        row: ir.Value,
        turned: tuple[ir.Value, ir.Value],
        put: Put,
        then: Callable[[ir.Value, ir.Value, Rows, Rows], None],
    ) -> None:
        """Computes the weights of a head's queries for a tile of keys. Calls `then` after each few tiles."""
        names = "q", "gradient"
        added = [self.rows(name, batch, head, "queries") for name in names]
        q, gradient = (self.rows(name, batch, head, "queries", multiplied=True) for name in names)
        pair = self.pair(batch, head)
        base, kept = arith.muli(pair, self.sizes["queries"]), None
        if self.dropout:
            numbers = self.weight_numbers(pair, arith.muli(row, index(TILE_QUERIES)), "keys")
            kept = Kept(numbers, lambda query: arith.muli(query, self.sizes["keys"]))
        begin, end = self.listed(batch, head, row)
        with loop(begin, end, index(self.chunk)) as chunks:
            start = chunks.induction_variable
            count = arith.minui(arith.subi(end, start), index(self.chunk))
            self.weights(start, count, (q, gradient), turned, self._of_query(base), kept, put)
            then(start, count, *added)

    def _of_query(self, base: ir.Value) -> PerRow:
        last = arith.subi(self.sizes["queries"], index(1))

        def read(query: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
            at = arith.addi(base, arith.minui(query, last))
            statistics, delta = (
                [vector.broadcast(self.tile.vec, memref.load(memory, [at]))] * self.tile.vectors for memory in self.per_query()
            )
            return statistics, delta

        return read


class _OfScores(_OfKeys):
    """The gradients with that of the scores. A task has all batches and heads whose gradients of scores are summed."""

    def pairs(self) -> tuple[ir.Value, ir.Value]:
        batch, head = (self._shared(name) for name in ("batch", "head"))
        batches, heads = super().pairs()
        return arith.select(batch, index(1), batches), arith.select(head, index(1), heads)

    def _row(self, batch: ir.Value, head: ir.Value, row: ir.Value, scratch: list[ir.Value]) -> None:
        one, counts = index(1), super().pairs()
        ends = (
            arith.select(self._shared(name), count, arith.addi(at, one))
            for name, count, at in zip(("batch", "head"), counts, (batch, head), strict=True)
        )
        last_batch, last_head = ends
        with loop(batch, last_batch, one) as batches, loop(head, last_head, one) as heads:
            super()._row(batches.induction_variable, heads.induction_variable, row, scratch)

    def _shared(self, name: str) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.eq, self.sizes[f"of_scores_{name}"], index(0))

    def put(self, batch: ir.Value, head: ir.Value, first: ir.Value, p: ir.Value, s: ir.Value) -> Put:
        tile, left, out = self.tile, arith.subi(self.sizes["keys"], first), self.rows("of_scores", batch, head, "queries")
        into = self.into(p, s)

        def put(slot: ir.Value, row: ir.Value, p: list[ir.Value], s: list[ir.Value], of_score: list[ir.Value]) -> None:
            into(slot, row, p, s, of_score)
            place = arith.addi(out.at(row), first)
            for v, value in enumerate(of_score):
                behind = index(v * tile.lanes)
                mask = mask_of(tile.lanes, arith.subi(arith.maxui(left, behind), behind))
                at = arith.addi(place, behind)
                before = vector.maskedload(tile.vec, out.memory, [at], mask, zeros(tile.vec))
                vector.maskedstore(out.memory, [at], mask, arith.addf(before, value))

        return put
