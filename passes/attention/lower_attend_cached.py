"""lower-attend-cached: lowers attention of a few queries over a cache to one loop over its keys, for each head of the cache.

before   %y = "kernel.attend_cached"(%q, %k, %v, %mask, ...) {head_size = 64, group = 4, queries = 1, score = [0.125]}
after    scf.parallel (%task) = ...                          // batch x heads of the cache
           for each 64 keys:
             copy past and new ones into all_k, all_v        // only for attend_appended
             for each query of each head that shares them:
               for each vector of keys: scores = <q, k> + mask          // unless the mask hides all of them
               sums = sums * exp(largest before - largest) + exp(score - largest) * v
           sums / total into y

Lanes are elements of a head. Keys and values are read once for all heads that share them, and not at all if the mask hides
them. Runs on functions whose storage is exposed (expose-storage).
"""

import math as numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.dialects.attention import TANH, steps_of
from gossamer.dialects.cached_attention import SIZES, STRIDED
from gossamer.passes.codegen.online_softmax import lowest, power
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import (
    index,
    loop,
    mask_of,
    narrowed,
    parallel,
    reserve_workspace,
    splat_of,
    sums_across,
    vector_of,
    widened,
    zeros,
)

_KEYS = 64
"""Keys of a block. They stay in the first-level cache while all queries are multiplied with them."""


@dataclass(frozen=True)
class LowerAttendCached:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for name in STRIDED:
            for op in walk(module, name):
                with op.location:
                    _Attend(op.opview, self.bits).lower(module)


@dataclass(frozen=True)
class _Rows:
    """A head of each token in a memory. That of token 0 begins at `base`, the next one `stride` elements further."""

    memory: ir.Value
    base: ir.Value
    stride: ir.Value

    def at(self, token: ir.Value) -> ir.Value:
        return arith.addi(self.base, arith.muli(token, self.stride))


