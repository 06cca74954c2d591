"""lower-mapped-rows: entries of a matrix that a map tells are expanded from vectors of values, or compressed to them.

before   %d = "kernel.spread_mapped"(%positions, %map, %values) : (..., tensor<?x?xi16>, tensor<?xf32>) -> tensor<?x?xf32>
after    scf.parallel (%part) = ...                                  // rows of the part
           for each row r, for each 16 columns c of it
             bits = map[r, c / 16]
             d[r, c..] = expand(bits, values[p..])                   // past the caches, if the matrix does not fit them
             p += popcount(bits)

         kernel.put_mapped         stores the lanes that have a bit, and fetches lines to come
         kernel.collect_mapped     v[p..] = compress(bits, d[r, c..]), and counts nonzeros without a bit

Memory is read and written in its order, at the speed of a copy: with a load and a store for each entry, it takes up to twice as
long. For AVX-512: words of a map have a bit for each lane. Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, memref, scf, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, parallel, vector_of, zeros

_LINE = 64  # bytes of a vector, and of a line of a cache
_LARGE = 4 << 20  # bytes from which a matrix is written past the caches: what will read it is not near
_AHEAD = 8 << 10  # bytes: how far ahead lines are fetched

_Step = Callable[["_Lines"], list[ir.Value]]


@dataclass(frozen=True)
class LowerMappedRows:
    """Lower them to loops over rows and vectors."""

    def run(self, module: ir.Module) -> None:
        for name in ("spread", "collect", "put"):
            for op in walk(module, f"kernel.{name}_mapped"):
                with op.location:
                    _Mapped(op).lower(name)


@dataclass(frozen=True)
class _Lines:
    """A vector of a row: where it lies, the bits of its map, how many those are, and where its first value is."""

    row: ir.Value
    column: ir.Value
    bits: ir.Value
    mask: ir.Value
    count: ir.Value
    place: ir.Value
    carried: list[ir.Value]


class _Mapped:
    def __init__(self, op: ir.Operation) -> None:
        self.op, self.storage = op, storage_of(op)
        self.positions, self.map, last = (buffer_of(operand) for operand in op.operands)
        first, *self.others = self.storage.outputs
        self.dense, self.values = (first, last) if ir.MemRefType(last.type).rank == 1 else (last, first)
        element = ir.MemRefType(self.dense.type).element_type
        self.lanes = _LINE // byte_width(element)
        self.vec = vector_of(self.lanes, element)
        self.name = f"v{self.lanes}f{8 * byte_width(element)}"

    def lower(self, name: str) -> None:
        """Put loops in place of the op."""
        with ir.InsertionPoint(self.op):
            rows, columns = (memref.dim(self.dense, index(n)) for n in (0, 1))
            parts = parts_of(rows, columns, self.storage.threads)
            for each in self.others:
                parts = arith.minui(parts, memref.dim(each, index(0)))
            with parallel(parts) as part:
                rows_of_part = ends_of(rows, part, parts)
                if name == "collect":
                    (found,) = self._walk(rows_of_part, self._collect, [arith.constant(_count(), 0)])
                    memref.store(found, self.others[0], [part])
                elif name == "put":
                    self._walk(rows_of_part, self._put)
                else:
                    size = arith.muli(arith.muli(rows, columns), index(byte_width(self.vec.element_type)))
                    choice = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, size, index(_LARGE)), has_else=True)
                    for step, block in ((self._stream, choice.then_block), (self._spread, choice.else_block)):
                        with ir.InsertionPoint(block):
                            self._walk(rows_of_part, step)
                            scf.YieldOp([])
        self.storage.erase()

    def _walk(self, rows: tuple[ir.Value, ir.Value], step: _Step, carried: list[ir.Value] | None = None) -> list[ir.Value]:
        """A step for each vector of each row; what the last one carries on."""
        with loop(*rows, index(1), [load_index(self.positions, rows[0]), *(carried or [])]) as each_row:
            row, words = each_row.induction_variable, memref.dim(self.map, index(1))
            with loop(index(0), words, index(1), list(each_row.inner_iter_args)) as each:
                place, *more = each.inner_iter_args
                bits = memref.load(self.map, [row, each.induction_variable])
                count = arith.index_castui(ir.IndexType.get(), math.ctpop(bits))
                column = arith.muli(each.induction_variable, index(self.lanes))
                more = step(_Lines(row, column, bits, self._mask(bits), count, place, more))
                scf.YieldOp([arith.addi(place, count), *more])
            scf.YieldOp(each.results)
        return list(each_row.results)[1:]

    def _mask(self, bits: ir.Value) -> ir.Value:
        lanes = vector_of(self.lanes, ir.IntegerType.get_signless(1))
        return vector.bitcast(lanes, vector.broadcast(vector_of(1, bits.type), bits))

    def _expanded(self, line: _Lines) -> ir.Value:
        """A vector with the values in the lanes of their bits.

        They are loaded first: the form of the instruction that loads is a hundred times slower on AMD's Zen 4.
        """
        packed = vector.maskedload(self.vec, self.values, [line.place], mask_of(self.lanes, line.count), zeros(self.vec))
        name = f"llvm.x86.avx512.mask.expand.{self.name}"
        return llvm.call_intrinsic(self.vec, name, [packed, zeros(self.vec), line.mask], [], [])

    def _spread(self, line: _Lines) -> list[ir.Value]:
        vector.store(self._expanded(line), self.dense, [line.row, line.column])
        return []

    def _stream(self, line: _Lines) -> list[ir.Value]:
        vector.store(self._expanded(line), self.dense, [line.row, line.column], nontemporal=True, alignment=_LINE)
        return []

    def _put(self, line: _Lines) -> list[ir.Value]:
        self._fetch(line, to_write=True)
        vector.maskedstore(self.dense, [line.row, line.column], line.mask, self._expanded(line))
        return []

    def _collect(self, line: _Lines) -> list[ir.Value]:
        self._fetch(line, to_write=False)
        given = vector.load(self.vec, self.dense, [line.row, line.column])
        name = f"llvm.x86.avx512.mask.compress.{self.name}"
        packed = llvm.call_intrinsic(self.vec, name, [given, zeros(self.vec), line.mask], [], [])
        vector.maskedstore(self.values, [line.place], mask_of(self.lanes, line.count), packed)
        nonzero = arith.cmpf(arith.CmpFPredicate.UNE, given, zeros(self.vec))
        found = vector.extract(vector.bitcast(vector_of(1, line.bits.type), nonzero), [], [0])
        every = arith.constant(line.bits.type, -1)
        beside = math.ctpop(arith.andi(found, arith.xori(line.bits, every)))
        return [arith.addi(line.carried[0], arith.extui(_count(), beside))]

    def _fetch(self, line: _Lines, to_write: bool) -> None:
        """Starts to fetch a line to come; one past the end does no harm."""
        at = arith.addi(line.column, index(_AHEAD // byte_width(self.vec.element_type)))
        memref.prefetch(self.dense, [line.row, at], to_write, 3, True)


def _count() -> ir.Type:
    return ir.IntegerType.get_signless(64)
