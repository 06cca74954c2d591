"""Makes the arrays of a format from nonzeros of a dense tensor or from coordinates in any order, and checks given arrays.

gossamer::set_places(mask) -> Tensor                           the places where a vector of bools is set
gossamer::well_formed(arrays, shape, format) -> Tensor         the first array; FormatError if the arrays are not well-formed
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.operations import Operation
from gossamer.sparsity.arrays.structure import check
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.open_sizes import divisor
from gossamer.sparsity.operations.sparse_results import convert, sizes_stay_inside

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters_of(tensor: Tensor) -> str:
    """Returns a letter for each dimension."""
    return _LETTERS[: tensor.dim()]


def stored(format: Format, shape: Sequence[int], at: Sequence[Tensor], values: Tensor) -> Bound:
    """Returns the tensor with these values at these coordinates (int64, in bounds, any order; duplicates are summed)."""
    ends = torch.arange(2, device=values.device) * values.shape[0]
    return convert(Bound(Operand(_LETTERS[: len(shape)], _any_order(len(shape))), (ends, *at, values), tuple(shape)), format)


def nonzeros(dense: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns the coordinates of the nonzeros of a tensor (NaN is one), and their values. A 0-d tensor has one entry."""
    if not dense.dim():
        return [], dense.reshape(1)
    which = set_places((dense.detach() != 0).flatten())
    values, at = dense.flatten().index_select(0, which), list[Tensor]()
    for extent in reversed(dense.shape[1:]):
        above = which // divisor(extent)
        at.insert(0, which - above * extent)
        which = above
    return [which, *at], values


def set_places(mask: Tensor) -> Tensor:
    """Returns the places where a vector of bools is set, in order. By default Dynamo does not take `nonzero` into a graph."""
    with sizes_stay_inside():
        out: Tensor = torch.ops.gossamer.set_places.default(mask)
    return out


def checked(format: Format, shape: Sequence[int], structure: Sequence[Tensor], values: Tensor) -> Sequence[Tensor]:
    """Returns positions and coordinates. FormatError unless they are well-formed; a compiled graph checks them when it runs."""
    values = values.detach()
    if not structure or not torch.compiler.is_compiling():
        check(format, shape, (*structure, values))
        return structure
    first: Tensor = torch.ops.gossamer.well_formed.default([*structure, values], list(shape), str(format))
    return [first, *structure[1:]]  # all readers use the first one, so none skips the check


@cache
def _any_order(rank: int) -> Format:
    """Returns the format for coordinates in any order, with possible duplicates."""
    levels = (replace(level, nonunique=True, nonordered=True) for level in Format.coo(rank).levels)
    return Format(tuple(levels), rank)


def _set_places(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()


def _set_places_fake(mask: Tensor) -> Tensor:
    return mask.new_empty([torch.library.get_ctx().new_dynamic_size(min=0)], dtype=torch.int64)


def _well_formed(arrays: list[Tensor], shape: list[int], format: str) -> Tensor:
    check(Format.parse(format), shape, arrays)
    return arrays[0].clone()


def _well_formed_fake(arrays: list[Tensor], shape: list[int], format: str) -> Tensor:
    return torch.empty_like(arrays[0])


Operation(
    "set_places(Tensor mask) -> Tensor", _set_places, _set_places, _set_places_fake, batched=batched_one_by_one
).register()
Operation(
    "well_formed(Tensor[] arrays, SymInt[] shape, str format) -> Tensor",
    _well_formed,
    _well_formed,
    _well_formed_fake,
    batched=batched_one_by_one,
).register()
