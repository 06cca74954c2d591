"""lower-gpu-convolve-points-grad: lowers a `kernel.convolve_points_grad` to a GPU kernel, 16 thread blocks for each offset.

before   %w = "kernel.convolve_points_grad"(%x, %gradient, %inputs, %outputs, %positions)
after    gpu.func @region_o1(...)
           for each of this block's tiles of w[k], 8 rows and 32 columns, one a lane
             each warp, for each of its pairs of offset k: sums[j] += x[input, row j] * gradient[output, column]
             add up the sums of all warps in shared memory; warp j stores row j

The order of sums is always the same.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, math, memref, scf, vector

from gossamer.dialects.launch import Launch
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.gpu_threads import WARP, Place, add_kernel, below, by_width, divides, load, shared, when
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, vector_of

_WARPS = _ROWS = 8
_BLOCKS = 16  # thread blocks of an offset


@dataclass(frozen=True)
class LowerGpuConvolvePointsGrad:
    """Lowers every kernel.convolve_points_grad."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve_points_grad"):
            with op.location:
                function = op.parent.opview
                parts = _WARPS * _ROWS * WARP * byte_width(ir.RankedTensorType(op.results[0].type).element_type)
                launch = Launch(1, _BLOCKS, _WARPS * WARP, parts)
                add_kernel(function, "o1", launch, partial(_emit, op.opview, launch))
                function.operation.erase()


def _emit(op: Any, launch: Launch, arguments: dict[ir.Value, ir.Value]) -> None:
    _Kernel(op, launch, arguments).emit()


class _Kernel:
    def __init__(self, op: Any, launch: Launch, arguments: dict[ir.Value, ir.Value]) -> None:
        given = [arguments[buffer_of(each)] for each in op.operation.operands]
        self.x, self.gradient, self.inputs, self.outputs, self.positions = given
        self.w, self.place = arguments[storage_of(op.operation).output], Place(launch)
        self.element = ir.MemRefType(self.x.type).element_type
        self.height, self.columns = (memref.dim(self.w, index(d)) for d in (1, 2))
        self.parts = shared(0, [_WARPS, _ROWS, WARP], self.element)

    def emit(self) -> None:
        k, place = self.place.tile, self.place
        last = arith.subi(memref.dim(self.positions, index(1)), index(1))
        begin, end = (load_index(self.positions, k, at) for at in (index(0), last))
        wide = arith.ceildivui(self.columns, index(WARP))
        tiles = arith.muli(arith.ceildivui(self.height, index(_ROWS)), wide)
        with loop(place.chunk, tiles, index(_BLOCKS)) as numbers:
            number = numbers.induction_variable
            top = arith.muli(arith.divui(number, wide), index(_ROWS))
            column = arith.addi(arith.muli(arith.remui(number, wide), index(WARP)), place.lane)
            safe = arith.minui(column, arith.subi(self.columns, index(1)))
            sums = by_width(
                self.element,
                lambda width: divides(width, self.height),
                [self.element] * _ROWS,
                partial(self._sums, begin, end, top, safe),
            )
            for row, value in enumerate(sums):
                memref.store(value, self.parts, [place.warp, index(row), place.lane])
            gpu.barrier()
            parts = [memref.load(self.parts, [index(warp), place.warp, place.lane]) for warp in range(_WARPS)]
            row = arith.addi(top, place.warp)
            with when(arith.andi(below(row, self.height), below(column, self.columns))):
                memref.store(reduce(arith.addf, parts), self.w, [k, row, column])
            gpu.barrier()

    def _sums(self, begin: ir.Value, end: ir.Value, top: ir.Value, column: ir.Value, width: int) -> list[ir.Value]:
        """Returns this warp's part of the sums of 8 rows from `top` on. Those past the last row are not stored."""
        last = arith.subi(self.height, index(width))
        rows = [arith.minui(arith.addi(top, index(j)), last) for j in range(0, _ROWS, width)]
        zero = arith.constant(self.element, 0.0)
        with loop(arith.addi(begin, self.place.warp), end, index(_WARPS), [zero] * _ROWS) as pairs:
            p = pairs.induction_variable
            into, factor = load_index(self.inputs, p), memref.load(self.gradient, [load_index(self.outputs, p), column])
            read = [load(vector_of(width, self.element), self.x, [into, row]) for row in rows]
            values = [vector.extract(each, [], [i]) for each in read for i in range(width)]
            scf.YieldOp([math.fma(x, factor, old) for x, old in zip(values, pairs.inner_iter_args, strict=True)])
        return list(pairs.results)
