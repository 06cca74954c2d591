"""Looks up rows of many tables at once, with sparse gradients (`sparse=True` of torch's embedding_bag and embedding).

A gradient has each row once, ascending, so neither torch nor an optimizer sorts it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer.sparsity.bags.bag_lists import BagList, bag_list, index_type
from gossamer.sparsity.bags.gradients import row_gradients
from gossamer.sparsity.bags.sum_bags import WIDEST, empty_results, into

aten = torch.ops.aten

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Lookup:
    """How one table is looked up.

    kind     "sum" or "mean" of bags, or "rows" for the row of each index
    padding  an index whose row gets no gradient, -1 for none; bags ignore it
    last     whether offsets have the end of the last bag
    """

    kind: str
    padding: int = -1
    last: bool = False

    def bags(self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, gradient: bool) -> BagList:
        """Returns the bags of a look-up, or those of its `gradient`."""
        if self.kind == "rows":
            return bag_list(indices.reshape(-1, 1), None, None, self.padding if gradient else -1, False)
        return bag_list(indices, offsets, weights, self.padding, self.last)

    def plain(self, table: Tensor, indices: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """Does the look-up by torch's function."""
        padding = None if self.padding < 0 else self.padding
        if self.kind == "rows":
            return torch.nn.functional.embedding(indices, table, padding, sparse=True)
        return torch.nn.functional.embedding_bag(
            indices, table, offsets, mode=self.kind, sparse=True, per_sample_weights=weights, include_last_offset=self.last,
            padding_idx=padding,
        )  # fmt: skip


def look_up(lookups: Sequence[Lookup], operands: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    """Returns the results of look-ups. `operands` has a table, indices, offsets and weights for each, None if left out."""
    results = list[Tensor | None]([None] * len(lookups))
    groups = dict[object, list[int]]()
    for number, (table, indices, offsets, weights) in enumerate(operands):
        assert table is not None and indices is not None
        held = None if weights is None else weights.dtype
        ours = table.is_cpu and table.dtype in TYPES and 0 < table.shape[1] <= WIDEST and held in (None, table.dtype)
        kind = "sum" if lookups[number].kind == "rows" else lookups[number].kind
        key: object = (table.dtype, table.shape[1], index_type(indices, offsets), held, kind) if ours else number
        groups.setdefault(key, []).append(number)
    for key, numbers in groups.items():
        some, given = [lookups[n] for n in numbers], [operands[n] for n in numbers]
        if isinstance(key, int):
            found: Sequence[Tensor] = [some[0].plain(*given[0])]  # type: ignore[arg-type]
        else:
            found = _Lookups.apply(some, *(each for four in given for each in four))
        for number, result in zip(numbers, found, strict=True):
            results[number] = result
    return [each for each in results if each is not None]


class _Lookups(torch.autograd.Function):
    """The look-ups that one kernel computes: the same dtype, number of columns, and kind of bags."""

    @staticmethod
    def forward(ctx: Any, lookups: Sequence[Lookup], *given: Tensor | None) -> tuple[Tensor, ...]:
        operands = [given[at : at + 4] for at in range(0, len(given), 4)]
        tables = [table.detach().contiguous() for table, *_ in operands if table is not None]
        bags = [
            each.bags(indices, offsets, weights, False)
            for each, (_, indices, offsets, weights) in zip(lookups, operands, strict=True)
            if indices is not None
        ]
        kind = "sum" if lookups[0].kind == "rows" else lookups[0].kind
        outs = empty_results(bags, tables[0].shape[1], tables[0].dtype)
        into(outs, tables, bags, kind)
        ctx.lookups, ctx.kind, ctx.sizes = lookups, kind, [table.shape for table in tables]
        ctx.set_materialize_grads(False)
        weighted = [ctx.needs_input_grad[4 * n + 4] for n in range(len(tables))]
        ctx.save_for_backward(
            *(each for n, (table, *rest) in enumerate(operands) for each in (table if weighted[n] else None, *rest))
        )
        shapes = [
            (*indices.shape, out.shape[1]) if each.kind == "rows" and indices is not None else out.shape
            for each, (_, indices, *_), out in zip(lookups, operands, outs, strict=True)
        ]
        return tuple(_owned(out.view(shape)) for out, shape in zip(outs, shapes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        results = list[Any]([None] * len(needed))
        numbers, own, bags = [], list[Tensor](), list[BagList]()
        for n, (lookup, grad) in enumerate(zip(ctx.lookups, grads, strict=True)):
            if grad is None:
                continue
            table, indices, offsets, weights = saved[4 * n : 4 * n + 4]
            grad = grad.reshape(-1, ctx.sizes[n][1]).contiguous()
            if needed[4 * n + 1]:
                numbers.append(n)
                own.append(grad)
                bags.append(lookup.bags(indices, offsets, weights, True))
            if needed[4 * n + 4]:
                results[4 * n + 4] = weight_gradient(grad, table, indices, offsets, lookup.padding, lookup.last)
        if numbers:
            extents = [ctx.sizes[n][0] for n in numbers]
            for n, (rows, values) in zip(numbers, row_gradients(own, bags, extents, ctx.kind), strict=True):
                results[4 * n + 1] = torch.sparse_coo_tensor(
                    rows[None], values, ctx.sizes[n], is_coalesced=True, check_invariants=False
                )
        return tuple(results)


def _owned(view: Tensor) -> Tensor:
    """Returns a tensor with the memory of a view. Autograd refuses writes to a view that a function returns."""
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def weight_gradient(grad: Tensor, table: Tensor, indices: Tensor, offsets: Tensor | None, padding: int, last: bool) -> Tensor:
    """Returns the gradient of the weights of bags from that of their sums, by torch's function."""
    flat = indices.reshape(-1)
    if offsets is None:
        begins = torch.arange(indices.shape[0], dtype=flat.dtype, device=flat.device)
        of_entries = begins.repeat_interleave(indices.shape[1], output_size=flat.shape[0])
        begins = begins * indices.shape[1]
    else:
        begins = offsets[:-1] if last else offsets
        of_entries = torch.bucketize(torch.arange(flat.shape[0], device=flat.device), begins, right=True) - 1
    of_entries, begins = of_entries.to(flat.dtype), begins.to(flat.dtype)
    made = aten._embedding_bag_per_sample_weights_backward(grad, table.detach(), flat, begins, of_entries, 0, padding)
    return made.view(indices.shape)
