"""The innermost loop of a product of int8: what the quads of a group of rows in a panel of columns add to its sums.

scf.for %p = %begin to %end step 4 iter_args(4 vectors of sums, how much too large they are)    // unrolled, in two sets
  vpdpbusd(sums, the 4 columns of x of 16 tokens, quad p in all lanes)
  vpdpbusd(how much, 128, quad p in all lanes)            // x is packed as x + 128
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.packing import Quads
from gossamer.passes.loops.inner_loop import InnerLoop, added_up, sets_of
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of, zeros

_CHAINS = 10  # sums that keep two products a cycle of five cycles each going
_DOT = {512: "avx512.vpdpbusd.512", 256: "avx512.vpdpbusd.256", 128: "avx512.vpdpbusd.128"}
_PAIRS = {512: "avx512.pmaddw.d.512", 256: "avx2.pmadd.wd", 128: "sse2.pmadd.wd"}


@dataclass(frozen=True)
class QuadRows(InnerLoop):
    """For a weight in quads, of `groups` groups of rows; x is packed as lines (quad_lines.py), of words if `words`."""

    storage: Quads
    groups: int
    words: bool

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums (all vectors of a row, then those of the next) + what the group's quads in this panel of columns give."""
        rows = self.storage.rows
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.groups)), group))
        origin = arith.muli(panel, index(self.storage.width // 4))
        carried = sums if self.words else [*sums, *[zeros(self.vec)] * rows]
        ways, width = 1 << max(0, min(2, (_CHAINS // len(carried)).bit_length() - 1)), len(carried)
        with loop(begin, end, index(Quads.GROUP), sets_of(carried, ways)) as groups:
            totals = list(groups.inner_iter_args)
            for i in range(Quads.GROUP):
                mine = slice(i % ways * width, (i % ways + 1) * width)
                totals[mine] = self._quad(origin, arith.addi(groups.induction_variable, index(i)), totals[mine])
            scf.YieldOp(totals)
        found = added_up(list(groups.results), width)
        if self.words:
            return found
        return [arith.subi(total, found[len(sums) + i // self.vectors]) for i, total in enumerate(found[: len(sums)])]

    def _quad(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + one quad of each row * its columns of x."""
        k = arith.addi(origin, load_index(self.coordinates, p))
        start = arith.muli(p, index(4 * self.storage.rows))
        four = vector_of(4, ir.IntegerType.get_signless(8))
        quads = [
            vector.load(four, self.values, [arith.addi(start, index(4 * row))]) for row in range(self.storage.rows)
        ]  # fmt: skip
        return self._by_words(k, quads, sums) if self.words else self._by_bytes(k, quads, sums)

    def _by_bytes(self, k: ir.Value, quads: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        line = vector_of(4 * self.vec.shape[0], ir.IntegerType.get_signless(8))
        weights = [self._in_all_lanes(quad, line)[0] for quad in quads]
        x = self._line(line, k)
        middle = arith.constant(line, ir.DenseElementsAttr.get_splat(line, ir.IntegerAttr.get(line.element_type, -128)))
        factors = [*((a, weight) for weight in weights for a in x), *((middle, weight) for weight in weights)]
        name = _DOT[32 * self.vec.shape[0]]
        return [_intrinsic(name, self.vec, total, a, w) for total, (a, w) in zip(sums, factors, strict=True)]

    def _by_words(self, k: ir.Value, quads: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        i16 = ir.IntegerType.get_signless(16)
        line, name = vector_of(2 * self.vec.shape[0], i16), _PAIRS[32 * self.vec.shape[0]]
        weights = [self._in_all_lanes(arith.extsi(vector_of(4, i16), quad), line) for quad in quads]
        for half in range(2):
            x = self._line(line, arith.addi(arith.muli(k, index(2)), index(half)))
            products = [_intrinsic(name, self.vec, a, pair[half]) for pair in weights for a in x]
            sums = [arith.addi(total, product) for total, product in zip(sums, products, strict=True)]
        return sums

    def _line(self, line: ir.VectorType, at: ir.Value) -> list[ir.Value]:
        """The vectors of a line of x."""
        return [vector.load(line, self.packed, [at, index(v * line.shape[0])]) for v in range(self.vectors)]

    def _in_all_lanes(self, values: ir.Value, line: ir.VectorType) -> list[ir.Value]:
        """Each 32 bits of the values, as often as a line takes them."""
        i32 = ir.IntegerType.get_signless(32)
        type_ = ir.VectorType(values.type)
        count = type_.shape[0] * ir.IntegerType(type_.element_type).width // 32
        dwords = vector.bitcast(vector_of(count, i32), values)
        return [
            vector.bitcast(line, vector.broadcast(self.vec, vector.extract(dwords, [], [i]))) for i in range(count)
        ]


def _intrinsic(name: str, result: ir.VectorType, *operands: ir.Value) -> ir.Value:
    """An instruction of x86 that MLIR has no op for."""
    attributes = {
        "intrin": ir.StringAttr.get(f"llvm.x86.{name}"),
        "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(operands), 0]),
    }
    op = ir.Operation.create("llvm.call_intrinsic", results=[result], operands=list(operands), attributes=attributes)
    return op.results[0]
