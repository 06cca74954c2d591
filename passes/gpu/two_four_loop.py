"""Copies 128 rows of a 2:4 weight to shared memory, multiplies them on sparse tensor cores, and stores the results.

lower-gpu-twofour and lower-gpu-vnm share this code; they differ in the columns of x that they multiply with the stored columns.
Tensor cores take the sparse factor on the left, so a product is y^T = w x^T. The packing deals the rows to the products such
that a lane has eight neighbouring features of a token.
"""

from collections.abc import Callable

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.dialects.gpu_packings import TwoFour
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import WARP, below, divmod_by, shared, when, widest
from gossamer.passes.loops.tensor_core import CHUNK, copy_async, load_matrices, multiply_add_sparse
from gossamer.passes.loops.vectors import index, vector_of, zeros

ROWS, PANEL = TwoFour.ROWS, TwoFour.COLUMNS  # rows of a thread block, columns of a panel
WARP_ROWS, WARP_TOKENS = 64, 32
STEPS = PANEL // 32  # products along a panel
HEIGHTS, WIDTHS = WARP_ROWS // 16, WARP_TOKENS // 8  # products of a warp, down and across
ROW_WARPS = ROWS // WARP_ROWS
_WORDS = ROW_WARPS * STEPS * (HEIGHTS // 2) * WARP  # words of metadata in a panel
_VALUE_BYTES = ROWS * PANEL // 2 * 2  # bytes of the values of a panel: half of its elements, 2 bytes each
SLOT_BYTES = _VALUE_BYTES + _WORDS * 4  # bytes of shared memory for a panel


def threads(tokens: int) -> int:
    """Returns the number of threads of a block for 128 rows and so many tokens."""
    return WARP * ROW_WARPS * (tokens // WARP_TOKENS)


class TwoFourRows:
    """Multiplies the 128 rows of the operands' chunk. Shared memory has `slots` panels of them, from byte `at` on."""

    def __init__(self, spmm: GpuProduct, operands: Operands, panels: int, slots: int, at: int) -> None:
        self.spmm, self.operands, self.panels = spmm, operands, panels
        self.words, self.values = operands.weight[-2:]
        self.w = shared(at, [slots, ROWS // 2, PANEL], spmm.element)  # two rows side by side
        self.metadata = shared(at + slots * _VALUE_BYTES, [slots, _WORDS], ir.IntegerType.get_signless(32))
        self.sums = vector_of(4, spmm.sum_type)
        self.token_warp, self.row_warp = divmod_by(operands.warp, ROW_WARPS)

    def start(self) -> list[ir.Value]:
        """Returns the zeros from which the sums begin."""
        return [zeros(self.sums)] * (HEIGHTS * WIDTHS)

    def copy(self, panel: ir.Value, slot: ir.Value) -> None:
        """Starts to copy the values and metadata of a panel into a slot."""
        self._copy_values(panel, slot)
        self._copy_metadata(panel, slot)

    def _copy_values(self, panel: ir.Value, slot: ir.Value) -> None:
        chunks = PANEL // 2 // CHUNK  # number of chunks of a row
        line, chunk = divmod_by(self.operands.thread, chunks)
        origin = arith.muli(self.operands.chunk, index(ROWS))
        column = arith.addi(arith.muli(panel, index(PANEL // 2)), arith.muli(chunk, index(CHUNK)))
        for first in range(0, ROWS, self.operands.launch.threads // chunks):
            row = arith.addi(line, index(first))
            at = arith.addi(arith.muli(arith.addi(origin, row), index(self.panels * PANEL // 2)), column)
            copy_async(self.values, [at], self.w, [slot, *_w_place(row, chunk)])

    def _copy_metadata(self, panel: ir.Value, slot: ir.Value) -> None:
        count, words = _WORDS // 4, _WORDS // ROW_WARPS
        with when(below(self.operands.thread, index(count))):
            strip, place = divmod_by(arith.muli(self.operands.thread, index(4)), words)
            strip_of_all = arith.addi(arith.muli(self.operands.chunk, index(ROW_WARPS)), strip)
            first = arith.addi(arith.muli(strip_of_all, index(self.panels)), panel)
            at = arith.addi(arith.muli(first, index(words)), place)
            copy_async(self.words, [at], self.metadata, [slot, arith.muli(self.operands.thread, index(4))])

    def multiply(
        self, slot: ir.Value, steps: range, x: Callable[[int, int], list[ir.Value]], sums: list[ir.Value]
    ) -> list[ir.Value]:
        """Returns the sums plus w x^T of some steps of a panel, for the warp's rows and tokens.

        x(step, j) returns the fragments of x for the j-th 8 tokens of the warp.
        """
        lane, result = self.operands.lane, list(sums)
        matrix, line = divmod_by(lane, 8)
        right, lower = divmod_by(matrix, 2)
        w_row = arith.addi(arith.muli(self.row_warp, index(WARP_ROWS)), arith.addi(arith.muli(line, index(8)), lower))
        for step in steps:
            b = [x(step, j) for j in range(WIDTHS)]
            for i in range(HEIGHTS):
                row, chunk = arith.addi(w_row, index(2 * i)), arith.addi(right, index(2 * step))
                a = load_matrices(self.w, [slot, *_w_place(row, chunk)])
                if i % 2 == 0:
                    strip = arith.muli(self.row_warp, index(_WORDS // ROW_WARPS))
                    word = arith.addi(arith.addi(strip, index((2 * step + i // 2) * WARP)), lane)
                    metadata = memref.load(self.metadata, [slot, word])
                for j in range(WIDTHS):
                    number = i * WIDTHS + j
                    result[number] = multiply_add_sparse(a, metadata, i % 2, b[j], result[number])
        return result

    def store(self, sums: list[ir.Value]) -> None:
        """Stores the epilogue's results into y, in the widest vectors of features that are aligned."""
        operands, spmm = self.operands, self.spmm
        group, quarter = divmod_by(operands.lane, 4)
        warp_row = arith.addi(arith.muli(operands.chunk, index(ROWS)), arith.muli(self.row_warp, index(WARP_ROWS)))
        first = arith.addi(warp_row, arith.muli(group, index(2 * HEIGHTS)))
        pair = arith.addi(arith.muli(self.token_warp, index(WARP_TOKENS)), arith.muli(quarter, index(2)))
        width = widest(spmm.M, ir.MemRefType(operands.out.type).element_type, 2 * HEIGHTS)
        for j in range(WIDTHS):
            for odd in range(2):
                token = arith.addi(operands.first, arith.addi(pair, index(8 * j + odd)))
                exists = below(token, operands.tokens)
                mine = [vector.extract(sums[i * WIDTHS + j], [], [2 * half + odd]) for i in range(HEIGHTS) for half in range(2)]
                for piece in range(0, 2 * HEIGHTS, width):
                    feature = arith.addi(first, index(piece))
                    with when(arith.andi(exists, below(feature, index(spmm.M)))):
                        values = vector.from_elements(vector_of(width, spmm.sum_type), mine[piece : piece + width])
                        operands.store(spmm.epilogue, values, token, feature)


def _w_place(row: ir.Value, chunk: ir.Value) -> list[ir.Value]:
    """Returns the line and place of 8 values of a row of w.

    A product takes rows that are 8 apart. Their chunks are in eight different places, so loads have no bank conflicts.
    """
    line, odd = divmod_by(row, 2)
    side = arith.addi(arith.muli(odd, index(4)), chunk)
    spread = arith.andi(arith.divui(row, index(8)), index(7))
    return [line, arith.muli(arith.xori(side, spread), index(CHUNK))]
