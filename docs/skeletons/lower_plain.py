"""lower-plain: a `kernel.spmm` of the schedule "plain" becomes a loop over tokens, rows, and the nonzeros of a row.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "plain", tile = [1], ...} : ... tensor<3072x768xf32, #CSR>
after    scf.parallel (%task) = ...                    // tokens x chunks of the weight's rows
           func.call @region_rows1
         func.func private @region_rows1(...)
           for each group of 16 rows, each row:
             scf.for %p iter_args(%sum)
               %sum + values[p] * x[token][coordinates[p]]
           the 16 sums, through the epilogue, into y

Copy it to passes/weights/ as lower_<name>.py, with its lit tests in tests/lit/lower-<name>/. The schedule is then known by its
name, and the cost decides when it is taken.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, Product, products
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, reserve_workspace, vector_of, widened


def _storage(matrix: Matrix) -> Format:
    """CSR (CSC if the matrix is stored transposed) with coordinates of 32 bits."""
    return (Format.CSR if matrix.reduction == 1 else Format.CSC).with_widths(32, 32)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    return (1,) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """4 for each nonzero and token: one addition waits for the last."""
    return 4.0 * tokens * matrix.nonzeros


PLAIN = Family("plain", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerPlain:
    """Lower products to loops without vectors."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, PLAIN.name):
            product = _Plain(op)
            with product.op.location:
                reserve_workspace(module, product.workspace)
                rows = product.function("rows1", partial(_emit_rows, product))
                product.by_rows({1: rows}, 1, product.workspace)


class _Plain(Product):
    """A product, one token at a time."""

    @property
    def workspace(self) -> int:
        """Bytes of the sums of a group of rows."""
        return self.lanes * byte_width(self.sum_type)

    def work_before(self, row: ir.Value) -> ir.Value:
        """Rows are shared out by their nonzeros."""
        return self.stored_before(row, 1, self.lanes)

    def cycles(self, values: ir.Value, tokens: ir.Value) -> ir.Value:
        """One for each nonzero of each token."""
        return arith.muli(values, tokens)


def _emit_rows(product: Any, operands: Operands) -> None:
    """The function of one token: groups of rows [low, high)."""
    lanes, token = product.lanes, operands.first
    sums = memref.view(ir.MemRefType.get([lanes], product.sum_type), operands.workspace, operands.offset, [])
    with loop(operands.low, operands.high, index(1)) as groups:
        first = arith.muli(groups.induction_variable, index(lanes))
        with loop(first, arith.minui(arith.addi(first, index(lanes)), index(product.M)), index(1)) as rows:
            row = rows.induction_variable
            memref.store(_sum(product, operands, token, row), sums, [arith.subi(row, first)])
        finish = partial(product.epilogue.every, vector.load(vector_of(lanes, product.sum_type), sums, [index(0)]))
        operands.memory.store_token(token, first, lanes, finish)


def _sum(product: Any, operands: Operands, token: ir.Value, row: ir.Value) -> ir.Value:
    """The sum over the nonzeros of a row."""
    low, high = (load_index(operands.positions, at) for at in (row, arith.addi(row, index(1))))
    zero = arith.constant(product.sum_type, ir.FloatAttr.get(product.sum_type, 0.0))
    with loop(low, high, index(1), [zero]) as nonzeros:
        p = nonzeros.induction_variable
        weight = widened(memref.load(operands.values, [p]), product.sum_type)
        x = widened(memref.load(operands.x, [token, load_index(operands.coordinates, p)]), product.sum_type)
        scf.YieldOp([arith.addf(nonzeros.inner_iter_args[0], arith.mulf(weight, x))])
    return nonzeros.results[0]
