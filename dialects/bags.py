"""The ops of the kernel dialect for bags of rows of embedding tables: their sums, their order by rows, steps of optimizers.

All of them work on many tables in one call. A table is a line of numbers, since tables, indices and results of different tables
lie anywhere in memory:

    lines: i64[tables, len(Field)]       addresses and sizes, see `Field` and `StepField`

A bag is a list of indices, the rows of the table that it has. The kernels check every index that they follow, and report the
tables that have a wrong one.
"""

from enum import IntEnum
from typing import Any

from torch_mlir import ir

from gossamer.dialects.kernel import KernelOp, verified


class Field(IntEnum):
    """What a line has for `kernel.sum_bags` and `kernel.sort_bags`. Addresses of what is not there are 0."""

    TABLE = 0  # address of [ROWS, columns]
    ROWS = 1
    SCALES = 2  # address of f32[ROWS], for tables of integers
    INDICES = 3  # address of [ENTRIES]
    ENTRIES = 4
    OFFSETS = 5  # address of where bags begin; 0 if each has LENGTH indices
    ENDS = 6  # how many offsets there are: BAGS, or one more
    LENGTH = 7
    WEIGHTS = 8  # address of [ENTRIES]
    BAGS = 9
    PADDING = 10  # an index that counts for nothing; -1 for none
    OUT = 11  # address of the results [., columns]
    NUMBERS = 12  # address of i64[BAGS]: in which row of OUT the result of a bag belongs; 0 if in its own
    PLACES = 13  # address of i32[BAGS, columns]: the rows that maxima are from; 0 if nobody asks
    FIRST = 14  # where its entries begin among those of all tables
    BITS = 15  # address of i8[ROWS, 2 x columns / 16, rounded up]: a bit for each column, for tables of nonzeros
    STARTS = 16  # address of i32[ROWS]: where the nonzeros of a row begin


class StepField(IntEnum):
    """What a line has for `kernel.step_rows`."""

    PARAMETER = 0  # address of [ROWS, columns]
    ROWS = 1
    NUMBERS = 2  # address of i64[COUNT]: different rows
    COUNT = 3
    GRADIENT = 4  # address of [COUNT, columns]
    STATE = 5  # address of [ROWS, columns], or of [ROWS]
    SQUARES = 6  # the same, of the second moments of Adam


BAG_KINDS = ("sum", "mean", "max")
STEP_KINDS = ("sgd", "adagrad", "row_adagrad", "adam")
ELEMENTS = ("f32", "f64", "f16", "bf16", "i8", "i4", "nonzeros")
"""Those of a table. i4: a byte has a column of the first half of a row, and one of the second half in its high bits. nonzeros:
f32, one row after the other, of the columns whose bits are set."""


def _text(attribute: Any) -> str:
    return ir.StringAttr(attribute).value


def _sum_problem(op: Any) -> str | None:
    if _text(op.kind) not in BAG_KINDS:
        return f"has the kind {op.kind}, must be one of {', '.join(BAG_KINDS)}"
    if _text(op.element) not in ELEMENTS:
        return f"has tables of {op.element}, must be one of {', '.join(ELEMENTS)}"
    if ir.IntegerAttr(op.columns).value < 1:
        return f"has {op.columns} columns, must be positive"
    return None


def _step_problem(op: Any) -> str | None:
    return None if _text(op.kind) in STEP_KINDS else f"has the kind {op.kind}, must be one of {', '.join(STEP_KINDS)}"


class SumBagsOp(KernelOp, name="sum_bags"):
    """out[b] = the sum, mean or maximum of weights[p] table[indices[p]] over the entries p of bag b, for every table.

    columns   of all tables
    element   of the tables; results have the same, or f32 for integers
    wide      1 where results of f16 and bf16 are f32 as their sums
    integers  i32 or i64, of indices and offsets
    weights   the type of weights, "none" if there are none
    wrong     for each table: 0, or the number of an entry with a wrong index plus 1, or minus that of a bag with wrong offsets

    An empty bag gives 0. A maximum is that of torch.nn.functional.embedding_bag: a NaN stays if it comes first.
    """

    takes = "lines: i64[tables fields]"
    gives = "wrong: i64[tables]"

    kind: ir.StringAttr
    element: ir.StringAttr
    integers: ir.StringAttr
    weights: ir.StringAttr
    columns: ir.IntegerAttr
    wide: ir.IntegerAttr

    verify_invariants = verified(_sum_problem)


class SortBagsOp(KernelOp, name="sort_bags"):
    """The entries of bags in the order of their rows, for every table: what sums gradients row by row.

    In the places from FIRST on, and in `starts` from FIRST plus the number of the table on:

    numbers  the different rows, counts[table] of them, ascending
    starts   where the entries of each of them begin, and where the last end, counted from FIRST
    bags     the bag of each entry, by rows; `scales`, in the same order, are weights or 1 / entries of the bag (`scaled` is 1)
    wrong    as of kernel.sum_bags
    words, own_bags, own_scales   for the kernel's own use
    """

    takes = "lines: i64[tables fields]"
    gives = (
        "numbers: i64[entries], starts: i32[places], bags: i32[entries], scales: W[scaled], counts: i64[tables], "
        "wrong: i64[tables], words: i64[twice], own_bags: i32[scaled], own_scales: W[scaled]"
    )

    integers: ir.StringAttr
    weights: ir.StringAttr
    scaled: ir.IntegerAttr


class StepRowsOp(KernelOp, name="step_rows"):
    """A step of an optimizer for the rows of parameters that have a gradient, for every table.

    sgd          p -= a g
    adagrad      s += g^2;                         p -= a g / (sqrt(s) + e)
    row_adagrad  s += mean of the row's g^2;       p -= a g / (sqrt(s) + e)
    adam         m += (1 - b) (g - m), s += (1 - c) (g^2 - s);    p -= a m / (sqrt(s) + e)

    rates  a, e, 1 - b, 1 - c of each table, and what gradients are multiplied with
    wrong  for each table: 0, or the number of a wrong row plus 1
    """

    takes = "lines: i64[tables fields], rates: f64[tables five]"
    gives = "wrong: i64[tables]"

    kind: ir.StringAttr
    element: ir.StringAttr
    columns: ir.IntegerAttr

    verify_invariants = verified(_step_problem)
