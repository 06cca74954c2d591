"""Products of many slots of an expert. Some rows and columns of its weight are packed into a panel, which all slots share.

func.private @region_pack(...)       // 64 rows x 128 columns, transposed; a turned weight is copied
func.private @region_many6(...)      // 6 slots times the panel, added to scratch memory (panels.py)
  if tokens are bf16 or f16, and there are no dot products of them: their 128 columns as f32 into scratch memory first

The first calls of @region_many6 prefetch the next panel into the second-level cache, so that memory and arithmetic units
work at the same time. They do so line by line. In blocks of more tiles (some_slots.py), they prefetch some lines before each
tile. With 64 slots for each expert, that takes 0.85 of the time (Zen 3).

To widen an element of a token takes several instructions, as many as its multiply-adds. So the columns are widened once for
each panel, which takes 0.65 of the time (bf16 on Zen 3).
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.passes.experts import panels
from gossamer.passes.experts.slot_tile import SlotTile, WeightRows
from gossamer.passes.loops.vectors import index, loop, transpose, zeros

DEPTH = 128
"""Lines of a panel."""
_FETCHED = 2  # cache lines to prefetch at each line of the panel
_BURSTS = 8  # tiles that prefetch if blocks have at least as many
_FETCHING = 2  # tiles of a block that prefetch: the first ones, which all blocks have


class Following:
    """Prefetches the next panel, line by line, from a place (row of memory, `begin`) of a weight on."""

    def __init__(self, product: Any, weight: WeightRows, row: ir.Value, begin: ir.Value) -> None:
        stored, columns = product.stored, DEPTH * product.stored.pair
        self.weight, self.row, self.begin = weight, row, begin
        high, wide = (columns, product.width) if product.turned else (product.width, columns)
        self.each = stored.in_line
        self.across = max(1, wide // self.each)
        self.lines = high * self.across

    def fetch(self, half: int, step: ir.Value, steps: int) -> None:
        """Prefetches the share of a step of the first or second half of the lines, for `steps` steps."""
        count = -(-self.lines // (2 * steps))
        self.fetch_from(arith.addi(index(half * self.lines // 2), arith.muli(step, index(count))), count)

    def fetch_from(self, first: ir.Value, count: int) -> None:
        """Prefetches `count` lines; past the end, the last one again."""
        for n in range(count):
            at = arith.minui(arith.addi(first, index(n)), index(self.lines - 1))
            row = arith.addi(self.row, arith.divui(at, index(self.across)))
            self.weight.fetch(row, arith.addi(self.begin, arith.muli(arith.remui(at, index(self.across)), index(self.each))))


class Pack:
    """Packs rows [0, count) of a product and columns [0, depth) of x, from a place (row of memory, `begin`) of a weight on.

    following  the next panel; with tiles, half of it is prefetched here
    """

    def __init__(self, product: Any, *given: ir.Value) -> None:
        _, weight, scales, _, workspace, base, self.row, self.begin, self.count, self.depth, *following = given
        self.product, self.stored, self.lanes = product, product.stored, product.lanes
        self.weight, self.panel = WeightRows(product.stored, weight, scales), product.panel(workspace, base)
        self.following = Following(product, self.weight, *following)

    def emit(self) -> None:
        """Emits the body of a function."""
        if not self.product.turned:
            self._transpose()
            return
        full = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, self.count, index(self.product.width)), has_else=True)
        for block, masked in ((full.then_block, False), (full.else_block, True)):
            with ir.InsertionPoint(block):
                self._copy(masked)
                scf.YieldOp([])
        if self.product.tiles:
            self._fill()

    def _fill(self) -> None:
        """Stores zeros in the lines behind the last ones, up to a whole tile."""
        pair = self.stored.pair
        lines = arith.ceildivui(self.depth, index(pair))
        with loop(lines, arith.muli(arith.ceildivui(lines, index(self.lanes)), index(self.lanes)), index(1)) as rest:
            for v in range(0, self.product.width, self.lanes):
                vector.store(zeros(self.stored.vec), self.panel, [rest.induction_variable, index(v)])

    def _copy(self, masked: bool) -> None:
        pair, step = self.stored.pair, self.stored.pair * self.lanes
        with loop(index(0), self.depth, index(pair)) as columns:
            column = columns.induction_variable
            line = arith.divui(column, index(pair))
            if self.product.tiles:
                self.following.fetch(0, line, DEPTH)
            for v in range(0, self.product.width, step):
                left = arith.subi(arith.maxui(self.count, index(v)), index(v)) if masked else None
                rows = [arith.addi(self.row, arith.addi(column, index(n))) for n in range(pair)]
                read = [self.weight.read(row, arith.addi(self.begin, index(v)), left)[0] for row in rows]
                for n, value in enumerate(self.stored.paired(read)):
                    vector.store(self.stored.word(value), self.panel, [line, index(v + n * self.lanes)])

    @property
    def _steps(self) -> int:
        """Number of squares of a panel that are transposed."""
        return self.product.width * DEPTH // self.lanes**2

    def _transpose(self) -> None:
        last, one = arith.subi(self.count, index(1)), self.stored.columns
        whole = arith.subi(self.depth, arith.remui(self.depth, index(one)))
        with loop(index(0), index(self.product.width), index(self.lanes)) as groups:
            at = groups.induction_variable
            rows = [arith.addi(self.row, arith.minui(arith.addi(at, index(r)), last)) for r in range(self.lanes)]
            if self.stored.scaled:
                scales = vector.from_elements(self.stored.vec, self.weight.scales(rows))
                vector.store(scales, self.panel, [index(DEPTH), at])
            for low, high, masked in ((index(0), whole, False), (whole, self.depth, True)):
                with loop(low, high, index(one)) as columns:
                    column = columns.induction_variable
                    left = arith.subi(high, column) if masked else None
                    read = [self.weight.read(row, arith.addi(self.begin, column), left) for row in rows]
                    line = arith.divui(column, index(self.stored.pair))
                    if self.product.tiles:
                        step = arith.addi(arith.muli(at, index(DEPTH)), arith.muli(line, index(self.lanes)))
                        self.following.fetch(0, arith.divui(step, index(self.lanes**2)), self._steps)
                    for part in range(len(read[0])):
                        words = [self.stored.word(each[part]) for each in read]
                        for n, value in enumerate(transpose(words)):
                            place = arith.addi(line, index(part * self.lanes + n))
                            vector.store(value, self.panel, [place, at])


class ManySlots(SlotTile):
    """Emits the products of some slots of a block with a panel of columns [low, low + depth) of x.

    following  the next panel
    number     number of the tile of slots in its block
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        *others, self.low, self.depth, row, begin, self.number, self.at = given
        super().__init__(product, slots, *others)
        self.product, self.following = product, Following(product, self.weight, row, begin)
        self.widened = product.widened(others[4], others[5])

    def emit(self) -> None:
        """Emits the body of a function."""
        stored, vectors = self.stored, self.product.width // self.lanes
        columns = [index(v * self.lanes) for v in range(vectors)]
        places = [[arith.addi(self.local, index(t)), arith.addi(self.at, at)] for t in range(self.slots) for at in columns]
        found = [vector.load(stored.vec, self.sums, place) for place in places]
        before = [zeros(stored.vec)] * len(found) if stored.scaled else found
        if self.widened is not None:
            self.pack(
                self.low, self.depth, self.widened, lambda column, t, n: [index(t), arith.addi(column, index(n * self.lanes))]
            )

        totals = self._in_bursts(before) if self.product.some else self._in_steps(before)
        for number, (total, place) in enumerate(zip(totals, places, strict=True)):
            if stored.scaled:
                scales = vector.load(stored.vec, self.panel, [index(DEPTH), columns[number % vectors]])
                total = vector.fma(total, scales, found[number])
            vector.store(total, self.sums, place)

    def _in_steps(self, before: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products. The first tiles prefetch the next panel, line by line."""
        early = arith.cmpi(arith.CmpIPredicate.ult, self.number, index(_FETCHING))
        choice = scf.IfOp(early, [each.type for each in before], has_else=True)
        for block, fetches in ((choice.then_block, True), (choice.else_block, False)):
            with ir.InsertionPoint(block):
                scf.YieldOp(self._multiplied(before, fetches))
        return list(choice.results)

    def _in_bursts(self, before: list[ir.Value]) -> list[ir.Value]:
        """Does the same for blocks of so many tiles that each can prefetch a few lines before it multiplies."""
        early = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, self.number, index(_BURSTS)))
        with ir.InsertionPoint(early.then_block):
            count = -(-self.following.lines // _BURSTS)
            self.following.fetch_from(arith.muli(self.number, index(count)), count)
            scf.YieldOp([])
        return self._multiplied(before, False)

    def _multiplied(self, before: list[ir.Value], fetches: bool) -> list[ir.Value]:
        """Returns the sums plus the products of the panel."""

        def elements(line: ir.Value) -> list[ir.Value]:
            if fetches:
                self._fetch(line)
            if self.widened is not None:
                return [self.stored.spread(self.widened, index(t), line) for t in range(self.slots)]
            column = arith.addi(self.low, arith.muli(line, index(self.stored.pair)))
            return [self.stored.spread(self.x, token, column) for token in self.tokens]

        lines = arith.ceildivui(self.depth, index(self.stored.pair))
        return panels.multiplied(self.stored, self.panel, lines, before, elements)

    def _fetch(self, line: ir.Value) -> None:
        """Prefetches some lines of the next panel, different ones at each line of the current panel."""
        first = arith.muli(arith.addi(arith.muli(self.number, index(DEPTH)), line), index(_FETCHED))
        self.following.fetch_from(first, _FETCHED)
