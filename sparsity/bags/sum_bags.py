"""gossamer::sum_bags(values, indices, offsets, weights, padding, kind, last, scales, columns) -> Tensor[]: bags of many tables.

values   [rows, columns] each, of one float dtype, contiguous; or stored tables, see few_bits.py and nonzero_rows.py
indices  [bags, length], or [entries] with offsets
offsets  None, or where bags begin: [bags], or [bags + 1] if `last`
weights  None, or the factors of rows, of the shape of the indices
padding  for each table an index that is ignored, -1 for none
kind     "sum", "mean" or "max"
scales   for each stored table [rows] of f32, empty for float16, or bits of nonzeros; an empty list for float tables
columns  the number of columns of each table
returns  [bags, columns] for each table, of its dtype; f32 for stored tables

One call of a kernel computes all tables of one dtype and width (see dialects/bags.py). IndexRangeError for an index that is out
of range. The operation has no derivatives: compiled graphs contain their own, and sparse_lookups.py has those for eager code.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.dialects.bags import Field, SumBagsOp
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.operations import Operation
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.bags.bag_lists import INTEGERS, WIDTH, BagList, ManyBags, raise_for
from gossamer.sparsity.bags.few_bits import check_table, floats_of, is_of_nonzeros
from gossamer.sparsity.bags.nonzero_rows import starts_of
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, schedule_of

WIDEST = 1024
"""The most columns of a table, because the code of a kernel grows with them."""


def into(
    outs: Sequence[Tensor],
    tables: Sequence[Tensor],
    bags: Sequence[BagList],
    kind: str,
    *,
    scales: Sequence[Tensor] = (),
    numbers: Sequence[Tensor] = (),
    places: Sequence[Tensor] = (),
) -> None:
    """Computes bags of tables into given results.

    outs     [bags, columns] each, contiguous, of the tables' dtype, or f32 for stored tables and for floats of 16 bits
    scales   those of stored tables, as for the operation
    numbers  [bags] each, int64: the row of the result for each bag
    places   [bags, columns] each, int32: the rows of the maxima are written here
    """
    sparse, weights = bool(scales) and is_of_nonzeros(scales[0]), bags[0].weights
    rows = [each.shape[0] for each in (scales if sparse else tables)]
    starts = [starts_of(*each) for each in zip(tables, scales, strict=True)] if sparse else []
    lines = array("q")
    for table, extent, each, out in zip(tables, rows, bags, outs, strict=True):
        line = each.line(extent)
        line[Field.TABLE], line[Field.OUT] = table.data_ptr(), out.data_ptr()
        lines.extend(line)
    of_rows = Field.BITS if sparse else Field.SCALES
    for field, given in ((of_rows, scales), (Field.STARTS, starts), (Field.NUMBERS, numbers), (Field.PLACES, places)):
        for at, tensor in enumerate(given):
            lines[at * WIDTH + field] = tensor.data_ptr()
    held, beside = None if weights is None else weights.dtype, scales[0].dtype if scales else None
    call = _call(kind, tables[0].dtype, beside, bags[0].indices.dtype, held, outs[0].shape[1], outs[0].dtype)
    count = len(rows)
    wrong = array("q", bytes(8 * count))
    call(lines.buffer_info()[0], count, WIDTH, wrong.buffer_info()[0], count)
    if any(wrong):
        raise_for(wrong, bags, rows)


@lru_cache(1024)
def _kernel(
    kind: str, table: torch.dtype, scale: torch.dtype | None, indices: torch.dtype, weights: torch.dtype | None, columns: int,
    results: torch.dtype,
) -> RegionKernel:  # fmt: skip
    stored = "nonzeros" if scale is torch.uint8 else "i4" if table is torch.uint8 else ELEMENTS[table]
    attributes = {
        "kind": kind, "element": stored, "integers": INTEGERS[indices],
        "weights": "none" if weights is None else ELEMENTS[weights], "columns": columns,
        "wide": int(table.is_floating_point and results is not table),
    }  # fmt: skip
    what = SumBagsOp, (torch.int64, torch.int64), (), tuple(attributes.items())
    kernel = kernel_on(torch.device("cpu"), op_ir, what, schedule_of(SumBagsOp))
    assert isinstance(kernel, RegionKernel)
    return kernel


@lru_cache(1024)
def _call(*of: Any) -> Callable[..., None]:
    """Returns the kernel for these tables as a function of its words. It is kept, because finding it dominates a small call."""
    return _kernel(*of).bound(())


def kernel_of(*of: Any) -> str:
    """Returns the key of a kernel: for a kind, the dtypes of tables, scales, indices and weights, columns, and result dtype.

    CompileError if it cannot be compiled.
    """
    return _kernel(*of).key


def empty_results(bags: Sequence[BagList], columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns memory for the results of some tables, each separate, because results of an operation may not share memory."""
    return [empty((each.count, columns), dtype) for each in bags]


def sum_bags(*given: Any) -> list[Tensor]:
    """Computes the operation without the dispatcher."""
    *of_bags, scales, columns = given
    many = ManyBags(*of_bags)

    def compute(numbers: list[int], bags: list[BagList]) -> list[Tensor]:
        tables = [many.values[number].detach().contiguous() for number in numbers]
        own = [scales[number].contiguous() for number in numbers] if scales else []
        for number, table in zip(numbers, tables, strict=True):
            check_table(table, columns[number], scales[number] if scales else None)
        outs = empty_results(bags, columns[numbers[0]], torch.float32 if scales else tables[0].dtype)
        into(outs, tables, bags, many.kind, scales=own)
        return outs

    return many.by_kernel(columns, compute)


def _by_torch(*given: Any) -> list[Tensor]:
    """Computes the operation by torch's embedding_bag, on stored tables as floats."""
    *of_bags, scales, columns = given
    many = ManyBags(*of_bags)
    tables = [floats_of(*each) for each in zip(many.values, scales, columns, strict=True)] if scales else many.values
    return [
        functional.embedding_bag(
            each, table, begins, mode=many.kind, per_sample_weights=factors, include_last_offset=many.last,
            padding_idx=None if hidden < 0 else hidden,
        )
        for table, each, begins, factors, hidden in zip(
            tables, many.indices, many.offsets, many.weights, many.padding, strict=True
        )
    ]  # fmt: skip


def _traced(*given: Any) -> list[Tensor]:
    *of_bags, scales, columns = given
    many = ManyBags(*of_bags)
    return [
        table.new_empty(count, width, dtype=torch.float32 if scales else table.dtype)
        for table, count, width in zip(many.values, many.counts, columns, strict=True)
    ]


Operation(
    f"sum_bags({ManyBags.SCHEMA}, Tensor[] scales, int[] columns) -> Tensor[]", sum_bags, cuda=_by_torch, fake=_traced
).register()
