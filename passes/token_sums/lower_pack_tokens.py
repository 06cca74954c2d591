"""lower-pack-tokens: lowers a `kernel.pack_tokens` to transpositions of squares in registers.

before   %p = "kernel.pack_tokens"(%x) : (tensor<?x?xbf16>) -> tensor<?x?x128xf32>
after    scf.parallel (%part) = ...                            // tiles of tokens x vectors of features
           for each vector of features n of a tile i
             16 tokens of 16 features each, widened, transposed in registers, into p[i, n ... n + 15, :]

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    loop,
    mask_of,
    parallel,
    transpose,
    vector_of,
    widened,
    zeros,
)


@dataclass(frozen=True)
class LowerPackTokens:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.pack_tokens"):
            with op.location:
                self._lower(op)

    def _lower(self, op: ir.Operation) -> None:
        storage = storage_of(op)
        packed = ir.MemRefType(storage.output.type)
        lanes = self.bits // 8 // byte_width(packed.element_type)
        with ir.InsertionPoint(op):
            blocks = arith.ceildivui(memref.dim(storage.output, index(1)), index(lanes))
            total = arith.muli(memref.dim(storage.output, index(0)), blocks)
            parts = parts_of(total, index(packed.shape[2]), storage.threads)
            with parallel(parts) as part:
                begin, end = ends_of(total, part, parts)
                with loop(begin, end, index(1)) as steps:
                    tile = arith.divui(steps.induction_variable, blocks)
                    block = arith.remui(steps.induction_variable, blocks)
                    _pack(buffer_of(op.operands[0]), storage.output, lanes, tile, arith.muli(block, index(lanes)))
        storage.erase()


def _pack(x: ir.Value, out: ir.Value, lanes: int, tile: ir.Value, first: ir.Value) -> None:
    """Packs a vector of features, from the first one on, of a tile of tokens."""
    packed, given = ir.MemRefType(out.type), ir.MemRefType(x.type)
    narrow, wide = (vector_of(lanes, each.element_type) for each in (given, packed))
    tokens, width = memref.dim(x, index(0)), packed.shape[2]
    left = arith.subi(memref.dim(x, index(1)), first)
    last, features = arith.subi(tokens, index(1)), arith.minui(left, index(lanes))
    whole = arith.cmpi(arith.CmpIPredicate.eq, features, index(lanes))
    with loop(index(0), index(width), index(lanes)) as steps:
        start = arith.addi(arith.muli(tile, index(width)), steps.induction_variable)
        rows = []
        for number in range(lanes):
            token = arith.addi(start, index(number))
            there = arith.cmpi(arith.CmpIPredicate.ult, token, tokens)
            mask = mask_of(lanes, arith.select(there, features, index(0)))
            at = [arith.minui(token, last), first]
            rows.append(widened(vector.maskedload(narrow, x, at, mask, zeros(narrow)), wide))
        columns = transpose(rows)
        choice = scf.IfOp(whole, has_else=True)
        for there, target in ((None, choice.then_block), (features, choice.else_block)):
            with ir.InsertionPoint(target):
                for number, column in enumerate(columns):
                    at = [tile, arith.addi(first, index(number)), steps.induction_variable]
                    _store(column, out, at, None if there is None else (number, there))
                scf.YieldOp([])


def _store(column: ir.Value, out: ir.Value, at: list[ir.Value], within: tuple[int, ir.Value] | None) -> None:
    """Stores a column of a square, if it is one of the features."""
    if within is None:
        vector.store(column, out, at)
        return
    number, features = within
    exists = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, index(number), features))
    with ir.InsertionPoint(exists.then_block):
        vector.store(column, out, at)
        scf.YieldOp([])
