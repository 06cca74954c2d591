"""lower-gpu-expand: lowers a `kernel.spmm` of the schedule "gpu-expand" to GPU kernels that expand the weight in registers.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-expand", tile = [16, 32, 32], ...}
             : (..., tensor<3072x768xbf16, "fragments(reduction=1)">) -> ...
after    gpu.func @region_t16(...)                     // and _t8
           the loops of expanded_panels.py with panels of 32 columns, which contain
           each lane: its elements of w, values[offset + ctpop(lower bits of the mask)] where the mask has a bit, else 0

The kernels are for few tokens. The weight takes a bit and a half for each element, and the nonzeros. At 60 % zeros, this is
half of the dense weight. Zeros are multiplied, so an infinity in x gives NaN as in the dense product. The element must be bf16
or f16, and K a multiple of 8.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import Fragments
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix, entries_read
from gossamer.passes.gpu.expanded_panels import TOKENS, ExpandedPanels
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import WARP, divmod_by
from gossamer.passes.loops.tensor_core import CHUNK
from gossamer.passes.loops.vectors import index, vector_of

_FEW = 64  # most tokens for which this schedule may be the fastest


def _storage(matrix: Matrix) -> Fragments | None:
    fits = matrix.element in ("bf16", "f16") and matrix.columns % CHUNK == 0
    return Fragments(matrix.reduction) if fits else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight, columns of K]."""
    return tuple(_Kernel.tile()) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor, the longer time of two.

    Masks, offsets and values are loaded from memory at 15 bytes a cycle. A tile of 16 x 16 takes some 80 instructions, of which
    a multiprocessor does 2.5 a cycle.
    """
    tiles = -(-tokens // TOKENS[0]) * matrix.rows * matrix.columns / 256
    return tiles * max(256 * (1.5 / 8 + 2 * matrix.density) / 15, 80 / 2.5)


GPU_EXPAND = Family("gpu-expand", _storage, _tile, _cycles, most=_FEW, read=entries_read)


@dataclass(frozen=True)
class LowerGpuExpand:
    """Lowers products with few tokens to gpu, nvgpu and nvvm."""

    def run(self, module: ir.Module) -> None:
        _Kernel.lower_all(module, GPU_EXPAND)


class _Kernel(ExpandedPanels):
    """Panels of bf16 or f16. A lane has two neighbouring elements of each quarter of a tile."""

    stored = Fragments

    def __init__(self, spmm: GpuProduct, operands: Operands) -> None:
        super().__init__(spmm, operands)
        # This lane's bits of a mask are bit `shift` and the next one. `lower` has the bits below them.
        half, place = divmod_by(operands.lane, WARP // 2)
        self.mask_of_half = arith.muli(half, index(4))
        self.shift = arith.index_cast(self.i32, arith.muli(place, index(2)))
        one = self.i32_constant(1)
        self.lower = arith.subi(arith.shli(one, self.shift), one)

    def first_mask(self, tile: int) -> ir.Value:
        return arith.addi(index(8 * tile), self.mask_of_half)

    def elements(self, slot: ir.Value, mask: ir.Value, place: ir.Value) -> ir.Value:
        mine, pair = arith.shrui(mask, self.shift), []
        for number in range(2):
            bit = arith.andi(arith.shrui(mine, self.i32_constant(number)), self.i32_constant(1))
            value = memref.load(self.values, [self.warp, slot, arith.index_castui(ir.IndexType.get(), place)])
            is_there = arith.cmpi(arith.CmpIPredicate.ne, bit, self.i32_constant(0))
            pair.append(arith.select(is_there, value, arith.constant(self.spmm.element, 0.0)))
            place = arith.addi(place, bit)
        return vector.from_elements(vector_of(2, self.spmm.element), pair)
