"""lower-slices: lowers a `kernel.gather_slices` to loops over slices of rows, one row in each lane, in parts of equal work.

before   %y = "kernel.gather_slices"(%a, %x) : (tensor<?x?xf32, "slices(reduction=1, lanes=16, width=16)">, ...) -> ...
after    scf.parallel (%part) = ...
           hash the part's share of `original`                   // the sum over all parts goes into `hash`
           for each slice, scf.for %step iter_args(16 sums)      // the steps that all of its rows have
             %read = starts[step] >= 0 ? vector.load x[starts[step]]
                   : starts[step] < -1 ? the elements coordinates[step, lane] of 2 vectors from x[-2 - starts[step]] on
                   : 16 scalar loads, or a vector.gather, of x[base + coordinates[step, lane]]
             sums = vector.fma(values[step], %read, sums)
           scf.for %step iter_args(16 sums)                      // the steps that only some have
             sums = step < lengths ? vector.fma(...) : sums
           the sums into y, by one store if the rows are consecutive

Elements are gathered by scalar loads, unless the op says that the target `gathers`. On AMD's Zen, and on Intel processors that
guard gathers against data sampling, the gather instruction takes twice as long; on Emerald Rapids it takes two thirds of the
time. Most instructions are loads, so scalar loads read their coordinates 64 bits at a time, four of 16 bits. If columns are
consecutive, as those of stencils are, neither coordinates nor gathers are needed. If they are near each other (corners of
stencils, several unknowns for each node), vectors of 512 bits select them from two loads.

The hash is NH (Black et al., UMAC, 1999): the sum of (low word + key) * (high word + key) modulo 2^64. It does not depend on
how values are divided among threads. It shows the caller whether somebody has written to the values since they were packed.
Keys depend on the place: a random number for each line of 16 words (SplitMix64 of Steele et al., 2014, of its place) times one
for each pair in it. If keys grew evenly, two opposite swaps of values would cancel. Runs on functions whose storage is exposed
with the arrays of open operands (expose-storage{arrays=true}).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, memref, scf, vector

from gossamer.dialects.packing import Slices
from gossamer.passes.loops.buffers import Storage, buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of, rows_of
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, parallel, reserve_workspace, vector_of, zeros

_HASHED = 16  # words that are hashed at a time
_MIX = (0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 32)  # SplitMix64: factors, then shifts
_BY_PAIR = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)  # SHA-256's
_PICK = {  # instructions that select lanes of two vectors
    ("f32", 16): "llvm.x86.avx512.vpermi2var.ps.512",
    ("f64", 8): "llvm.x86.avx512.vpermi2var.pd.512",
}
_STEP = 8  # a step takes about as long as so many vectors of multiply-adds


@dataclass(frozen=True)
class LowerSlices:
    """Lower every kernel.gather_slices."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.gather_slices"):
            with op.location:
                _Slices(module, op.opview).lower()


