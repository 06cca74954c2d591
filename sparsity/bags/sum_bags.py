"""gossamer::sum_bags(tables, indices, offsets, weights, kind, padding, last) -> Tensor[]: bags of rows of many tables.

tables   [rows, columns] each, all of as many columns and of one type of floats, contiguous
indices  [bags, length], or [entries] where there are offsets
offsets  None, or where bags begin: [bags], or [bags + 1] where `last` says so
weights  None, or of the indices' shape: what rows are multiplied with
kind     "sum", "mean" or "max"
padding  for each table an index that counts for nothing, -1 for none
returns  [bags, columns] for each table

One call of a kernel computes all of them (see dialects/bags.py). An index that is out of range is an IndexRangeError. It has
no derivatives: graphs that are compiled have theirs, and `sparse_gradients` has those that are made outside of graphs.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.bags import Field, SumBagsOp
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.operations import Operation
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.bags.bag_lists import INTEGERS, WIDTH, BagList, bag_list, raise_for
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, schedule_of
from gossamer.sparsity.compiler.warm_memory import empty

WIDEST = 1024
"""Columns of a table, at most: the code of a kernel grows with them."""


def into(
    outs: Sequence[Tensor],
    tables: Sequence[Tensor],
    bags: Sequence[BagList],
    kind: str,
    *,
    scales: Sequence[Tensor] = (),
    numbers: Sequence[Tensor] = (),
    places: Sequence[Tensor] = (),
    four: bool = False,
) -> None:
    """Computes bags of tables into results that are there.

    outs     [bags, columns] each, contiguous, of the tables' type, or f32 for tables of integers, f16 and bf16
    scales   [rows] each, f32, for tables of integers; those of four bits, which `four` says, are [rows, half of the columns]
    numbers  [bags] each, int64: which row of its result each bag is for
    places   [bags, columns] each, int32: gets the rows that maxima are from
    """
    lines, rows, first, weights = array("q"), [table.shape[0] for table in tables], bags[0], bags[0].weights
    for table, extent, each, out in zip(tables, rows, bags, outs, strict=True):
        line = each.line(extent)
        line[Field.TABLE], line[Field.OUT] = table.data_ptr(), out.data_ptr()
        lines.extend(line)
    for field, given in ((Field.SCALES, scales), (Field.NUMBERS, numbers), (Field.PLACES, places)):
        for at, tensor in enumerate(given):
            lines[at * WIDTH + field] = tensor.data_ptr()
    held = None if weights is None else weights.dtype
    call = _call(kind, tables[0].dtype, first.indices.dtype, held, outs[0].shape[1], four, outs[0].dtype)
    count = len(rows)
    wrong = array("q", bytes(8 * count))
    call(lines.buffer_info()[0], count, WIDTH, wrong.buffer_info()[0], count)
    if any(wrong):
        raise_for(wrong, bags, rows)


@lru_cache(1024)
def _kernel(
    kind: str, table: torch.dtype, indices: torch.dtype, weights: torch.dtype | None, columns: int, four: bool,
    results: torch.dtype,
) -> RegionKernel:  # fmt: skip
    attributes = {
        "kind": kind, "element": "i4" if four else ELEMENTS[table], "integers": INTEGERS[indices],
        "weights": "none" if weights is None else ELEMENTS[weights], "columns": columns,
        "wide": int(table.is_floating_point and results is not table),
    }  # fmt: skip
    what = SumBagsOp, (torch.int64, torch.int64), (), tuple(attributes.items())
    kernel = kernel_on(torch.device("cpu"), op_ir, what, schedule_of(SumBagsOp))
    assert isinstance(kernel, RegionKernel)
    return kernel


@lru_cache(1024)
def _call(*of: Any) -> Callable[..., None]:
    """A function of the words that the kernel for such tables takes: most of a small call is to find them."""
    return _kernel(*of).bound(())


def kernel_of(kind: str, table: torch.dtype, indices: torch.dtype, weights: torch.dtype | None, columns: int) -> str:
    """The key of the kernel for bags of such tables. CompileError if it cannot be compiled."""
    return _kernel(kind, table, indices, weights, columns, False, table).key


def together(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    padding: Sequence[int],
    last: bool,
) -> list[list[tuple[int, BagList]]]:
    """The bags of the tables that one kernel computes, with the numbers of the tables."""
    groups = dict[object, list[tuple[int, BagList]]]()
    for number, given in enumerate(zip(indices, offsets, weights, padding, strict=True)):
        bags = bag_list(*given, last)
        kind = bags.indices.dtype, None if bags.weights is None else bags.weights.dtype
        groups.setdefault((tables[number].dtype, tables[number].shape[1], kind), []).append((number, bags))
    return list(groups.values())


def empty_results(bags: Sequence[BagList], columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Memory for the results of some tables: of each by itself, since results of an operation may not be parts of one."""
    return [empty((each.count, columns), dtype) for each in bags]


def sum_bags(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    kind: str,
    padding: Sequence[int],
    last: bool,
) -> list[Tensor]:
    """What the operation computes, without the dispatcher."""
    results = list[Tensor | None]([None] * len(tables))
    for group in together(tables, indices, offsets, weights, padding, last):
        numbers, bags = [number for number, _ in group], [each for _, each in group]
        own = [tables[number].detach().contiguous() for number in numbers]
        outs = empty_results(bags, own[0].shape[1], own[0].dtype)
        into(outs, own, bags, kind)
        for number, out in zip(numbers, outs, strict=True):
            results[number] = out
    return [each for each in results if each is not None]


def _traced(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    kind: str,
    padding: Sequence[int],
    last: bool,
) -> list[Tensor]:
    counts = [
        each.shape[0] if begins is None else begins.shape[0] - last for each, begins in zip(indices, offsets, strict=True)
    ]
    return [table.new_empty(count, table.shape[1]) for table, count in zip(tables, counts, strict=True)]


Operation(
    "sum_bags(Tensor[] tables, Tensor[] indices, Tensor?[] offsets, Tensor?[] weights, str kind, int[] padding, bool last)"
    " -> Tensor[]",
    sum_bags,
    fake=_traced,
).register()
