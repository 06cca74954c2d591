"""Many slots of an expert: some rows and columns of its weight are packed into a panel, which all slots are multiplied with.

func.private @region_pack(...)       // 64 rows x 128 columns, transposed; a turned weight is copied
func.private @region_many6(...)      // 6 slots times the panel, added to scratch memory (panels.py)

What is packed next is fetched into a second-level cache by the first of these functions, so that memory and arithmetic units
work at the same time.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.passes.experts import panels
from gossamer.passes.experts.slot_tile import SlotTile, WeightRows
from gossamer.passes.loops.vectors import byte_width, index, loop, transpose, zeros

DEPTH = 128
"""Lines of a panel."""
_FETCHED = 2  # lines of caches that are fetched for a line of the panel
_FETCHING = 2  # tiles of a block that fetch: the first ones, which all blocks have


class Pack:
    """Rows [0, count) of a product and columns [0, depth) of x, from a place (row of memory, `begin`) of a weight on."""

    def __init__(self, product: Any, *given: ir.Value) -> None:
        _, weight, scales, _, workspace, base, self.row, self.begin, self.count, self.depth = given
        self.product, self.stored, self.lanes = product, product.stored, product.lanes
        self.weight, self.panel = WeightRows(product.stored, weight, scales), product.panel(workspace, base)

    def emit(self) -> None:
        """The body of a function."""
        if not self.product.turned:
            self._transpose()
            return
        full = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, self.count, index(self.product.width)), has_else=True)
        for block, masked in ((full.then_block, False), (full.else_block, True)):
            with ir.InsertionPoint(block):
                self._copy(masked)
                scf.YieldOp([])

    def _copy(self, masked: bool) -> None:
        pair, step = self.stored.pair, self.stored.pair * self.lanes
        with loop(index(0), self.depth, index(pair)) as columns:
            column = columns.induction_variable
            line = arith.divui(column, index(pair))
            for v in range(0, self.product.width, step):
                left = arith.subi(arith.maxui(self.count, index(v)), index(v)) if masked else None
                rows = [arith.addi(self.row, arith.addi(column, index(n))) for n in range(pair)]
                read = [self.weight.read(row, arith.addi(self.begin, index(v)), left)[0] for row in rows]
                for n, value in enumerate(self.stored.paired(read)):
                    vector.store(self.stored.word(value), self.panel, [line, index(v + n * self.lanes)])

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
                    for part in range(len(read[0])):
                        words = [self.stored.word(each[part]) for each in read]
                        for n, value in enumerate(transpose(words)):
                            place = arith.addi(line, index(part * self.lanes + n))
                            vector.store(value, self.panel, [place, at])


class ManySlots(SlotTile):
    """Some slots of a block times a panel of columns [low, low + depth) of x.

    next    the place (row of memory, column) of what is packed next
    number  of the tile in its block
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        *others, self.low, self.depth, self.row, self.begin, self.number = given
        super().__init__(product, slots, *others)
        self.product = product

    def emit(self) -> None:
        """The body of a function."""
        stored, vectors = self.stored, self.product.width // self.lanes
        places = [[arith.addi(self.local, index(t)), index(v * self.lanes)] for t in range(self.slots) for v in range(vectors)]
        found = [vector.load(stored.vec, self.sums, place) for place in places]
        before = [zeros(stored.vec)] * len(found) if stored.scaled else found

        early = arith.cmpi(arith.CmpIPredicate.ult, self.number, index(_FETCHING))
        choice = scf.IfOp(early, [each.type for each in before], has_else=True)
        for block, fetches in ((choice.then_block, True), (choice.else_block, False)):
            with ir.InsertionPoint(block):
                scf.YieldOp(self._multiplied(before, fetches))
        for number, (total, place) in enumerate(zip(choice.results, places, strict=True)):
            if stored.scaled:
                scales = vector.load(stored.vec, self.panel, [index(DEPTH), place[1]])
                total = vector.fma(total, scales, found[number])
            vector.store(total, self.sums, place)

    def _multiplied(self, before: list[ir.Value], fetches: bool) -> list[ir.Value]:
        """The sums with the products of the panel."""

        def elements(line: ir.Value) -> list[ir.Value]:
            if fetches:
                self._fetch(line)
            column = arith.addi(self.low, arith.muli(line, index(self.stored.pair)))
            return [self.stored.spread(self.x, token, column) for token in self.tokens]

        lines = arith.ceildivui(self.depth, index(self.stored.pair))
        return panels.multiplied(self.stored, self.panel, lines, before, elements)

    def _fetch(self, line: ir.Value) -> None:
        """Some lines of what is packed next, others at each line of a panel; the last one where there are no more."""
        columns, rows = DEPTH * self.stored.pair, self.product.width
        high, wide = (columns, rows) if self.product.turned else (rows, columns)
        each = 64 * self.stored.columns // (self.lanes * self.stored.pair * byte_width(self.stored.element))
        across = max(1, wide // each)
        first = arith.muli(arith.addi(arith.muli(self.number, index(DEPTH)), line), index(_FETCHED))
        for n in range(_FETCHED):
            at = arith.minui(arith.addi(first, index(n)), index(high * across - 1))
            row = arith.addi(self.row, arith.divui(at, index(across)))
            self.weight.fetch(row, arith.addi(self.begin, arith.muli(arith.remui(at, index(across)), index(each))), 2)
