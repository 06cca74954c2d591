"""The body of a chain's attention stage. It computes a tile of queries with all keys of its sequence.

    for each head:   scores[j][t] = scale * sum_d k[d][j] q[d][t] + mask       lanes are queries, keys and values are scalars
                     scores = exp(scores - max), total
                     y[d][t] = sum_j v[d][j] scores[j][t] / total

So softmax needs no work across lanes, and the result is feature-major, as the next product needs it. Queries whose keys are
all masked get 0. All scores of a head are kept, [keys][tokens]: one pass reads the keys, one reads the values.
"""

import collections.abc as abc
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.dialects.kernel import integers
from gossamer.passes.chains.frame import Frame
from gossamer.passes.chains.stages import emit_transposed
from gossamer.passes.codegen.online_softmax import inverse, larger, lowest, power
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.vectors import index, loop, splat_of, vector_of, widened, zeros

_KEYS = 4  # keys, or features of the values, that share the loads of a vector of queries


@dataclass(frozen=True)
class Sequence:
    """The sequence of a tile.

    length  its tokens
    within  the tile's first token, counted in the sequence
    number  the number of the sequence
    memory  the workspace as elements
    keys    the place of the keys of its first tile in `memory`
    values  the place of the values of its first tile in `memory`
    tile    elements from the memory of one tile to that of the next
    tokens  tokens of a tile
    last    empty, or the number of whole tiles, which follow each other, and the number of the last tile (tiling.py)
    """

    length: ir.Value
    within: ir.Value
    number: ir.Value
    memory: ir.Value
    keys: ir.Value
    values: ir.Value
    tile: ir.Value
    tokens: int
    last: tuple[ir.Value, ...] = ()

    def place(self, number: ir.Value) -> ir.Value:
        """Returns the elements from the first tile of the sequence to tile `number`."""
        if self.last:
            whole, last = self.last
            number = arith.select(arith.cmpi(arith.CmpIPredicate.ult, number, whole), number, last)
        return arith.muli(number, self.tile)


