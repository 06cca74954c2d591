"""lower-gpu-quads: lowers a `kernel.spmm` of the schedule "gpu-quads" to GPU kernels that expand an int8 weight in registers.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-quads", tile = [16, 32, 64], ...}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "quadfragments(reduction=1)">) -> tensor<?x3072xf32>
after    gpu.func @region_t16(...)                     // and _t8
           the loops of expanded_panels.py with panels of 64 columns, which contain
           each lane: its word of w, values[offset + ctpop(lower bits of the mask)] where the mask has its bit, else 0
           nvvm.mma.sync m16n8k32 of s8, summed in i32

A quad is four neighbours along K. It is stored if one of them is nonzero. A lane holds a quad in a register, so one bit, one
load and one selection expand four elements. The weight takes a bit and a half for each quad, and the stored quads. This is
39 % of the dense weight at 90 % unstructured zeros, 55 % where half of the quads are zeros. Sums are exact. K may be any
number; where it is a multiple of 16, x is copied 16 bytes at a time.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import QuadFragments
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.gpu.expanded_panels import TOKENS, ExpandedPanels
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.vectors import index
from gossamer.passes.weights_int8.lower_quads import kept_quads

_OF_A_QUAD = 1.5 / 8  # bytes of a quad's bit in a mask, and of its share of an offset


def _storage(matrix: Matrix) -> QuadFragments:
    return QuadFragments(matrix.reduction)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight, columns of K]."""
    return tuple(_Kernel.tile()) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor, for all tiles of 16 x 32.

    The weight is loaded from memory once; a multiprocessor's share is 15 bytes a cycle. Each pass of up to 16 tokens reads the
    weight and 32 columns of the tokens, which two tiles share, from the second-level cache, at 24 bytes a cycle. It also runs
    some 60 instructions to expand and multiply a tile, at 2.5 a cycle.
    """
    tiles, most = matrix.rows * matrix.columns / 512, next((n for n in reversed(TOKENS) if tokens <= n), TOKENS[0])
    weight, passes = _read(matrix) / tiles, -(-tokens // most)
    return tiles * max(weight / 15, passes * max((weight + 16 * most) / 24, 60 / 2.5))


def _read(matrix: Matrix) -> float:
    return matrix.rows * matrix.columns * (kept_quads(matrix) + _OF_A_QUAD / 4)


GPU_QUADS = Family("gpu-quads", _storage, _tile, _cycles, floats=False, integers=True, read=_read)


@dataclass(frozen=True)
class LowerGpuQuads:
    """Lowers products of int8 to gpu, nvgpu and nvvm."""

    def run(self, module: ir.Module) -> None:
        _Kernel.lower_all(module, GPU_QUADS)


class _Kernel(ExpandedPanels):
    """Panels of int8. A lane has one quad of each quarter of a tile: the one whose bit in the mask has the lane's number."""

    stored = QuadFragments

    def __init__(self, spmm: GpuProduct, operands: Operands) -> None:
        super().__init__(spmm, operands)
        one = self.i32_constant(1)
        self.mine = arith.shli(one, arith.index_cast(self.i32, operands.lane))
        self.lower = arith.subi(self.mine, one)

    def first_mask(self, tile: int) -> ir.Value:
        return index(4 * tile)

    def elements(self, slot: ir.Value, mask: ir.Value, place: ir.Value) -> ir.Value:
        word = memref.load(self.words, [self.warp, slot, arith.index_castui(ir.IndexType.get(), place)])
        is_there = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(mask, self.mine), self.i32_constant(0))
        return arith.select(is_there, word, self.i32_constant(0))
