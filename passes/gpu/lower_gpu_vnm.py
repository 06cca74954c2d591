"""lower-gpu-vnm: lowers a `kernel.spmm` of the schedule "gpu-vnm" to GPU kernels on sparse tensor cores, with selected columns.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-vnm", tile = [128, 128, 64], ...}
             : (..., tensor<3072x768xbf16, "vnm(reduction=1, rows=128, group=16)">) -> ...
after    gpu.func @region_t128(...)                    // and _t64
           // a thread block computes 128 features x 128 tokens
           scf.for %panel ... iter_args(4 x 4 x 4 sums)     // 16 groups of columns of K, 4 selected columns in each
             start to copy the next panel's values and metadata
             twice, for half of a panel's x (once, for groups of 8):
               load x[128 tokens][128 columns] of the next panel into registers
               each warp: nvgpu.ldmatrix and nvvm.mma.sp.sync on 64 features x 32 tokens of this panel
               store the selected ones of the loaded columns, transposed, to shared memory as [64 columns][tokens]
             wait for the panel's copy, gpu.barrier
           the sums through the epilogue into y

V:N:M is VENOM's (Castro et al., SC 2023): with groups of M columns, tensor cores do 4 / M of the dense work, at twice its rate.
In VENOM, x is stored by columns, and selected columns are copied as they are. Here x is stored by tokens, so the columns are
selected in registers. They are transposed and swizzled in shared memory, where they are read without bank conflicts. Columns of
x beyond K are zeros. Tokens past the last one repeat it, and are not stored. Stored zeros of the weight are multiplied. The
element must be bf16 or f16, and K a multiple of 8.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import Vnm
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix, entries_read
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.gpu.two_four_loop import PANEL, ROWS, SLOT_BYTES, STEPS, WARP_TOKENS, TwoFourRows, threads
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.gpu_threads import WARP, below, divmod_by, load, shared, store, when
from gossamer.passes.loops.product import products
from gossamer.passes.loops.tensor_core import CHUNK, commit, load_matrices, wait
from gossamer.passes.loops.vectors import index, loop, vector_of, zeros

_TOKENS = (128, 64)
_SLOTS = 2  # panels in shared memory: one that is multiplied, one that is being copied
_PART = 128  # columns of x that are in registers at once
_GROUPS = (8, 16)  # columns of K in a group, M of V:N:M
_TILE = [_TOKENS[0], ROWS, PANEL]


def _storage(matrix: Matrix) -> Vnm | None:
    if matrix.vnm is None or matrix.element not in ("bf16", "f16") or matrix.columns % CHUNK:
        return None
    v, n, m = matrix.vnm
    rows = next((rows for rows in (128, 64) if v % rows == 0), None)
    return Vnm(matrix.reduction, rows, m) if rows and n <= 2 and m in _GROUPS else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight, selected columns]."""
    return tuple(_TILE) if isinstance(stored, Vnm) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor, the sum of two.

    Its tensor cores run at half of their 2048 products a cycle. Its shared memory takes a selected column of 64 tokens a cycle.
    """
    left = matrix.columns * 4 / (matrix.vnm[2] if matrix.vnm else 4)
    tiles = -(-tokens // _TOKENS[0]) * -(-matrix.rows // ROWS)
    return tiles * left * (_TOKENS[0] * ROWS / 1024 + _TOKENS[0] / 64)


GPU_VNM = Family("gpu-vnm", _storage, _tile, _cycles, read=entries_read)


@dataclass(frozen=True)
class LowerGpuVnm:
    """Lowers products of V:N:M weights to gpu, nvgpu and nvvm."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_VNM.name):
            with op.location:
                spmm, packing = GpuProduct(op, _TILE), storage_of_type(ir.RankedTensorType(op.w.type))
                assert isinstance(packing, Vnm)
                spmm.kernels({n: _launch(spmm, packing, n) for n in _TOKENS}, partial(_emit, spmm, packing))


