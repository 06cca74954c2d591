"""The body of a chain's product that expands weights. While AMX multiplies a block, the sums of the previous one are finished.

for each group of rows:
  expand its weights into memory
  for each tile of the task, for each two vectors of its tokens:        // a block: rows x tokens
    multiply the block; between its parts, store the sums of the previous block through the epilogue into the tile
store the sums of the last block through the epilogue

Two blocks of sums take turns. The first block has no previous one. So zeros go through the epilogue instead, to the place that
the first block's own results overwrite later.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.chains.frame import Frame
from gossamer.passes.chains.plan_chain import Rounded, Tiled, columns
from gossamer.passes.chains.stages import emit_product, finished, store_rows
from gossamer.passes.framework.chain_product import ChainProduct, Expansion, Layout
from gossamer.passes.loops.epilogue import Epilogue
from gossamer.passes.loops.vectors import index, loop, vector_of, zeros

_BLOCK = 2  # vectors of tokens in a block


def emit_expanded_product(
    op: Any,
    product: ChainProduct,
    x: Tiled,
    gives: Layout | None,
    frame: Frame,
    frame_of: Callable[[ir.Value], Frame],
    tiles: ir.Value,
    memory: ir.Value,
) -> None:
    """Emits the groups [low, high) of a product with `x`, for `tiles` tiles. `frame_of` returns the frame of each.

    Expanded weights go into `memory`. The result goes to its buffer or, if the stage `gives` bf16, to the buffer for that. A
    single vector of tokens is multiplied while the weights are expanded.
    """
    expansion, result = product.inner, op.operation.results[0]
    assert isinstance(expansion, Expansion)
    target = result if gives is None else Rounded(result, gives)
    if frame.vectors > 1:
        _emit_blocks(op, product, expansion, x, target, frame, frame_of, tiles, memory)
        return
    several = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ugt, tiles, index(1)), has_else=True)
    with ir.InsertionPoint(several.then_block):
        _emit_blocks(op, product, expansion, x, target, frame, frame_of, tiles, memory)
        scf.YieldOp([])
    with ir.InsertionPoint(several.else_block):
        each, rows = product.height // expansion.height, columns(result)
        few = replace(product, height=expansion.height, groups=-(-rows // expansion.height), inner=expansion.few)
        low, high = (arith.muli(bound, index(each)) for bound in (frame.low, frame.high))
        emit_product(op, few, frame.buffers[x], gives, replace(frame, low=low, high=arith.minui(high, index(few.groups))))
        scf.YieldOp([])


def _emit_blocks(
    op: Any,
    product: ChainProduct,
    expansion: Expansion,
    x: Tiled,
    target: Tiled,
    frame: Frame,
    frame_of: Callable[[ir.Value], Frame],
    tiles: ir.Value,
    memory: ir.Value,
) -> None:
    """Emits the product block by block."""
    epilogue, size = Epilogue(op.epilogue.blocks[0]), columns(op.operation.results[0])
    sums_of = vector_of(frame.lanes, epilogue.sum.type)
    width = _BLOCK if frame.vectors % _BLOCK == 0 else 1
    blocks, tokens = frame.vectors // width, width * frame.lanes
    sums = memref.alloca(ir.MemRefType.get([2, product.height, tokens], sums_of.element_type), [], [], alignment=64)
    with loop(index(0), index(product.height), index(1)) as rows, loop(index(0), index(tokens), index(frame.lanes)) as ts:
        vector.store(zeros(sums_of), sums, [index(0), rows.induction_variable, ts.induction_variable])
    inner = expansion.inner(frame.outside[op.w], memory, epilogue.sum.type)

    share = product.height // expansion.parts

    def finish(group: ir.Value, part_of: Frame, slot: ir.Value, part: ir.Value) -> None:
        """Stores a part of the rows of a block of sums, through the epilogue, into the tile."""
        first = arith.muli(part, index(share))
        slots = [arith.addi(first, index(i)) for i in range(share)]
        totals = [vector.load(sums_of, sums, [slot, at, index(v * frame.lanes)]) for at in slots for v in range(width)]
        start = arith.muli(group, index(product.height))
        numbers = [arith.addi(start, at) for at in slots]
        store_rows(finished(epilogue, part_of, product, size, numbers, totals), numbers, target, part_of)

    count = arith.muli(tiles, index(blocks))
    with loop(frame.low, frame.high, index(1), [frame.low, index(0), index(0)]) as groups:
        group = groups.induction_variable
        inner.expand(group)
        with loop(index(0), count, index(1), list(groups.inner_iter_args)) as each:
            block, (last, at, full) = each.induction_variable, each.inner_iter_args
            slot = arith.subi(index(1), full)
            here, before = (_part(frame_of, number, blocks, width) for number in (block, at))
            assert here.start is not None
            inner.multiply(here.buffers[x], here.start, sums, slot, partial(finish, last, before, full))
            scf.YieldOp([group, block, slot])
        scf.YieldOp(list(each.results))
    last, at, full = groups.results
    before = _part(frame_of, at, blocks, width)
    with loop(index(0), index(expansion.parts), index(1)) as parts:
        finish(last, before, full, parts.induction_variable)


def _part(frame_of: Callable[[ir.Value], Frame], block: ir.Value, blocks: int, width: int) -> Frame:
    """Returns the frame of a block of tokens."""
    frame = frame_of(arith.divui(block, index(blocks)) if blocks > 1 else block)
    within = arith.remui(block, index(blocks)) if blocks > 1 else index(0)
    return replace(frame, vectors=width, start=arith.muli(within, index(width * frame.lanes)))