class Attention:
    """Attention in the chain's own type.

    queries  [features][tokens]
    scores   scratch memory of [keys][tokens]
    weights  the same memory: the exponentials of the scores
    mask     scratch memory of [keys][tokens] for the transposed mask, if the op has a mask for each query
    """

    together: ClassVar[int] = 1
    """Features, or keys, in an element."""

    def __init__(
        self,
        op: Any,
        frame: Frame,
        queries: ir.Value,
        sequence: Sequence,
        scores: ir.Value,
        weights: ir.Value,
        mask: ir.Value | None,
    ) -> None:
        self.op, self.frame, self.queries, self.sequence = op, frame, queries, sequence
        self.scores, self.weights, self.mask = scores, weights, mask
        self.size = ir.IntegerAttr(op.head_size).value
        self.group = ir.IntegerAttr(op.heads).value // ir.IntegerAttr(op.kv_heads).value
        self.offsets = integers(op.offsets)
        self.causal, self.key_mask = (ir.BoolAttr(a).value for a in (op.causal, op.key_mask))
        self.vectors = range(frame.vectors)
        self.start = zeros(frame.vec)
        self.keys_at_once = min(_KEYS, registers(frame.lanes * 32) // 8, frame.lanes)  # 32 registers hold 4 x 4 sums

    def emit(self, first: ir.Value, valid: ir.Value) -> None:
        """Emits heads [low, high) for the `valid` tokens of the tile. Their masks begin at row `first`."""
        frame, sequence = self.frame, self.sequence
        self.keys = sequence.length
        if self.causal:
            self.keys = arith.minui(sequence.length, arith.addi(sequence.within, valid))
        if self.mask is not None:
            (source,) = frame.outside[self.op.mask[0]]
            emit_transposed(source, self.mask, sequence.length, frame, first, valid)
        with loop(frame.low, frame.high, index(1)) as heads:
            h = heads.induction_variable
            at = arith.muli(arith.divui(h, index(self.group)), index(self.size))
            query = arith.addi(index(self.offsets[0]), arith.muli(h, index(self.size)))
            highest = self._score(self._in_elements(query), self._in_elements(arith.addi(index(self.offsets[1]), at)))
            totals = self._exponentiate(highest)
            self._sum(arith.muli(h, index(self.size)), arith.addi(index(self.offsets[2]), at), totals)

    def _tiles(self, carried: list[ir.Value]) -> Any:
        count = arith.ceildivui(self.keys, index(self.sequence.tokens))
        return loop(index(0), count, index(1), carried)

    def _tile(self, number: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Returns the first key of a tile of keys, the number of keys to take, and the elements from one row to the next."""
        lanes, origin = index(self.frame.lanes), arith.muli(number, index(self.sequence.tokens))
        stored = arith.minui(arith.subi(self.sequence.length, origin), index(self.sequence.tokens))
        taken = arith.minui(arith.subi(self.keys, origin), index(self.sequence.tokens))
        return origin, taken, arith.muli(arith.ceildivui(stored, lanes), lanes)

    def _score(self, query: ir.Value, row: ir.Value) -> list[ir.Value]:
        """Computes the scores of a head. Returns the highest of each query."""
        frame, keys = self.frame, self.keys_at_once
        with self._tiles(lowest(frame.vec, frame.vectors)) as tiles:
            origin, taken, stride = self._tile(tiles.induction_variable)
            base = arith.addi(self.sequence.keys, self.sequence.place(tiles.induction_variable))
            with loop(index(0), taken, index(keys), list(tiles.inner_iter_args)) as js:
                j = js.induction_variable
                deep = index(self.size // self.together)
                with loop(index(0), deep, index(1), [self.start] * (keys * frame.vectors)) as ds:
                    d = ds.induction_variable
                    q = self._vectors(self.queries, arith.addi(query, d))
                    at = arith.addi(base, arith.addi(arith.muli(arith.addi(row, d), stride), j))
                    sums = list(ds.inner_iter_args)
                    for a in range(keys):
                        k = self._scalar(arith.addi(at, index(a)))
                        for v in self.vectors:
                            sums[a * frame.vectors + v] = self._plus_product(sums[a * frame.vectors + v], k, q[v])
                    scf.YieldOp(sums)
                highest = list(js.inner_iter_args)
                for a in range(keys):
                    key = arith.addi(arith.addi(origin, j), index(a))
                    highest = self._keep(ds.results[a * frame.vectors : (a + 1) * frame.vectors], key, highest)
                scf.YieldOp(highest)
            scf.YieldOp(list(js.results))
        return list(tiles.results)

    def _keep(self, products: abc.Sequence[ir.Value], key: ir.Value, highest: list[ir.Value]) -> list[ir.Value]:
        """Stores the scores of a key. Returns the highest of each query so far."""
        found = []
        for v, (product, before) in enumerate(zip(products, highest, strict=True)):
            score = self._masked(product, key, v)
            vector.store(score, self.scores, [key, self.frame.at(v)])
            found.append(larger(score, before))
        return found

    def _masked(self, total: ir.Value, key: ir.Value, v: int) -> ir.Value:
        """Returns the score of a key: scaled, bounded, with the mask. Minus infinity if there is no such key or it is later."""
        frame, vec = self.frame, self.frame.vec
        scale, cap = (ir.FloatAttr(a).value for a in (self.op.scale, self.op.cap))
        score = arith.mulf(total, splat_of(vec, scale / (cap or 1.0)))
        score = arith.mulf(math.tanh(score), splat_of(vec, cap)) if cap else score
        exists = arith.cmpi(arith.CmpIPredicate.ult, key, self.keys)
        bound = arith.select(exists, _number(vec, "inf"), _number(vec, "-inf"))
        safe = arith.minui(key, arith.subi(self.keys, index(1)))
        if self.mask is not None:
            score = arith.addf(score, vector.load(vec, self.mask, [safe, frame.at(v)]))
        elif self.key_mask:
            (source,) = frame.outside[self.op.mask[0]]
            number = widened(memref.load(source, [self.sequence.number, safe]), vec.element_type)
            score = arith.addf(score, vector.broadcast(vec, number))
        never = splat_of(vec, float("-inf"))
        if self.causal:
            i64 = ir.IntegerType.get_signless(64)
            wide = vector_of(frame.lanes, i64)
            numbers = [ir.IntegerAttr.get(i64, v * frame.lanes + n) for n in range(frame.lanes)]
            lanes = arith.constant(wide, ir.DenseElementsAttr.get(numbers, wide))
            ahead = arith.index_cast(i64, arith.subi(key, self.sequence.within))
            visible = arith.cmpi(arith.CmpIPredicate.sle, vector.broadcast(wide, ahead), lanes)
            score = arith.select(visible, score, never)
        bound = vector.broadcast(vec, bound)  # NaN becomes infinity here, whose weight is NaN again
        return arith.select(arith.cmpf(arith.CmpFPredicate.OLT, score, bound), score, bound)

    def _exponentiate(self, highest: list[ir.Value]) -> list[ir.Value]:
        """Computes weights = exp(scores - highest). Returns the totals."""
        frame = self.frame
        with loop(index(0), self.keys, index(1), [self.start] * frame.vectors) as js:
            weights = self._powers(js.induction_variable, highest)
            for v, weight in enumerate(weights):
                vector.store(weight, self.weights, [js.induction_variable, frame.at(v)])
            scf.YieldOp([arith.addf(total, weight) for total, weight in zip(js.inner_iter_args, weights, strict=True)])
        return list(js.results)

    def _powers(self, key: ir.Value, highest: list[ir.Value]) -> list[ir.Value]:
        """Returns exp(scores - highest) of a key."""
        frame = self.frame
        scores = [vector.load(frame.vec, self.scores, [key, frame.at(v)]) for v in self.vectors]
        return [self._power(*each) for each in zip(scores, highest, strict=True)]

    def _power(self, score: ir.Value, highest: ir.Value) -> ir.Value:
        return power(score, highest)

    def _sum(self, result: ir.Value, row: ir.Value, totals: list[ir.Value]) -> None:
        """Computes the sums of the values of a head, times their weights."""
        frame, shares = self.frame, inverse(totals)
        step = next(n for n in (self.keys_at_once, 2, 1) if self.size % n == 0)
        with loop(index(0), index(self.size), index(step)) as ds:
            rows = [arith.addi(arith.addi(row, ds.induction_variable), index(a)) for a in range(step)]
            with self._tiles([self.start] * (step * frame.vectors)) as tiles:
                origin, taken, stride = self._tile(tiles.induction_variable)
                base = arith.addi(self.sequence.values, self.sequence.place(tiles.induction_variable))
                places = [arith.addi(base, arith.muli(r, self._in_elements(stride))) for r in rows]
                scf.YieldOp(self._add(origin, taken, places, list(tiles.inner_iter_args)))
            for a in range(step):
                m = arith.addi(arith.addi(result, ds.induction_variable), index(a))
                for v in self.vectors:
                    frame.store(arith.mulf(tiles.results[a * frame.vectors + v], shares[v]), self.op.operation.results[0], m, v)

    def _add(self, origin: ir.Value, taken: ir.Value, places: list[ir.Value], carried: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the weighted values of a tile."""
        if not self.causal:
            return self._weighted(origin, taken, places, carried, False)
        later = arith.cmpi(arith.CmpIPredicate.ugt, arith.addi(origin, taken), arith.addi(self.sequence.within, index(1)))
        choice = scf.IfOp(later, [self.frame.vec] * len(carried), has_else=True)
        for block, hides in ((choice.then_block, True), (choice.else_block, False)):
            with ir.InsertionPoint(block):
                scf.YieldOp(self._weighted(origin, taken, places, carried, hides))
        return list(choice.results)

    def _weighted(
        self, origin: ir.Value, taken: ir.Value, places: list[ir.Value], carried: list[ir.Value], hides: bool
    ) -> list[ir.Value]:
        """Returns the sums plus the weighted values of a tile. If `hides`, it skips values with weight 0: they may be NaN."""
        frame, count = self.frame, arith.ceildivui(taken, index(self.together))
        with loop(index(0), count, index(1), carried) as js:
            j, sums = js.induction_variable, list(js.inner_iter_args)
            weights = self._vectors(self.weights, arith.addi(self._in_elements(origin), j))
            seen = [self._seen(weight) for weight in weights] if hides else weights
            for a, place in enumerate(places):
                value = self._scalar(arith.addi(place, j))
                for v in self.vectors:
                    i = a * frame.vectors + v
                    given = arith.select(seen[v], value, zeros(ir.VectorType(value.type))) if hides else value
                    sums[i] = self._plus_product(sums[i], given, weights[v])
            scf.YieldOp(sums)
        return list(js.results)

    def _in_elements(self, count: ir.Value) -> ir.Value:
        """Returns a number of features, or keys, as a number of elements."""
        return count if self.together == 1 else arith.divui(count, index(self.together))

    def _vectors(self, buffer: ir.Value, row: ir.Value) -> list[ir.Value]:
        """Loads a row of a buffer, for all tokens."""
        return [vector.load(self.frame.vec, buffer, [row, self.frame.at(v)]) for v in self.vectors]

    def _plus_product(self, total: ir.Value, scalar: ir.Value, given: ir.Value) -> ir.Value:
        return vector.fma(scalar, given, total)

    def _seen(self, weight: ir.Value) -> ir.Value:
        """Returns the lanes whose weight is not 0."""
        return arith.cmpf(arith.CmpFPredicate.UNE, weight, self.start)

    def _scalar(self, at: ir.Value) -> ir.Value:
        """Loads an element of keys or values into all lanes."""
        return vector.broadcast(self.frame.vec, memref.load(self.sequence.memory, [at]))


def _number(vec: ir.VectorType, value: str) -> ir.Value:
    return arith.constant(vec.element_type, ir.FloatAttr.get(vec.element_type, float(value)))
