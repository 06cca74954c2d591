"""The innermost loop of a product of int8. It adds the products of a group's quads in a panel of columns to its sums.

scf.for %p = %begin to %end step 4 iter_args(4 vectors of sums, a vector of the excess)    // unrolled, in two sets
  vpdpbusd(sums, the 4 columns of x of 16 tokens, quad p in all lanes)
  vpdpbusd(excess, 128, quad p in all lanes)              // x is packed as x + 128; NEON's sdot multiplies x itself
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.packing import Quads
from gossamer.passes.loops.inner_loop import InnerLoop, added_up, sets_of
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of, zeros
from gossamer.passes.weights_int8.byte_products import (
    are_signed,
    in_all_lanes,
    multiplied,
    multiplied_words,
    splat_of_bytes,
)

_CHAINS = 10  # independent sums that keep two products a cycle busy, each of which takes five cycles


@dataclass(frozen=True)
class QuadRows(InnerLoop):
    """Inner loops for a weight in quads, of `groups` groups of rows. x is packed as lines (quad_lines.py), of words if `words`.

    `lanes` are those of the target; `vec` may be half as wide.
    """

    storage: Quads
    groups: int
    words: bool
    lanes: int

    @property
    def _exact(self) -> bool:
        """Whether products are with x itself instead of x + 128."""
        return self.words or are_signed(self.lanes)

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of the group's quads in this panel of columns."""
        rows = self.storage.rows
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.groups)), group))
        origin = arith.muli(panel, index(self.storage.width // 4))
        carried = sums if self._exact else [*sums, *[zeros(self.vec)] * rows]
        ways, width = 1 << max(0, min(2, (_CHAINS // len(carried)).bit_length() - 1)), len(carried)
        with loop(begin, end, index(Quads.GROUP), sets_of(carried, ways)) as groups:
            totals = list(groups.inner_iter_args)
            for i in range(Quads.GROUP):
                mine = slice(i % ways * width, (i % ways + 1) * width)
                totals[mine] = self._quad(origin, arith.addi(groups.induction_variable, index(i)), totals[mine])
            scf.YieldOp(totals)
        found = added_up(list(groups.results), width)
        if self._exact:
            return found
        return [arith.subi(total, found[len(sums) + i // self.vectors]) for i, total in enumerate(found[: len(sums)])]

    def _quad(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus one quad of each row times its columns of x."""
        k = arith.addi(origin, load_index(self.coordinates, p))
        start = arith.muli(p, index(4 * self.storage.rows))
        four = vector_of(4, ir.IntegerType.get_signless(8))
        quads = [vector.load(four, self.values, [arith.addi(start, index(4 * row))]) for row in range(self.storage.rows)]
        return self._by_words(k, quads, sums) if self.words else self._by_bytes(k, quads, sums)

    def _by_bytes(self, k: ir.Value, quads: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        lanes = self.vec.shape[0]
        weights = [in_all_lanes(quad, lanes)[0] for quad in quads]
        x, middle = self._line(k), splat_of_bytes(4 * lanes, -128)
        factors = [(a, weight) for weight in weights for a in x]
        factors += [] if self._exact else [(middle, weight) for weight in weights]
        return [multiplied(total, a, weight, self._exact) for total, (a, weight) in zip(sums, factors, strict=True)]

    def _by_words(self, k: ir.Value, quads: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        wide = vector_of(4, ir.IntegerType.get_signless(16))
        weights = [in_all_lanes(arith.extsi(wide, quad), self.vec.shape[0]) for quad in quads]
        for half in range(2):
            x = self._line(arith.addi(arith.muli(k, index(2)), index(half)))
            factors = [(a, pair[half]) for pair in weights for a in x]
            sums = [multiplied_words(total, a, weight, self.lanes) for total, (a, weight) in zip(sums, factors, strict=True)]
        return sums

    def _line(self, at: ir.Value) -> list[ir.Value]:
        """Loads the vectors of a line of x."""
        lines = ir.MemRefType(self.packed.type)
        vec = vector_of(lines.shape[1] // self.vectors, lines.element_type)
        return [vector.load(vec, self.packed, [at, index(v * vec.shape[0])]) for v in range(self.vectors)]
