"""lower-attend-edges-grad: lowers a `kernel.attend_edges_grad` to one loop over rows that visits each entry once.

before   %dt, ... = "kernel.attend_edges_grad"(%a, ...) {side = "target", heads = 8, ...}
after    func.func private @region_heads(...)
           for each row, with the row's operands in registers, for each entry:
             weight  = exp(score - largest) / total                  // recomputed, one value for each head
             dweight = <gradient[row], values[column]>               // times the factor of dropout, if there is any
             dscore  = weight * (dweight - delta[row]) * leaky_relu'(score)
             the gradients of "edge" and "weight" into memory; the sums of the others += the entry's part
           the sums into the row

On the side "source" the pattern is the transpose: its rows are the columns above, and operands of the rows above are gathered.
Threads never share sums. Runs on functions whose storage is exposed with the arrays of open operands
(expose-storage{arrays=true}).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.edges import gradients_of
from gossamer.passes.codegen.online_softmax import power
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, loop, splat_of, zeros
from gossamer.passes.sparse_rows.edge_loops import EdgeRows, Entry, Rows, Score

_OTHER = {"queries": "keys", "keys": "queries"}


@dataclass(frozen=True)
class LowerAttendEdgesGrad:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.attend_edges_grad"):
            with op.location:
                _Backward(op.opview, self.bits).lower_op()


class _Backward(EdgeRows):
    def __init__(self, op: Any, bits: int) -> None:
        super().__init__(op, bits, ir.StringAttr(op.side).value)
        self.writes = gradients_of(op)
        self.summed = [name for name in self.writes if name not in ("edge", "weight")]

    def lower_op(self) -> None:
        self.lower(0, self._rows)

    def _rows(self, rows: Rows) -> None:
        with loop(rows.low, rows.high, index(1)) as each:
            self._row(rows, each.induction_variable)

    def _row(self, rows: Rows, row: ir.Value) -> None:
        begin, end = self.bounds(rows, row)
        own = self.read_row(rows, row)
        start = [zero for name in self.summed for zero in self._zeros(name)]
        if start:
            with loop(begin, end, index(1), start) as entries:
                place, sums = entries.induction_variable, list(entries.inner_iter_args)
                self.prefetch(rows, place)
                scf.YieldOp(self._entry(rows, self.entry(rows, place, row, own), sums))
            self._store(rows, row, list(entries.results))
        else:
            with loop(begin, end, index(1)) as entries:
                self._entry(rows, self.entry(rows, entries.induction_variable, row, own), [])

    def _entry(self, rows: Rows, entry: Entry, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the parts of one entry, and stores the gradients that are not summed."""
        gradient, values = self.read(rows, "gradient", entry), self.read(rows, "values", entry)
        largest, inverse = self.read(rows, "statistics", entry)
        score = self.score(rows, entry)
        weight = arith.mulf(power(self.activated(score.raw), largest), inverse)
        of_weight, used = self.dots(gradient, values, self.features), weight
        if self.dropout:
            kept = self.kept(rows, entry.number, self.width)
            of_weight, used = arith.mulf(of_weight, kept), arith.mulf(weight, kept)
        of_score = arith.mulf(weight, arith.subf(of_weight, self.read(rows, "delta", entry)))
        of_score = self.activation_slope(score.raw, of_score)
        self._store_entry(rows, entry, of_score, score.product)
        remaining, added = iter(sums), []
        for name in self.summed:
            if name in ("target", "source"):
                added.append(arith.addf(next(remaining), of_score))
                continue
            if name == "values":
                factors, read = self.spread(used, self.features), gradient
            else:
                of_product = arith.mulf(of_score, self.factor(rows, entry))
                factors, read = self.spread(of_product, self.size), self._multiplied(rows, entry, score, name)
            added += [vector.fma(f, r, next(remaining)) for f, r in zip(factors, read, strict=True)]
        return added

    def _multiplied(self, rows: Rows, entry: Entry, score: Score, name: str) -> list[ir.Value]:
        """Returns the factors that turn the gradient of the product into that of queries, keys or the direction."""
        if not self.directed:
            read: list[ir.Value] = self.read(rows, _OTHER[name], entry)
            return read
        values = score.joined if name == "direction" else entry.own["direction"]
        return [self.leaky(raw, value, self.inner_slope) for raw, value in zip(score.joined, values, strict=True)]

    def _store_entry(self, rows: Rows, entry: Entry, of_score: ir.Value, product: ir.Value | None) -> None:
        outputs = dict(zip(self.writes, rows.outputs, strict=True))
        if "edge" in outputs and ir.MemRefType(outputs["edge"].type).shape[1] == self.heads:
            self.store_heads(of_score, outputs["edge"], entry.number, rows.first_head)
        elif "edge" in outputs:
            self._add_heads(rows, of_score, outputs["edge"], entry)
        if "weight" in outputs:
            assert product is not None
            scale = splat_of(self.short, self.scale)
            self._add_heads(rows, arith.mulf(arith.mulf(of_score, product), scale), outputs["weight"], entry)

    def _add_heads(self, rows: Rows, value: ir.Value, buffer: ir.Value, entry: Entry) -> None:
        """Stores the sum over the group's heads in an entry's element of a column. From the second group on it adds the sum."""
        if self.width != self.group:
            kept = [lane if lane < self.group else self.width for lane in range(self.width)]
            value = vector.shuffle(value, zeros(self.short), kept)
        at = [entry.number, index(0)]
        again = arith.cmpi(arith.CmpIPredicate.ne, rows.first_head, index(0))
        before = arith.select(again, memref.load(buffer, at), arith.constant(self.element, 0.0))
        memref.store(vector.reduction(self.element, "add", value, acc=before), buffer, at)

    def _zeros(self, name: str) -> list[ir.Value]:
        if name in ("target", "source"):
            return [zeros(self.short)]
        elements = self.group * (self.features if name == "values" else self.size)
        return [zeros(self.vec)] * -(-elements // self.lanes)

    def _store(self, rows: Rows, row: ir.Value, sums: list[ir.Value]) -> None:
        remaining = iter(sums)
        for name, buffer in zip(self.writes, rows.outputs, strict=True):
            if name in ("target", "source"):
                self.store_heads(next(remaining), buffer, row, rows.first_head)
            elif name in self.summed:
                for place in self.places(rows.first_head, self.features if name == "values" else self.size):
                    self.store_vector(next(remaining), buffer, row, *place)
