"""lower-gpu-deltas: lowers a `kernel.spmm` of the schedule "gpu-deltas" to GPU kernels for one to eight tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-deltas", tile = [8], ...}
             : (tensor<?x4096xf16>, tensor<4096x4096xf16, "deltas(reduction=1, bits=4)">) -> tensor<?x4096xf16>
after    gpu.func @region_t8(...)                      // and _t4, _t2, _t1
           stage:   copy x[8 tokens][K], transposed, to shared memory as [K][8]; add a column of zeros at its end
           gpu.barrier
           each warp: scf.for over its steps, while the arrays of the next step are being loaded
             each lane, for each of 16 entries:
               nvvm.dot.accumulate.4way: address of the column of x = address of the entry before + distance
               vector.fma(value, staged x at the address, sums); a stored zero is multiplied by the column of zeros
           add up the warps' sums in shared memory; store them through the epilogue into y

The weight, of 16-bit elements, is loaded from memory once: 2.5 bytes a nonzero, and neighbouring 16 bytes in each lane. One
instruction adds up to four distances, times the bytes of a column, to an address. All lanes take the same number of steps, so
none waits for another. An infinity in x reaches only the results that depend on it.
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, nvvm, scf, vector

from gossamer.dialects.elements import WEIGHTS
from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import Deltas
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing, parse_packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import MOST_SHARED, WARP, below, divmod_by, load, shared, store, total, when, widest
from gossamer.passes.loops.product import products
from gossamer.passes.loops.vectors import added, byte_width, index, load_index, loop, multiplied, vector_of, widened, zeros

_TOKENS = (8, 4, 2, 1)
_HALF = Deltas.ENTRIES // 2  # entries whose values a lane loads at once
_QUAD = 4  # distances in a word
_STAGED = 8  # elements of x that a thread stores at once
_SUMS = 4 * Deltas.WARPS * Deltas.ROWS  # bytes of the warps' sums for a token


def _storage(matrix: Matrix) -> Deltas | None:
    fits = matrix.element in ("bf16", "f16") and _shared(matrix.columns, 1) <= MOST_SHARED
    return min((Deltas(matrix.reduction, bits) for bits in (4, 8)), key=partial(_bytes, matrix)) if fits else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (_TOKENS[0],) if isinstance(stored, Deltas) and stored.reduction == matrix.reduction else None


def _shared(columns: int, tokens: int) -> int:
    return -(-2 * (columns + 1) * tokens // 16) * 16 + _SUMS * tokens


def _entries(matrix: Matrix, stored: Deltas) -> float:
    """Returns the expected number of entries of a random pattern: its nonzeros, and stored zeros that divide long distances."""
    return matrix.nonzeros / max(1 - (1 - matrix.density) ** stored.longest, 1e-3)


def _bytes(matrix: Matrix, stored: Deltas) -> float:
    return _entries(matrix, stored) * (WEIGHTS[matrix.element].bytes + stored.bits / 8)


def _read(matrix: Matrix) -> float:
    stored = _storage(matrix)
    assert stored is not None
    return _bytes(matrix, stored)


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor for its instructions, 2.5 a cycle.

    Each pass over the weight, for up to 8 tokens, takes seven instructions for 32 entries, and two more for each token.
    """
    stored, able = _storage(matrix), [count for count in _TOKENS if _shared(matrix.columns, count) <= MOST_SHARED]
    assert stored is not None
    count = min((each for each in able if each >= tokens), default=able[0])
    return -(-tokens // count) * _entries(matrix, stored) / 32 * (7 + 2 * count) / 2.5


GPU_DELTAS = Family("gpu-deltas", _storage, _tile, _cycles, most=_TOKENS[0], read=_read)


@dataclass(frozen=True)
class LowerGpuDeltas:
    """Lowers products with few tokens to gpu, scf, nvvm and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_DELTAS.name):
            with op.location:
                spmv = GpuProduct(op, [_TOKENS[0]])
                launches = {tokens: _launch(spmv, tokens) for tokens in _TOKENS}
                fitting = {tokens: launch for tokens, launch in launches.items() if launch.shared <= MOST_SHARED}
                spmv.kernels(fitting, partial(_emit, spmv))


def _launch(spmv: GpuProduct, tokens: int) -> Launch:
    return Launch(tokens, -(-spmv.M // Deltas.ROWS), Deltas.WARPS * WARP, _shared(spmv.K, tokens))


def _emit(spmv: GpuProduct, operands: Operands) -> None:
    _Kernel(spmv, operands).emit()


class _Kernel:
    """Emits the body of one kernel. A thread block computes one slice of rows, the operands' chunk."""

    def __init__(self, spmv: GpuProduct, operands: Operands) -> None:
        self.spmv, self.operands, self.count = spmv, operands, operands.launch.tokens
        self.rows, self.positions, self.starts, self.deltas, self.values = operands.weight
        self.i32 = ir.IntegerType.get_signless(32)
        self.column = self.count * byte_width(spmv.element)  # bytes of a column of x
        staged = (spmv.K + 1) * self.count
        self.staged = shared(0, [staged], spmv.element)
        self.bytes = shared(0, [staged * byte_width(spmv.element)], ir.IntegerType.get_signless(8))
        self.sums = vector_of(self.count, spmv.sum_type)
        sums_at = _shared(spmv.K, self.count) - _SUMS * self.count
        self.parts = shared(sums_at, [Deltas.WARPS, Deltas.ROWS * self.count], spmv.sum_type)
        stored = parse_packing(str(ir.RankedTensorType(spmv.op.w.type).encoding))
        assert isinstance(stored, Deltas)
        self.bits = stored.bits

    def emit(self) -> None:
        """Emits the whole body."""
        operands = self.operands
        begin, end = (load_index(self.positions, arith.addi(operands.chunk, index(i))) for i in range(2))
        shares = [arith.muli(arith.addi(operands.warp, index(i)), arith.subi(end, begin)) for i in range(2)]
        first, last = (arith.addi(begin, arith.divui(share, index(Deltas.WARPS))) for share in shares)
        started = arith.addi(arith.muli(operands.chunk, index(Deltas.WARPS)), operands.warp)
        column = load_index(self.starts, arith.addi(arith.muli(started, index(WARP)), operands.lane))
        at = arith.index_castui(self.i32, arith.muli(column, index(self.column)))
        final = arith.subi(end, index(1))
        loaded = self._load(arith.minui(first, final))
        self._stage()
        gpu.barrier()
        with loop(first, last, index(1), [at, zeros(self.sums), *loaded]) as steps:
            at, sums, words, *values = steps.inner_iter_args
            following = self._load(arith.minui(arith.addi(steps.induction_variable, index(1)), final))
            at, sums = self._step(at, sums, words, values)
            scf.YieldOp([at, sums, *following])
        self._store(steps.results[1])

    def _load(self, step: ir.Value) -> list[ir.Value]:
        """Loads this lane's distances and values of a step."""
        count = Deltas.ENTRIES * self.bits // 32
        lane = arith.addi(arith.muli(step, index(WARP)), self.operands.lane)
        found = [load(vector_of(count, self.i32), self.deltas, [arith.muli(lane, index(count))])]
        for half in range(2):
            line = arith.addi(arith.muli(step, index(2 * WARP)), arith.addi(self.operands.lane, index(half * WARP)))
            found.append(load(vector_of(_HALF, self.spmv.element), self.values, [arith.muli(line, index(_HALF))]))
        return found

    def _stage(self) -> None:
        """Copies x transposed: staged[k][t] = x[first + t][k], with a column of zeros at the end.

        A thread copies several neighbouring columns at once, so that it stores up to 16 bytes.
        """
        operands, spmv = self.operands, self.spmv
        width = widest(spmv.K, spmv.element, _STAGED // self.count)
        tokens = [arith.minui(arith.addi(operands.first, index(t)), operands.last) for t in range(self.count)]
        first = arith.muli(operands.thread, index(width))
        with loop(first, index(spmv.K), index(operands.launch.threads * width)) as columns:
            k = columns.induction_variable
            pieces = [load(vector_of(width, spmv.element), operands.x, [token, k]) for token in tokens]
            elements = [vector.extract(piece, [], [i]) for i in range(width) for piece in pieces]
            together = vector.from_elements(vector_of(width * self.count, spmv.element), elements)
            store(together, self.staged, [arith.muli(k, index(self.count))])
        with when(below(operands.thread, index(1))):
            store(zeros(vector_of(self.count, spmv.element)), self.staged, [index(spmv.K * self.count)])

    def _step(self, at: ir.Value, sums: ir.Value, words: ir.Value, values: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Returns the place in x and the sums after the 16 entries of a step."""
        for number, word in enumerate(self._quads(words)):
            quad = vector.bitcast(vector_of(_QUAD, ir.IntegerType.get_signless(8)), word)
            places = [self._moved(at, quad, entry + 1) for entry in range(_QUAD)]
            for entry, place in enumerate(places, _QUAD * number):
                half, within = divmod(entry, _HALF)
                value = widened(vector.extract(values[half], [], [within]), self.spmv.sum_type)
                sums = multiplied(vector.broadcast(self.sums, value), self._x(value, place), sums)
            at = places[-1]
        return at, sums

    def _quads(self, words: ir.Value) -> list[ir.Value]:
        """Returns the distances in their order, four in each vector<1 x i32>, one in each byte."""
        one, count = vector_of(1, self.i32), ir.VectorType(words.type).shape[0]
        found = [vector.extract(words, [], [i]) for i in range(count)]
        if self.bits == 4:
            low, four = (arith.constant(self.i32, number) for number in (0x0F0F0F0F, 4))
            found = [arith.andi(half, low) for word in found for half in (word, arith.shrui(word, four))]
        return [vector.broadcast(one, word) for word in found]

    def _moved(self, at: ir.Value, quad: ir.Value, count: int) -> ir.Value:
        """Returns the place of a column of x: `at` plus the first `count` distances of a quad, times the bytes of a column."""
        type_, bytes_ = ir.VectorType(quad.type), [self.column if i < count else 0 for i in range(_QUAD)]
        i8 = type_.element_type
        factors = arith.constant(type_, ir.DenseElementsAttr.get([ir.IntegerAttr.get(i8, each) for each in bytes_], type_))
        unsigned = ir.Attribute.parse("#nvvm.dot_accumulate_type<unsigned>")
        return nvvm.dot_accumulate_4way(quad, unsigned, factors, unsigned, at)

    def _x(self, value: ir.Value, place: ir.Value) -> ir.Value:
        """Loads the tokens' elements of the column at a place; zeros if the weight's value is a stored zero."""
        zero = arith.constant(value.type, 0.0)
        is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, value, zero)
        place = arith.select(is_zero, arith.constant(self.i32, self.spmv.K * self.column), place)
        read = vector_of(self.column, ir.IntegerType.get_signless(8))
        found = load(read, self.bytes, [arith.index_castui(ir.IndexType.get(), place)])
        return widened(vector.bitcast(vector_of(self.count, self.spmv.element), found), self.sums)

    def _store(self, sums: ir.Value) -> None:
        """Adds up the sums of a row's two lanes and of all warps. Each thread stores one row for one token."""
        operands, elements = self.operands, [vector.extract(sums, [], [t]) for t in range(self.count)]
        both = vector.from_elements(self.sums, [total(each, Deltas.PARTS) for each in elements])
        line, part = divmod_by(operands.lane, Deltas.PARTS)
        with when(below(part, index(1))):
            store(both, self.parts, [operands.warp, arith.muli(line, index(self.count))])
        gpu.barrier()
        with when(below(operands.thread, index(Deltas.ROWS * self.count))):
            line, t = divmod_by(operands.thread, self.count)
            row = load_index(self.rows, arith.addi(arith.muli(operands.chunk, index(Deltas.ROWS)), line))
            token, one = arith.addi(operands.first, t), vector_of(1, self.spmv.sum_type)
            with when(arith.andi(below(row, index(self.spmv.M)), below(token, operands.tokens))):
                result = zeros(one)
                for warp in range(Deltas.WARPS):
                    result = added(result, load(one, self.parts, [index(warp), operands.thread]))
                operands.store(self.spmv.epilogue, result, token, row)