def _launch(spmm: GpuProduct, packing: Vnm, tokens: int) -> Launch:
    x_bytes = ROWS // packing.rows * PANEL * tokens * 2
    return Launch(tokens, -(-spmm.M // ROWS), threads(tokens), _SLOTS * (x_bytes + SLOT_BYTES))


def _emit(spmm: GpuProduct, packing: Vnm, operands: Operands) -> None:
    _Kernel(spmm, packing, operands).emit()


class _Unit(NamedTuple):
    """Eight columns of x for two tokens, in registers.

    row     the row of shared memory at which the columns' group begins
    pair    the first of the two tokens
    x       a vector of 8 columns for each token
    places  for each strip, the places of the 8 columns among the 4 of their group; 255 for a column that is not selected
    """

    row: ir.Value
    pair: ir.Value
    x: list[ir.Value]
    places: list[ir.Value]


class _Kernel:
    """Emits the body of one kernel. A thread block computes the 128 rows of the operands' chunk, one strip or two."""

    def __init__(self, spmm: GpuProduct, packing: Vnm, operands: Operands) -> None:
        self.spmm, self.operands, self.group = spmm, operands, packing.group
        self.places, *_ = operands.weight
        self.tokens, self.strips = operands.launch.tokens, ROWS // packing.rows
        self.depth = packing.group * packing.GROUPS  # columns of K of a panel, with those that are not selected
        self.parts = self.depth // _PART
        self.units = _PART // CHUNK * self.tokens // 2 // operands.launch.threads  # units of a thread in a part
        self.panels = -(-spmm.K // self.depth)
        self.x = shared(0, [_SLOTS, self.strips, PANEL, self.tokens], spmm.element)
        x_bytes = _SLOTS * self.strips * PANEL * self.tokens * 2
        self.rows = TwoFourRows(spmm, operands, self.panels, _SLOTS, x_bytes)

    def emit(self) -> None:
        self._start(index(0), index(0))
        with loop(index(0), index(self.units), index(1)) as units:
            for part in range(self.parts):
                self._keep(index(0), index(0), [self._unit(index(0), part, units.induction_variable)])
        self._finish()
        with loop(index(0), index(self.panels), index(1), [index(0), *self.rows.start()]) as panels:
            slot, *sums = panels.inner_iter_args
            other = arith.subi(index(1), slot)
            later = arith.addi(panels.induction_variable, index(1))
            self._start(later, other)
            for part in range(self.parts):
                loaded = [self._unit(later, part, index(number)) for number in range(self.units)]
                steps = range(part * STEPS // self.parts, (part + 1) * STEPS // self.parts)
                sums = self.rows.multiply(slot, steps, lambda step, j: self._fragments(slot, step, j), sums)
                self._keep(later, other, loaded)
            self._finish()
            scf.YieldOp([other, *sums])
        self.rows.store(list(panels.results)[1:])

    def _start(self, panel: ir.Value, slot: ir.Value) -> None:
        """Starts to copy the values and metadata of a panel, if it exists. Ends the group of copies even if it does not."""
        with when(below(panel, index(self.panels))):
            self.rows.copy(panel, slot)
        commit()

    def _finish(self) -> None:
        wait(0)
        gpu.barrier()

    def _unit(self, panel: ir.Value, part: int, number: ir.Value) -> _Unit:
        """Loads one of the thread's units of a part of a panel. All lanes of a warp load the same columns.

        x is zero in a panel past the last one.
        """
        operands, read = self.operands, vector_of(CHUNK, self.spmm.element)
        warps, width = operands.launch.threads // WARP, self.panels * self.depth
        half, chunk = divmod_by(arith.addi(operands.warp, arith.muli(number, index(warps))), _PART // CHUNK)
        column = arith.addi(arith.muli(chunk, index(CHUNK)), index(part * _PART))
        pair = arith.muli(arith.addi(arith.muli(half, index(WARP)), operands.lane), index(2))
        k = arith.addi(arith.muli(panel, index(self.depth)), column)
        inside, safe = below(k, index(self.spmm.K)), arith.minui(k, index(self.spmm.K - CHUNK))
        both = []
        for i in range(2):
            token = arith.minui(arith.addi(operands.first, arith.addi(pair, index(i))), operands.last)
            both.append(arith.select(inside, load(read, operands.x, [token, safe]), zeros(read)))
        places = []
        for strip in range(self.strips):
            of_all = arith.addi(arith.muli(operands.chunk, index(self.strips)), index(strip))
            at = arith.addi(arith.muli(of_all, index(width)), arith.minui(k, index(width - CHUNK)))
            places.append(load(vector_of(CHUNK, ir.IntegerType.get_signless(8)), self.places, [at]))
        return _Unit(arith.muli(arith.divui(column, index(self.group)), index(4)), pair, both, places)

    def _keep(self, panel: ir.Value, slot: ir.Value, loaded: list[_Unit]) -> None:
        """Stores the columns of the loaded units that each strip selects, pairs of tokens side by side."""
        pair_type = vector_of(2, self.spmm.element)
        with when(below(panel, index(self.panels))):
            for unit in loaded:
                for strip, places in enumerate(unit.places):
                    for i in range(CHUNK):
                        place = arith.index_castui(ir.IndexType.get(), vector.extract(places, [], [i]))
                        with when(below(place, index(4))):
                            row = arith.addi(unit.row, place)
                            both = [vector.extract(values, [], [i]) for values in unit.x]
                            to = [slot, index(strip), row, _x_place(row, unit.pair)]
                            store(vector.from_elements(pair_type, both), self.x, to)

    def _fragments(self, slot: ir.Value, step: int, j: int) -> list[ir.Value]:
        """Loads the fragments of x for a step and the j-th 8 tokens of the warp, from the columns of the warp's strip."""
        strip = self.rows.row_warp if self.strips == 2 else index(0)
        row = arith.addi(self.operands.lane, index(32 * step))
        token = arith.addi(arith.muli(self.rows.token_warp, index(WARP_TOKENS)), index(8 * j))
        return load_matrices(self.x, [slot, strip, row, _x_place(row, token)], transposed=True)


def _x_place(row: ir.Value, token: ir.Value) -> ir.Value:
    """Returns the place of a token in a row of selected columns. Eight neighbouring rows have 8 tokens in eight places."""
    chunk, rest = divmod_by(token, CHUNK)
    return arith.addi(arith.muli(arith.xori(chunk, arith.andi(row, index(7))), index(CHUNK)), rest)