class _Attend:
    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.size, self.group, self.queries = (ir.IntegerAttr(a).value for a in (op.head_size, op.group, op.queries))
        self.steps = steps_of(op.score)
        self.lanes = bits // 32
        self.vec = vector_of(self.lanes, ir.F32Type.get())
        self.pieces = -(-self.size // self.lanes)
        strided = STRIDED[op.operation.name]
        names = [*SIZES, *(f"{name}_{of}" for name in strided for of in ("batch", "head", "row"))]
        self.sizes = dict(zip(names, op.sizes, strict=True))
        self.appends = "new_k" in strided
        given = ["q", "k", "v", *(["new_k", "new_v"] if self.appends else []), *(["mask"] if op.mask is not None else [])]
        self.memory = {name: buffer_of(getattr(op, name)) for name in given}
        self.memory |= zip(("out", "all_k", "all_v"), self.storage.outputs, strict=False)
        self.rows = self.group * self.queries

    def lower(self, module: ir.Module) -> None:
        """Replaces the op by loops."""
        padded = self.pieces * self.lanes
        widths = (self.rows * padded, self.rows * padded, self.rows * self.lanes, self.rows * self.lanes, _KEYS)
        space = 4 * sum(widths)
        reserve_workspace(module, space)
        with ir.InsertionPoint(self.op):
            heads = arith.divui(self.sizes["heads"], index(self.group))
            with parallel(arith.muli(self.sizes["batch"], heads)) as task:
                offset, scratch = arith.muli(thread_number(), index(space)), []
                for width in widths:
                    type_ = ir.MemRefType.get([width], ir.F32Type.get())
                    scratch.append(memref.view(type_, self.storage.workspace, offset, []))
                    offset = arith.addi(offset, index(4 * width))
                self.turned, self.sums, self.largest, self.totals, self.scores = scratch
                self._task(arith.divui(task, heads), arith.remui(task, heads), heads)
        self.storage.erase()

    def _task(self, batch: ir.Value, head: ir.Value, heads: ir.Value) -> None:
        """Emits the work for all queries of a head of the cache."""
        keys = self.sizes["keys"]
        if self.appends:
            pair = arith.addi(arith.muli(batch, heads), head)
            base, step = arith.muli(pair, arith.muli(keys, index(self.size))), index(self.size)
            k, v = (_Rows(self.memory[name], base, step) for name in ("all_k", "all_v"))
        else:
            k, v = (self._rows_of(name, batch, head) for name in ("k", "v"))
        with loop(index(0), index(self.rows), index(1)) as rows:
            self._begin(rows.induction_variable, batch, head)
        with loop(index(0), keys, index(_KEYS)) as blocks:
            first = blocks.induction_variable
            end = arith.minui(arith.addi(first, index(_KEYS)), keys)
            if self.appends:
                past = self.sizes["past"]
                for name, into in (("k", k), ("v", v)):
                    old, new = (self._rows_of(n, batch, head) for n in (name, f"new_{name}"))
                    self._copy(old, into, first, arith.minui(end, past), index(0))
                    self._copy(new, into, arith.maxui(first, past), end, past)
            with loop(index(0), index(self.rows), index(1)) as rows:
                self._block(rows.induction_variable, batch, head, k, v, first, end)
        with loop(index(0), index(self.rows), index(1)) as rows:
            self._finish(rows.induction_variable, batch, head)

    def _rows_of(self, name: str, batch: ir.Value, head: ir.Value) -> _Rows:
        by_batch, by_head = (arith.muli(n, self.sizes[f"{name}_{of}"]) for n, of in ((batch, "batch"), (head, "head")))
        return _Rows(self.memory[name], arith.addi(by_batch, by_head), self.sizes[f"{name}_row"])

    def _of_query(self, name: str, row: ir.Value, batch: ir.Value, head: ir.Value) -> ir.Value:
        """Returns the place where a row's query begins. Rows are the heads of the first query, then those of the next."""
        own = arith.addi(arith.muli(head, index(self.group)), arith.remui(row, index(self.group)))
        return self._rows_of(name, batch, own).at(arith.divui(row, index(self.group)))

    def _pieces(self, one: Callable[[ir.Value, ir.Value | None], None]) -> None:
        """Calls `one` with the begin of each vector of a head, and a mask if the head ends inside of the vector."""
        whole = self.size // self.lanes
        if whole:
            with loop(index(0), index(whole * self.lanes), index(self.lanes)) as pieces:
                one(pieces.induction_variable, None)
        if whole < self.pieces:
            one(index(whole * self.lanes), mask_of(self.lanes, index(self.size - whole * self.lanes)))

    def _load(self, memory: ir.Value, at: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Loads a vector of a head, in f32."""
        narrow = vector_of(self.lanes, ir.MemRefType(memory.type).element_type)
        if mask is None:
            return widened(vector.load(narrow, memory, [at]), self.vec)
        return widened(vector.maskedload(narrow, memory, [at], mask, zeros(narrow)), self.vec)

    def _store(self, value: ir.Value, memory: ir.Value, at: ir.Value, mask: ir.Value | None) -> None:
        value = narrowed(value, vector_of(self.lanes, ir.MemRefType(memory.type).element_type))
        if mask is None:
            vector.store(value, memory, [at])
        else:
            vector.maskedstore(memory, [at], mask, value)

    def _at(self, row: ir.Value, width: int, behind: ir.Value | None = None) -> ir.Value:
        """Returns the place where a row of scratch memory begins, or `behind` elements further."""
        base = arith.muli(row, index(width))
        return base if behind is None else arith.addi(base, behind)

    def _begin(self, row: ir.Value, batch: ir.Value, head: ir.Value) -> None:
        """Stores the query times the scale, and initial sums."""
        place, padded = self._of_query("q", row, batch, head), self.pieces * self.lanes
        scale = splat_of(self.vec, float(self.steps[0]))

        def one(d: ir.Value, mask: ir.Value | None) -> None:
            query = arith.mulf(self._load(self.memory["q"], arith.addi(place, d), mask), scale)
            vector.store(query, self.turned, [self._at(row, padded, d)])
            vector.store(zeros(self.vec), self.sums, [self._at(row, padded, d)])

        self._pieces(one)
        vector.store(*lowest(self.vec, 1), self.largest, [self._at(row, self.lanes)])
        vector.store(zeros(self.vec), self.totals, [self._at(row, self.lanes)])

    def _copy(self, rows: _Rows, into: _Rows, low: ir.Value, high: ir.Value, before: ir.Value) -> None:
        """Copies tokens [low, high), counted over past and new ones. `rows` begins with token `before`."""
        narrow = vector_of(self.lanes, ir.MemRefType(rows.memory.type).element_type)
        with loop(low, high, index(1)) as tokens:
            token = tokens.induction_variable
            here, there = rows.at(arith.subi(token, before)), into.at(token)

            def one(d: ir.Value, mask: ir.Value | None) -> None:
                at = arith.addi(here, d)
                if mask is None:
                    value = vector.load(narrow, rows.memory, [at])
                else:
                    value = vector.maskedload(narrow, rows.memory, [at], mask, zeros(narrow))
                self._store(value, into.memory, arith.addi(there, d), mask)

            self._pieces(one)

    def _block(
        self, row: ir.Value, batch: ir.Value, head: ir.Value, k: _Rows, v: _Rows, first: ir.Value, end: ir.Value
    ) -> None:
        """Adds a block of keys to the sums of a query."""
        lanes, none = index(self.lanes), splat_of(self.vec, -numbers.inf)
        added = self._of_query("mask", row, batch, head) if "mask" in self.memory else None
        with loop(first, end, lanes, [none]) as groups:
            key = groups.induction_variable
            scores = self._scores(row, k, key, end, added)
            vector.store(scores, self.scores, [arith.subi(key, first)])
            scf.YieldOp([arith.maximumf(groups.inner_iter_args[0], scores)])
        top = vector.reduction(self.vec.element_type, ir.Attribute.parse("#vector.kind<maximumf>"), groups.results[0])
        lowest = arith.constant(self.vec.element_type, -numbers.inf)
        seen = scf.IfOp(arith.cmpf(arith.CmpFPredicate.UNE, top, lowest))
        with ir.InsertionPoint(seen.then_block):
            self._add(row, v, first, end, vector.broadcast(self.vec, top))
            scf.YieldOp([])

    def _scores(self, row: ir.Value, k: _Rows, key: ir.Value, end: ir.Value, added: ir.Value | None) -> ir.Value:
        """Returns the scores of a vector of keys, with minus infinity behind the last one."""
        inside = mask_of(self.lanes, arith.subi(end, key))
        none = splat_of(self.vec, -numbers.inf)
        if added is None:
            return arith.select(inside, self._scored(self._products(row, k, key, end)), none)
        memory = self.memory["mask"]
        narrow = vector_of(self.lanes, ir.MemRefType(memory.type).element_type)
        hidden = splat_of(narrow, -numbers.inf)
        numbers_ = widened(vector.maskedload(narrow, memory, [arith.addi(added, key)], inside, hidden), self.vec)
        visible = vector.reduction(
            ir.IntegerType.get_signless(1),
            ir.Attribute.parse("#vector.kind<or>"),
            arith.cmpf(arith.CmpFPredicate.UNE, numbers_, none),
        )
        some = scf.IfOp(visible, [self.vec], has_else=True)
        with ir.InsertionPoint(some.then_block):
            scored = arith.addf(self._scored(self._products(row, k, key, end)), numbers_)
            shown = arith.cmpf(arith.CmpFPredicate.UNE, numbers_, none)
            scf.YieldOp([arith.select(shown, scored, none)])
        with ir.InsertionPoint(some.else_block):
            scf.YieldOp([none])
        return some.results[0]

    def _products(self, row: ir.Value, k: _Rows, key: ir.Value, end: ir.Value) -> ir.Value:
        """Returns the products of a query with a vector of keys. Keys past the last one repeat it."""
        padded, last = self.pieces * self.lanes, arith.subi(end, index(1))
        places = [k.at(arith.minui(arith.addi(key, index(n)), last)) for n in range(self.lanes)]

        def times(d: ir.Value, mask: ir.Value | None, sums: list[ir.Value]) -> list[ir.Value]:
            query = vector.load(self.vec, self.turned, [self._at(row, padded, d)])
            loaded = [self._load(k.memory, arith.addi(place, d), mask) for place in places]
            return [vector.fma(query, each, total) for each, total in zip(loaded, sums, strict=True)]

        whole, sums = self.size // self.lanes, [zeros(self.vec)] * self.lanes
        if whole:
            with loop(index(0), index(whole * self.lanes), index(self.lanes), sums) as pieces:
                scf.YieldOp(times(pieces.induction_variable, None, list(pieces.inner_iter_args)))
            sums = list(pieces.results)
        if whole < self.pieces:
            sums = times(index(whole * self.lanes), mask_of(self.lanes, index(self.size - whole * self.lanes)), sums)
        return sums_across(sums)

    def _scored(self, products: ir.Value) -> ir.Value:
        for step in self.steps[1:]:
            factor = None if step == TANH else splat_of(self.vec, float(step))
            products = math.tanh(products) if factor is None else arith.mulf(products, factor)
        return products

    def _add(self, row: ir.Value, v: _Rows, first: ir.Value, end: ir.Value, top: ir.Value) -> None:
        """Adds the values of a block, whose greatest score is `top`, to the sums of a query."""
        lanes, padded = index(self.lanes), self.pieces * self.lanes
        state = self._at(row, self.lanes)
        before = vector.load(self.vec, self.largest, [state])
        now = arith.maximumf(before, top)
        shrunk = power(before, now)
        total = arith.mulf(vector.load(self.vec, self.totals, [state]), shrunk)
        with loop(index(0), arith.subi(end, first), lanes, [total]) as groups:
            at = groups.induction_variable
            weight = power(vector.load(self.vec, self.scores, [at]), now)
            vector.store(weight, self.scores, [at])
            scf.YieldOp([arith.addf(groups.inner_iter_args[0], weight)])
        vector.store(groups.results[0], self.totals, [state])
        vector.store(now, self.largest, [state])
        masks = [None] * (self.size // self.lanes)
        ends = [mask_of(self.lanes, index(self.size - len(masks) * self.lanes))] if len(masks) < self.pieces else []
        places = [self._at(row, padded, index(n * self.lanes)) for n in range(self.pieces)]
        sums = [arith.mulf(vector.load(self.vec, self.sums, [place]), shrunk) for place in places]
        with loop(first, end, index(1), sums) as keys:
            key = keys.induction_variable
            weight = vector.broadcast(self.vec, memref.load(self.scores, [arith.subi(key, first)]))
            base = v.at(key)
            values = [self._load(v.memory, arith.addi(base, index(n * self.lanes)), m) for n, m in enumerate([*masks, *ends])]
            scf.YieldOp([vector.fma(weight, x, s) for x, s in zip(values, keys.inner_iter_args, strict=True)])
        for place, total in zip(places, keys.results, strict=True):
            vector.store(total, self.sums, [place])

    def _finish(self, row: ir.Value, batch: ir.Value, head: ir.Value) -> None:
        """Stores sums / total."""
        place, padded = self._of_query("out", row, batch, head), self.pieces * self.lanes
        lines = vector.load(self.vec, self.totals, [self._at(row, self.lanes)])
        total = vector.reduction(self.vec.element_type, ir.Attribute.parse("#vector.kind<add>"), lines)
        nothing = arith.constant(self.vec.element_type, 0.0)
        some = arith.cmpf(arith.CmpFPredicate.UNE, total, nothing)
        one = arith.constant(self.vec.element_type, 1.0)
        inverse = vector.broadcast(self.vec, arith.divf(one, arith.select(some, total, one)))

        def put(d: ir.Value, mask: ir.Value | None) -> None:
            value = vector.load(self.vec, self.sums, [self._at(row, padded, d)])
            self._store(arith.mulf(value, inverse), self.memory["out"], arith.addi(place, d), mask)

        self._pieces(put)
