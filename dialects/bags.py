"""The ops of the kernel dialect for bags of rows of embedding tables: their sums, their order by rows, steps of optimizers.

Each op works on many tables in one call. The tables, their indices and their results are separate tensors, so a line of numbers
describes each table:

    lines: i64[tables, len(Field)]       addresses and sizes, see `Field` and `StepField`

A bag is a list of indices of rows of the table. The kernels check every index before they use it, and report the tables that
have a wrong one.
"""

from enum import IntEnum
from typing import Any

from torch_mlir import ir

from gossamer.dialects.kernel import KernelOp, verified


class Field(IntEnum):
    """The numbers in a line for `kernel.sum_bags` and `kernel.sort_bags`. The address of a missing tensor is 0."""

    TABLE = 0  # address of [ROWS, columns]
    ROWS = 1
    SCALES = 2  # address of f32[ROWS], the scale of each row, for tables of integers
    INDICES = 3  # address of [ENTRIES]
    ENTRIES = 4
    OFFSETS = 5  # address of the first entry of each bag; 0 if each bag has LENGTH indices
    ENDS = 6  # number of offsets: BAGS, or one more
    LENGTH = 7
    WEIGHTS = 8  # address of [ENTRIES]
    BAGS = 9
    PADDING = 10  # an index that is ignored; -1 if there is none
    OUT = 11  # address of the results [., columns]
    NUMBERS = 12  # address of i64[BAGS]: the row of OUT for the result of each bag; 0 if bag b has row b
    PLACES = 13  # address of i32[BAGS, columns]: the row that each maximum comes from; 0 if not needed
    FIRST = 14  # the place of its first entry among the entries of all tables
    BITS = 15  # address of i8[ROWS, 2 x columns / 16, rounded up]: a bit for each column, for tables of nonzeros
    STARTS = 16  # address of i32[ROWS]: the place of the first nonzero of each row


class StepField(IntEnum):
    """The numbers in a line for `kernel.step_rows`."""

    PARAMETER = 0  # address of [ROWS, columns]
    ROWS = 1
    NUMBERS = 2  # address of i64[COUNT]: the rows that have a gradient, each once
    COUNT = 3
    GRADIENT = 4  # address of [COUNT, columns]
    STATE = 5  # address of [ROWS, columns], or of [ROWS]
    SQUARES = 6  # address of [ROWS, columns]: the second moments of Adam


BAG_KINDS = ("sum", "mean", "max")
STEP_KINDS = ("sgd", "adagrad", "row_adagrad", "adam")
ELEMENTS = ("f32", "f64", "f16", "bf16", "i8", "i4", "nonzeros")
"""Element types of a table. i4: the low half of a byte has a column of the first half of a row, its high half one of the second
half. nonzeros: the f32 values of the columns whose bits are set, row after row."""


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

    columns   number of columns, the same in all tables
    element   element type of the tables. Results have the same type, or f32 for integers.
    wide      1 if results for f16 and bf16 are f32, like their sums
    integers  type of indices and offsets, i32 or i64
    weights   type of weights, "none" if there are none
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
    """Sorts the entries of bags by their rows, for every table, so that gradients can be summed row by row.

    A table writes to places from FIRST on, and in `starts` from FIRST plus its number on:

    numbers  the rows that occur, each once, ascending: counts[table] of them
    starts   the first entry of each of these rows, then the end of the last, counted from FIRST
    bags     the bag of each entry, sorted by rows
    scales   in the same order, the weight of each entry, or 1 / entries of its bag; only if `scaled` is 1
    wrong    as in kernel.sum_bags
    words, own_bags, own_scales   scratch memory of the kernel
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
    """Steps an optimizer for the rows of parameters that have a gradient, for every table.

    sgd          p -= a g
    adagrad      s += g^2;                         p -= a g / (sqrt(s) + e)
    row_adagrad  s += mean of the row's g^2;       p -= a g / (sqrt(s) + e)
    adam         m += (1 - b) (g - m), s += (1 - c) (g^2 - s);    p -= a m / (sqrt(s) + e)

    rates  for each table: a, e, 1 - b, 1 - c, and a factor of the gradients
    wrong  for each table: 0, or the number of a wrong row plus 1
    """

    takes = "lines: i64[tables fields], rates: f64[tables five]"
    gives = "wrong: i64[tables]"

    kind: ir.StringAttr
    element: ir.StringAttr
    columns: ir.IntegerAttr

    verify_invariants = verified(_step_problem)
