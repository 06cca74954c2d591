"""Computes gradients of tables from those of their bags: sums for the rows that have an index.

    gossamer::bags_gradient(grads, indices, offsets, weights, padding, kind, last, rows) -> Tensor[]     dense gradients
    gossamer::max_bags(table, indices, offsets, padding, last) -> (Tensor, Tensor)                       maxima and their rows
    gossamer::max_bags_gradient(grad, places, rows) -> Tensor

The entries are sorted by their rows. Then the gradients for a row are a bag of rows, too, and `kernel.sum_bags` sums them. Each
row is written once, and results do not depend on the number of threads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.bags import SortBagsOp
from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.operations import Operation
from gossamer.sparsity.bags.bag_lists import INTEGERS, BagList, ManyBags, bag_list, lines_of, raise_for, zeros_of
from gossamer.sparsity.bags.sum_bags import empty_results, into
from gossamer.sparsity.compiler.op_kernels import run

_MOST = 1 << 31  # the limit for rows of a table and for entries of all bags, because both share a 64-bit word


def sorted_bags(bags: Sequence[BagList], rows: Sequence[int], kind: str, wide: torch.dtype) -> list[tuple[Tensor, BagList]]:
    """Returns, for every table, the distinct rows of its entries, ascending, and for each row a bag of the bags with that row.

    kind  "sum" or "mean"
    wide  float32 or float64: the dtype of the factors of bags' gradients
    """
    entries = [each.entries for each in bags]
    total, count = sum(entries), len(bags)
    if total >= _MOST or max(rows, default=0) >= _MOST:
        raise ArgumentError(
            f"gradient of embedding bags: {total} indices of {max(rows)} rows are more than 2^31: split the batch"
        )
    weights, scaled = bags[0].weights, kind == "mean" or bags[0].weights is not None
    lines, firsts, first = [], list[int](), 0
    for each, extent, size in zip(bags, rows, entries, strict=True):
        lines.append(each.line(extent, first))
        firsts.append(first)
        first += size
    numbers, words = empty([total], torch.int64), empty([2 * total], torch.int64)
    starts, members = (empty([size], torch.int32) for size in (total + count, total))
    own_members = empty([total * scaled], torch.int32)
    scales, own_scales = (empty([total * scaled], wide) for _ in range(2))
    counts, different = zeros_of(count)
    wrong, problems = zeros_of(count)
    run(
        SortBagsOp, [lines_of(lines)],
        [numbers, starts, members, scales, different, problems, words, own_members, own_scales],
        integers=INTEGERS[bags[0].indices.dtype], weights="none" if weights is None else ELEMENTS[weights.dtype],
        scaled=int(scaled),
    )  # fmt: skip
    if any(wrong):
        raise_for(wrong, bags, rows)
    found = []
    for table, (first, size, found_rows) in enumerate(zip(firsts, entries, counts, strict=True)):
        begins = starts[first + table : first + table + found_rows + 1]
        own = BagList(members[first : first + size], begins, scales[first : first + size] if scaled else None, -1, True)
        found.append((numbers[first : first + found_rows], own))
    return found


def row_gradients(
    grads: Sequence[Tensor], bags: Sequence[BagList], rows: Sequence[int], kind: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns, for every table, the distinct rows of its entries, ascending, and their gradients [., columns].

    grads  [bags, columns] each, contiguous, with the same float dtype and number of columns
    """
    ordered = sorted_bags(bags, rows, kind, _wide(grads[0].dtype))
    outs = empty_results([own for _, own in ordered], grads[0].shape[1], grads[0].dtype)
    into(outs, grads, [own for _, own in ordered], "sum")
    return [(numbers, values) for (numbers, _), values in zip(ordered, outs, strict=True)]


def bags_gradient(*given: Any) -> list[Tensor]:
    """Computes the operation without the dispatcher."""
    *of_bags, rows = given
    many = ManyBags(*of_bags)

    def compute(numbers: list[int], bags: list[BagList]) -> list[Tensor]:
        grads, extents = [many.values[number].contiguous() for number in numbers], [rows[number] for number in numbers]
        ordered = sorted_bags(bags, extents, many.kind, _wide(grads[0].dtype))
        outs = [empty((extent, each.shape[1]), each.dtype).zero_() for each, extent in zip(grads, extents, strict=True)]
        into(outs, grads, [each for _, each in ordered], "sum", numbers=[each for each, _ in ordered])
        return outs

    return many.by_kernel([each.shape[1] for each in many.values], compute)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def _traced(*given: Any) -> list[Tensor]:
    *of_bags, rows = given
    return [each.new_empty(extent, each.shape[1]) for each, extent in zip(ManyBags(*of_bags).values, rows, strict=True)]


def _max_bags(table: Tensor, indices: Tensor, offsets: Tensor | None, padding: int, last: bool) -> tuple[Tensor, Tensor]:
    bags = bag_list(indices, offsets, None, padding, last)
    out, places = (empty((bags.count, table.shape[1]), dtype) for dtype in (table.dtype, torch.int32))
    into([out], [table.detach().contiguous()], [bags], "max", places=[places])
    return out, places


def _traced_max(table: Tensor, indices: Tensor, offsets: Tensor | None, padding: int, last: bool) -> tuple[Tensor, Tensor]:
    count = indices.shape[0] if offsets is None else offsets.shape[0] - last
    return table.new_empty(count, table.shape[1]), table.new_empty(count, table.shape[1], dtype=torch.int32)


def _max_bags_gradient(grad: Tensor, places: Tensor, rows: int) -> Tensor:
    there = torch.where(places >= 0, grad, 0)
    return empty((rows, grad.shape[1]), grad.dtype).zero_().scatter_add_(0, places.clamp(min=0).long(), there)


Operation(f"bags_gradient({ManyBags.SCHEMA}, SymInt[] rows) -> Tensor[]", bags_gradient, fake=_traced).register()
Operation(
    "max_bags(Tensor table, Tensor indices, Tensor? offsets, int padding, bool last) -> (Tensor, Tensor)",
    _max_bags,
    fake=_traced_max,
).register()
Operation(
    "max_bags_gradient(Tensor grad: T[bags columns], Tensor places: i32[bags columns], SymInt rows) -> Tensor: T[rows columns]",
    _max_bags_gradient,
).register()
