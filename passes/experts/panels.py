"""Products of elements with packed panels: the inner loop for many slots, and for gradients of weights.

A panel is [depth][width] f32 in scratch memory, or as many pairs of bf16, and stays in the first-level cache.

    scf.for each line of the panel iter_args(6 rows x 4 vectors of sums)
      24 multiply-adds of 4 vectors with 6 elements, each in all lanes
"""

from collections.abc import Callable

from torch_mlir import ir
from torch_mlir.dialects import memref, scf, vector

from gossamer.passes.experts.stored_weights import Floats
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.vectors import index, loop

HEIGHTS = (6, 4, 2)
"""Numbers of rows of sums for which there are functions."""


def vectors_of(bits: int) -> int:
    """Returns the vectors of a line of a panel: so that 24 sums fit into 32 registers, or 12 into 16."""
    return registers(bits) // 8


def panel_at(workspace: ir.Value, offset: ir.Value, depth: int, width: int) -> ir.Value:
    """Returns the memory of a panel."""
    return memref.view(ir.MemRefType.get([depth, width], ir.F32Type.get()), workspace, offset, [])


def multiplied(
    stored: Floats,
    panel: ir.Value,
    depth: ir.Value,
    sums: list[ir.Value],
    elements: Callable[[ir.Value], list[ir.Value]],
) -> list[ir.Value]:
    """Returns sums[row, v] + the sum over the lines of a panel of elements(line)[row] * line[v]."""
    with loop(index(0), depth, index(1), sums) as lines:
        line, found = lines.induction_variable, list(lines.inner_iter_args)
        xs = elements(line)
        vectors = len(sums) // len(xs)
        weights = [stored.of_word(vector.load(stored.vec, panel, [line, index(v * stored.lanes)])) for v in range(vectors)]
        for row, x in enumerate(xs):
            for v, own in enumerate(weights):
                at = row * vectors + v
                found[at] = stored.multiplied([own], [x], found[at])
        scf.YieldOp(found)
    return list(lines.results)
