"""lower-gpu-convolve-points: lowers a `kernel.convolve_points` to GPU kernels, a thread block for each tile of outputs.

before   %y = "kernel.convolve_points"(%x, %weight, %bias, %inputs, %outputs, %rows, %positions)
after    gpu.func @region_r256(...)                      // 256 outputs a block; _c4 for few tiles, 4 blocks each
           for each 32 columns, one a lane
             y[row] = bias for each of the tile's rows
             for each offset k
               gpu.barrier                               // another warp may have added to the same rows for the last offset
               each warp, for each 8 of its pairs of offset k with outputs in the tile
                 for each c: sums[r] += x[input r, c] * weight[k, c, column]
                 add the sums to y[output r]

No gathered rows or products are stored in memory, and the order of sums is always the same. Rows of x are read in vectors of
16 bytes where their length allows. In the last 8 pairs, the last pair is repeated in place of missing ones, and not added.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, math, memref, scf, vector

from gossamer.dialects.launch import Launch
from gossamer.dialects.points import TILE
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.gpu_threads import WARP, Place, add_kernel, below, by_width, divides, load, when
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of
from gossamer.passes.points.pair_tile import pairs_at

_WARPS = 8
_PAIRS = 8  # pairs that a warp multiplies at once


@dataclass(frozen=True)
class LowerGpuConvolvePoints:
    """Lowers every kernel.convolve_points."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve_points"):
            with op.location:
                function = op.parent.opview
                for blocks, suffix in ((1, f"r{TILE}"), (4, "c4")):
                    launch = Launch(TILE, blocks, _WARPS * WARP, 0)
                    add_kernel(function, suffix, launch, partial(_emit, op.opview, launch))
                function.operation.erase()


def _emit(op: Any, launch: Launch, arguments: dict[ir.Value, ir.Value]) -> None:
    _Kernel(op, launch, arguments).emit()


class _Kernel:
    def __init__(self, op: Any, launch: Launch, arguments: dict[ir.Value, ir.Value]) -> None:
        given = [arguments[buffer_of(each)] for each in op.operation.operands]
        self.x, self.weight, self.bias, self.inputs, self.outputs, self.rows, self.positions = given
        self.y, self.place = arguments[storage_of(op.operation).output], Place(launch)
        self.element = ir.MemRefType(self.x.type).element_type
        self.reduced, self.columns = (memref.dim(self.weight, index(d)) for d in (1, 2))

    def emit(self) -> None:
        place, end = self.place, memref.dim(self.rows, index(0))
        end = arith.minui(arith.addi(place.first, index(TILE)), end)
        width = index(WARP * place.launch.blocks)
        with loop(arith.muli(place.chunk, index(WARP)), self.columns, width) as across:
            column = arith.addi(across.induction_variable, place.lane)
            there = below(column, self.columns)
            column = arith.minui(column, arith.subi(self.columns, index(1)))
            bias = memref.load(self.bias, [column])
            with loop(arith.addi(place.first, place.warp), end, index(_WARPS)) as each, when(there):
                memref.store(bias, self.y, [load_index(self.rows, each.induction_variable), column])
            with loop(index(0), memref.dim(self.positions, index(0)), index(1)) as offsets:
                gpu.barrier()
                self._add_pairs(offsets.induction_variable, column, there)

    def _add_pairs(self, k: ir.Value, column: ir.Value, there: ir.Value) -> None:
        """Adds the products of the pairs of offset k to the tile's rows, in one column."""
        tile = self.place.tile
        begin, end = (load_index(self.positions, k, at) for at in (tile, arith.addi(tile, index(1))))
        begin = arith.addi(begin, arith.muli(self.place.warp, index(_PAIRS)))
        with loop(begin, end, index(_WARPS * _PAIRS)) as groups:
            first = groups.induction_variable
            sources, exist = pairs_at(self.inputs, first, _PAIRS, end)
            targets, _ = pairs_at(self.outputs, first, _PAIRS, end)
            sums = by_width(
                self.element,
                lambda width: divides(width, self.reduced),
                [self.element] * _PAIRS,
                lambda width: self._sums(width, k, column, sources),
            )
            for target, exists, added in zip(targets, exist, sums, strict=True):
                with when(arith.andi(exists, there)):
                    known = memref.load(self.y, [target, column])
                    memref.store(arith.addf(known, added), self.y, [target, column])

    def _sums(self, width: int, k: ir.Value, column: ir.Value, sources: list[ir.Value]) -> list[ir.Value]:
        """Returns for each source row the sum over c of x[row, c] weight[k, c, column]."""
        zero = arith.constant(self.element, 0.0)
        with loop(index(0), self.reduced, index(width), [zero] * len(sources)) as steps:
            c, sums = steps.induction_variable, list(steps.inner_iter_args)
            read = [load(vector_of(width, self.element), self.x, [row, c]) for row in sources]
            for i in range(width):
                factor = memref.load(self.weight, [k, arith.addi(c, index(i)), column])
                sums = [math.fma(vector.extract(x, [], [i]), factor, old) for x, old in zip(read, sums, strict=True)]
            scf.YieldOp(sums)
        return list(steps.results)
