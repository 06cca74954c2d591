"""lower-gpu-gather: lowers a `kernel.spmm` of the schedule "gpu-gather" to GPU kernels for a few tokens, SpMV for one.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-gather", tile = [4], ...} : ... tensor<3072x768xf32, #CSR>
after    gpu.func @region_t4(...)                      // and _t1
           stage:   copy x[4 tokens][K], transposed, to shared memory as [K][4]
           gpu.barrier
           each warp, for each of its 2 rows: scf.for %p step 128 iter_args(sums)
             each lane: vector.fma(values[p], staged x[coordinates[p]][0..3], sums) for 4 nonzeros, 32 apart
           add up the sums over the lanes; store the totals through the epilogue into y

Each lane has its own nonzeros. So lanes read neighbouring values and coordinates, and nothing else has to come from memory.
At a row's end, lanes without a nonzero add nothing. Tokens past the last one repeat it, and are not stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, memref, scf, vector

from gossamer.dialects.elements import WEIGHTS
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix, entries_read
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import MOST_SHARED, WARP, below, load, shared, store, total
from gossamer.passes.loops.product import products
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, multiplied, vector_of, widened, zeros

_TOKENS = (4, 1)
_WARPS = 16
_ROWS = 2  # rows of a warp
_TOGETHER = 4  # nonzeros of a lane whose loads are in flight at once
_FEW = 16  # most tokens for which this schedule may be the fastest


def _storage(matrix: Matrix) -> Format | None:
    """Returns CSR (CSC if the matrix is stored transposed) with the narrowest coordinates that fit the columns.

    Returns None for f64, and if one token of x does not fit shared memory.
    """
    if matrix.element == "f64" or matrix.columns * WEIGHTS[matrix.element].bytes > MOST_SHARED:
        return None
    rows = Format.CSR if matrix.reduction == 1 else Format.CSC
    return rows.with_widths(32, 16 if matrix.columns <= 1 << 16 else 32)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (_TOKENS[0],) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles in which a multiprocessor loads values and coordinates, at its share of memory, 15 bytes a cycle."""
    return -(-tokens // _TOKENS[0]) * matrix.nonzeros * (WEIGHTS[matrix.element].bytes + 2) / 15


GPU_GATHER = Family("gpu-gather", _storage, _tile, _cycles, most=_FEW, integers=True, read=entries_read)


@dataclass(frozen=True)
class LowerGpuGather:
    """Lowers products with few tokens to gpu, scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_GATHER.name):
            with op.location:
                spmv = _Spmv(op)
                for tokens in _TOKENS:
                    launch = spmv.launch(tokens)
                    if launch.shared <= MOST_SHARED:
                        spmv.kernel(f"t{tokens}", launch, partial(_emit, spmv, tokens))
                spmv.erase()


class _Spmv(GpuProduct):
    """A kernel.spmm of a few tokens."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        if integers(op.tile) != [_TOKENS[0]]:
            raise CompileError(f"tile {integers(op.tile)} is not [{_TOKENS[0]}]")

    def launch(self, tokens: int) -> Launch:
        """Returns the launch for so many tokens a block."""
        blocks = -(-self.M // (_WARPS * _ROWS))
        return Launch(tokens, blocks, _WARPS * WARP, self.K * tokens * byte_width(self.element))


def _emit(spmv: _Spmv, tokens: int, operands: Operands) -> None:
    _Kernel(spmv, tokens, operands).emit()


class _Kernel:
    """Emits the body of the kernel for `count` tokens a block."""

    def __init__(self, spmv: _Spmv, count: int, operands: Operands) -> None:
        self.spmv, self.count, self.operands = spmv, count, operands
        self.positions, self.coordinates, self.values = operands.weight
        self.read = vector_of(count, spmv.element)
        self.sums = vector_of(count, spmv.sum_type)
        self.staged = shared(0, [spmv.K * count], spmv.element)
        first = arith.muli(operands.chunk, index(_WARPS * _ROWS))
        self.row = arith.addi(first, arith.muli(operands.warp, index(_ROWS)))

    def emit(self) -> None:
        self._stage()
        gpu.barrier()
        totals = []
        for r in range(_ROWS):
            sums = self._row(arith.addi(self.row, index(r)))
            totals += [total(vector.extract(sums, [], [t])) for t in range(self.count)]
        self._store(totals)

    def _stage(self) -> None:
        """Copies x transposed: staged[k][t] = x[first + t][k]. Neighbouring threads copy neighbouring columns."""
        operands = self.operands
        tokens = [arith.minui(arith.addi(operands.first, index(t)), operands.last) for t in range(self.count)]
        with loop(operands.thread, index(self.spmv.K), index(_WARPS * WARP)) as columns:
            k = columns.induction_variable
            elements = [memref.load(operands.x, [token, k]) for token in tokens]
            store(vector.from_elements(self.read, elements), self.staged, [arith.muli(k, index(self.count))])

    def _row(self, row: ir.Value) -> ir.Value:
        """Returns this lane's part of the sums of a row; zeros for a row past the last."""
        begin, end = (load_index(self.positions, arith.minui(arith.addi(row, index(i)), index(self.spmv.M))) for i in range(2))
        step = index(WARP * _TOGETHER)
        whole = arith.subi(end, arith.remui(arith.subi(end, begin), step))
        with loop(begin, whole, step, [zeros(self.sums)]) as several:
            at = [arith.addi(several.induction_variable, index(i * WARP)) for i in range(_TOGETHER)]
            scf.YieldOp([self._multiply_add([arith.addi(p, self.operands.lane) for p in at], several.inner_iter_args[0])])
        with loop(whole, end, index(WARP), [several.results[0]]) as rest:
            p = arith.addi(rest.induction_variable, self.operands.lane)
            exists = arith.cmpi(arith.CmpIPredicate.ult, p, end)
            safe = arith.minui(p, arith.subi(end, index(1)))
            scf.YieldOp([self._multiply_add([safe], rest.inner_iter_args[0], exists)])
        return rest.results[0]

    def _multiply_add(self, places: list[ir.Value], sums: ir.Value, exists: ir.Value | None = None) -> ir.Value:
        """Returns the sums plus values[p] x[coordinates[p]] for some p, or only the sums where `exists` is false."""
        factors = []
        for p in places:
            at = arith.muli(load_index(self.coordinates, p), index(self.count))
            factors.append((widened(memref.load(self.values, [p]), self.spmv.sum_type), load(self.read, self.staged, [at])))
        for value, x in factors:
            added = multiplied(vector.broadcast(self.sums, value), widened(x, self.sums), sums)
            sums = added if exists is None else arith.select(exists, added, sums)
        return sums

    def _store(self, totals: list[ir.Value]) -> None:
        """Stores the totals. Lane r x tokens + t stores the result of row r and token t."""
        operands, mine = self.operands, totals[0]
        for lane, result in enumerate(totals[1:], 1):
            is_it = arith.cmpi(arith.CmpIPredicate.eq, operands.lane, index(lane))
            mine = arith.select(is_it, result, mine)
        row = arith.addi(self.row, arith.divui(operands.lane, index(self.count)))
        token = arith.addi(operands.first, arith.remui(operands.lane, index(self.count)))
        inside = arith.andi(below(row, index(self.spmv.M)), below(token, operands.tokens))
        stored = scf.IfOp(arith.andi(inside, below(operands.lane, index(len(totals)))))
        with ir.InsertionPoint(stored.then_block):
            operands.store(self.spmv.epilogue, vector.broadcast(vector_of(1, self.spmv.sum_type), mine), token, row)
            scf.YieldOp([])
