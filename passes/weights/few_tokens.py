"""The frame of the schedules for a few tokens. Threads share out only rows; each copies, widens and pads the tokens of x.

scf.parallel (%task) = ...                    chunks of the weight's rows
  for each 4 tokens: func.call @region_rows4  or _rows2, _rows1 for the last tokens

lower-lookup and lower-planes use it, lower-blockvec only `WeightInLanes`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.passes.loops.product import Operands, Product
from gossamer.passes.loops.vectors import byte_width, index, loop, mask_of, reserve_workspace, vector_of, widened, zeros

_CACHE_LINE = 64
_MOST = 8  # tokens


class WeightInLanes(Product):
    """A product whose vectors have elements of the weight. Each vector is multiplied by one token after the other."""

    def cycles(self, values: ir.Value, tokens: ir.Value) -> ir.Value:
        """Returns one cycle for each vector of values and token, and two for the loads of the vector."""
        return arith.muli(arith.ceildivui(values, index(self.lanes)), arith.addi(tokens, index(2)))


class FewTokens(WeightInLanes):
    """A product of `tokens` tokens at a time. The copy of a token has `padded_K` elements."""

    def __init__(self, op: Any, padded_K: int, unit: int | None = None) -> None:
        super().__init__(op, unit)
        tile = integers(op.tile)
        if len(tile) != 1 or not 1 <= tile[0] <= _MOST:
            raise CompileError(f"tile {tile} is not a number of tokens from 1 to {_MOST}")
        (self.tokens,), self.padded_K = tile, padded_K
        size = self.tokens * padded_K * byte_width(self.sum_type)
        self.workspace = -(-size // _CACHE_LINE) * _CACHE_LINE

    def lower(self, module: ir.Module, widths: list[int], emit: Callable[[int, Operands], None]) -> None:
        """Replaces the op by loops that call the functions that `emit` builds, one for each number of tokens in `widths`.

        `widths` descend.
        """
        reserve_workspace(module, self.workspace)
        with self.op.location:
            variants = {n: self.function(f"rows{n}", partial(emit, n)) for n in widths}
            self.by_rows(variants, self.tokens, self.workspace)


class TokenRows:
    """The frame for the body of a function that computes `count` tokens."""

    def __init__(self, product: FewTokens, count: int, operands: Operands) -> None:
        self.product, self.lanes, self.count = product, product.lanes, count
        self.operands, self.memory = operands, operands.memory
        self.vec = vector_of(self.lanes, product.sum_type)

    def copy_of_x(self) -> ir.Value:
        """Copies x[first + t] into the workspace as [count][padded_K], with zeros at the end. Returns the copy.

        Tokens past the last one repeat it.
        """
        product, last = self.product, arith.subi(self.memory.tokens, index(1))
        type_ = ir.MemRefType.get([self.count, product.padded_K], product.sum_type)
        copy = memref.view(type_, self.operands.workspace, self.operands.offset, [])
        narrow = vector_of(self.lanes, ir.MemRefType(self.operands.x.type).element_type)
        tokens = [arith.minui(arith.addi(self.operands.first, index(t)), last) for t in range(self.count)]
        with loop(index(0), index(product.K), index(self.lanes)) as ks:
            k = ks.induction_variable
            mask = mask_of(self.lanes, arith.subi(index(product.K), k))
            for t, token in enumerate(tokens):
                loaded = vector.maskedload(narrow, self.operands.x, [token, k], mask, zeros(narrow))
                vector.store(widened(loaded, self.vec), copy, [index(t), k])
        for k in range(-(-product.K // self.lanes) * self.lanes, product.padded_K, self.lanes):
            for t in range(self.count):
                vector.store(zeros(self.vec), copy, [index(t), index(k)])
        return copy

    def store(self, row: ir.Value, totals: list[ir.Value]) -> None:
        """Stores the totals of a vector of rows, for each token, through the epilogue into y."""
        for t, total in enumerate(totals):
            token = arith.addi(self.operands.first, index(t))
            self.memory.store_token(token, row, self.lanes, partial(self.product.epilogue.every, total))