class _Slices:
    """y[rows[s, lane]] = sum of values[step, lane] * x[coordinates[step, lane]] over the steps of slice s."""

    def __init__(self, module: ir.Module, op: Any) -> None:
        self.module, self.op = module, op
        self.storage: Storage = storage_of(op.operation)
        packing = storage_of_type(ir.RankedTensorType(op.a.type))
        assert isinstance(packing, Slices)
        self.lanes, self.width = packing.lanes, packing.width
        self.positions, self.common, self.origins, self.bases, *buffers = sparse_buffers_of(op.a)
        self.rows, self.lengths, self.starts, self.coordinates, self.original, self.hash, self.values = buffers
        self.x = buffer_of(op.x)
        self.word, self.long = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        element = ir.MemRefType(self.storage.output.type).element_type
        self.vec, self.gathers = vector_of(self.lanes, element), ir.IntegerAttr(op.gathers).value
        self.pick = _PICK.get((str(element), self.lanes))

    def lower(self) -> None:
        reserve_workspace(self.module, self.long.width // 8)
        with ir.InsertionPoint(self.op):
            slices, steps = (memref.dim(buffer, index(0)) for buffer in (self.origins, self.starts))
            parts = parts_of(steps, index(_STEP), self.storage.threads)
            line = ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], self.long)
            hashes = memref.view(line, self.storage.workspace, index(0), [parts])
            with parallel(parts) as part:
                memref.store(self._hashed(part, parts), hashes, [part])
                low, high = rows_of(self.positions, slices, steps, part, parts)
                with loop(low, high, index(1)) as each:
                    self._slice(each.induction_variable)
            zero = arith.constant(self.long, 0)
            with loop(index(0), parts, index(1), [zero]) as total:
                scf.YieldOp([arith.addi(total.inner_iter_args[0], memref.load(hashes, [total.induction_variable]))])
            pair = vector.bitcast(vector_of(2, self.word), vector.broadcast(vector_of(1, self.long), total.results[0]))
            vector.store(pair, self.hash, [index(0)])
        self.storage.erase()

    def _hashed(self, part: ir.Value, parts: ir.Value) -> ir.Value:
        """Returns the hash of a part of the original values."""
        words, each = memref.dim(self.original, index(0)), index(_HASHED)
        groups = arith.ceildivui(words, each)
        low, high = (arith.muli(end, each) for end in ends_of(groups, part, parts))
        whole = arith.subi(words, arith.remui(words, each))
        pairs, line = vector_of(_HASHED // 2, self.long), vector_of(_HASHED, self.word)
        total = _constant(pairs, [0] * (_HASHED // 2))
        for begin, end, last in ((low, arith.minui(high, whole), False), (arith.maxui(low, whole), high, True)):
            with loop(begin, end, each, [total]) as steps:
                at, (before,) = steps.induction_variable, steps.inner_iter_args
                if last:
                    none = arith.constant(line, ir.DenseElementsAttr.get_splat(line, ir.IntegerAttr.get(self.word, 0)))
                    mask = mask_of(_HASHED, arith.subi(words, at))
                    read = vector.maskedload(line, self.original, [at], mask, none)
                else:
                    read = vector.load(line, self.original, [at])
                mixed = arith.addi(vector.bitcast(pairs, read), self._keys(pairs, at))
                lower = arith.andi(mixed, _constant(pairs, [(1 << 32) - 1] * (_HASHED // 2)))
                upper = arith.shrui(mixed, _constant(pairs, [32] * (_HASHED // 2)))
                scf.YieldOp([arith.addi(before, arith.muli(lower, upper))])
            total = steps.results[0]
        return vector.reduction(self.long, vector.CombiningKind.ADD, total)

    def _keys(self, pairs: ir.VectorType, at: ir.Value) -> ir.Value:
        """Returns the keys of the line that begins at this word."""
        number = arith.index_cast(self.long, arith.addi(at, index(1)))  # plus 1, because SplitMix64 maps 0 to 0
        for factor, shift in _MIX:
            number = arith.muli(number, arith.constant(self.long, _signed(factor)))
            high = arith.shrui(number, arith.constant(self.long, shift))
            number = high if shift == 32 else arith.xori(number, high)
        return arith.muli(vector.broadcast(pairs, number), _constant(pairs, list(_BY_PAIR)))

    def _slice(self, number: ir.Value) -> None:
        """Computes the rows of one slice."""
        begin, end = (load_index(self.positions, at) for at in (number, arith.addi(number, index(1))))
        shared = arith.addi(begin, load_index(self.common, number))
        x = self._from(load_index(self.bases, number))
        lane = arith.muli(number, index(self.lanes))
        with loop(begin, shared, index(1), [zeros(self.vec)]) as steps:
            scf.YieldOp([self._more(steps.induction_variable, x, steps.inner_iter_args[0])])
        with loop(shared, end, index(1), steps.results) as rest:
            step, (sums,) = rest.induction_variable, rest.inner_iter_args
            done = arith.index_cast(self.word, arith.subi(step, begin))
            lengths = vector.load(vector_of(self.lanes, self.word), self.lengths, [lane])
            mask = arith.cmpi(arith.CmpIPredicate.sgt, lengths, vector.broadcast(lengths.type, done))
            scf.YieldOp([arith.select(mask, self._more(step, x, sums), sums)])
        self._store(rest.results[0], number, lane)

    def _from(self, base: ir.Value) -> ir.Value:
        """Returns a view of x from a column on."""
        dynamic, type_ = ir.ShapedType.get_dynamic_size(), ir.MemRefType(self.x.type)
        memory = ir.MemRefType.get([dynamic], type_.element_type, ir.StridedLayoutAttr.get(dynamic, [1]))
        left = arith.subi(memref.dim(self.x, index(0)), base)
        return memref.reinterpret_cast(memory, self.x, [base], [left], [], [dynamic], [dynamic], [1])

    def _more(self, step: ir.Value, x: ir.Value, sums: ir.Value) -> ir.Value:
        """Returns the sums plus the products of a step. Its coordinates count from the begin of the view `x`."""
        place = arith.muli(step, index(self.lanes))
        start = memref.load(self.starts, [step])
        choice = scf.IfOp(_non_negative(start), [self.vec], has_else=True)
        with ir.InsertionPoint(choice.then_block):
            scf.YieldOp([vector.load(self.vec, self.x, [arith.index_castui(ir.IndexType.get(), start)])])
        with ir.InsertionPoint(choice.else_block):
            scf.YieldOp([self._picked_or_gathered(start, place, x) if self.pick else self._gathered(place, x)])
        return math.fma(vector.load(self.vec, self.values, [place]), choice.results[0], sums)

    def _picked_or_gathered(self, start: ir.Value, place: ir.Value, x: ir.Value) -> ir.Value:
        """Returns the elements of a step whose columns are not consecutive."""
        near = arith.cmpi(arith.CmpIPredicate.slt, start, arith.constant(start.type, -1))
        choice = scf.IfOp(near, [self.vec], has_else=True)
        with ir.InsertionPoint(choice.then_block):
            begin = arith.index_castui(ir.IndexType.get(), arith.subi(arith.constant(start.type, -2), start))
            halves = [vector.load(self.vec, self.x, [arith.addi(begin, index(at))]) for at in (0, self.lanes)]
            places = self._wide_coordinates(place, 512 // self.lanes)
            picked = llvm.call_intrinsic(self.vec, self.pick, [halves[0], places, halves[1]], [], [])
            scf.YieldOp([picked])
        with ir.InsertionPoint(choice.else_block):
            scf.YieldOp([self._gathered(place, x)])
        return choice.results[0]

    def _gathered(self, place: ir.Value, x: ir.Value) -> ir.Value:
        """Returns the elements of a step with any columns."""
        if not self.gathers:
            return vector.from_elements(self.vec, [memref.load(x, [column]) for column in self._columns(place)])
        everywhere = mask_of(self.lanes, index(self.lanes))
        return vector.gather(self.vec, x, [index(0)], self._wide_coordinates(place, 32), everywhere, zeros(self.vec))

    def _wide_coordinates(self, place: ir.Value, bits: int) -> ir.Value:
        """Returns the coordinates of a step as a vector of integers of `bits` bits."""
        narrow, wide = (vector_of(self.lanes, ir.IntegerType.get_signless(each)) for each in (self.width, bits))
        line = vector.load(narrow, self.coordinates, [place])
        return line if narrow == wide else arith.extui(wide, line)

    def _columns(self, place: ir.Value) -> list[ir.Value]:
        """Returns the coordinates of a step as scalars."""
        at_once = min(self.lanes, self.long.width // self.width)
        narrow, wide = (ir.IntegerType.get_signless(self.width * each) for each in (1, at_once))
        mask, found = arith.constant(wide, (1 << self.width) - 1), []
        for lane in range(0, self.lanes, at_once):
            line = vector.load(vector_of(at_once, narrow), self.coordinates, [arith.addi(place, index(lane))])
            word = vector.extract(vector.bitcast(vector_of(1, wide), line), [], [0])
            shifted = (arith.shrui(word, arith.constant(wide, self.width * each)) for each in range(at_once))
            found += [arith.index_castui(ir.IndexType.get(), arith.andi(column, mask)) for column in shifted]
        return found

    def _store(self, sums: ir.Value, number: ir.Value, lane: ir.Value) -> None:
        origin = memref.load(self.origins, [number])
        choice = scf.IfOp(_non_negative(origin), has_else=True)
        with ir.InsertionPoint(choice.then_block):
            vector.store(sums, self.storage.output, [arith.index_castui(ir.IndexType.get(), origin)])
            scf.YieldOp([])
        with ir.InsertionPoint(choice.else_block):
            for number in reversed(range(self.lanes)):  # the first row last: padding repeats it, with other sums
                row = load_index(self.rows, arith.addi(lane, index(number)))
                memref.store(vector.extract(sums, [], [number]), self.storage.output, [row])
            scf.YieldOp([])


def _non_negative(value: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.sge, value, arith.constant(value.type, 0))


def _signed(number: int) -> int:
    """Returns the signed integer of 64 bits with these bits."""
    return number - (1 << 64) if number >> 63 else number


def _constant(type_: ir.VectorType, numbers: list[int]) -> ir.Value:
    elements = [ir.IntegerAttr.get(type_.element_type, _signed(number)) for number in numbers]
    return arith.constant(type_, ir.DenseElementsAttr.get(elements, type_))
