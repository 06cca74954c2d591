"""Computes products of sparse tensors by torch's operations, on their device, if there is no kernel for them.

    sparse with sparse   pairs entries that agree in shared letters (expand), sorts them by the letters of the result, and sums
                         (compress): SpGEMM by expand, sort, compress (Bell, Dalton and Olson, 2012)
    sparse with dense    collects the elements of the dense factors for each entry

Arrays with an element for every pair, or for every entry and dense column, are made in pieces of bounded size. Sums of narrow
floats are in f32. The order of sums is always the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from gossamer.sparsity.arrays.stored_entries import assemble, blocked, coordinates, within
from gossamer.sparsity.compiler.operands import Bound, Spec, bind, extents
from gossamer.sparsity.operations.segments import segment_reduce, widened

_AT_ONCE = 1 << 24  # elements of a piece: about a gigabyte, including memory for sorting

Sizes = dict[str, int]


@dataclass(frozen=True, eq=False)
class _Entries:
    """Entries, with a coordinate ([entries] of int64) for each letter; values are [entries] or [entries, columns]."""

    at: dict[str, Tensor]
    values: Tensor

    @classmethod
    def of(cls, operand: Bound) -> "_Entries":
        """Returns the entries of an operand, without padding of edge blocks, in the dtype of sums."""
        assert operand.format is not None
        at, values = coordinates(operand.format, operand.shape, operand.arrays), widened(operand.values)
        if blocked(operand.format):
            inside = within(operand.shape, at).nonzero().flatten()
            at, values = [crd[inside] for crd in at], values[inside]
        return cls(dict(zip(operand.letters, at, strict=True)), values)

    def summed(self, kept: str, sizes: Sizes) -> "_Entries":
        """Returns the entries with only the letters of `kept`, sorted by them; entries that agree are summed."""
        linear, order = _linear(self.at, kept, sizes, self.values).sort(stable=True)
        counts = torch.unique_consecutive(linear, return_counts=True)[1]
        positions = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        first = order[positions[:-1]]
        values = _segment_sums(positions, self.values.index_select(0, order))
        return _Entries({letter: self.at[letter][first] for letter in kept}, values)


def einsum(arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> Tensor:
    """Computes `gossamer::einsum`, with a dense result."""
    spec = Spec.parse(text)
    operands = bind(arrays, sizes, spec)
    extent, result = extents(operands), spec.result.letters
    factors = [operand for operand in operands if not operand.sparse]
    entries = _joined(operands, "".join([result, *(factor.letters for factor in factors)]), extent)
    bound = "".join(letter for letter in result if letter in entries.at)
    free = "".join(letter for letter in result if letter not in entries.at)
    columns = prod(extent[letter] for letter in free)
    out = entries.values.new_zeros(prod(extent[letter] for letter in bound), *([columns] if free else []))
    for piece in _pieces(entries, factors, extent):
        found = _Entries(piece.at, _times(piece, factors, free, extent))
        if set(bound) != set(found.at):
            found = found.summed(bound, extent)
        _add(out, _linear(found.at, bound, extent, found.values), found.values)  # no place occurs twice
    out = out.view([extent[letter] for letter in bound + free])
    return out.permute([(bound + free).index(letter) for letter in result]).to(arrays[-1].dtype).contiguous()


def sample(arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> Tensor:
    """Computes `gossamer::sample`: a value for each stored entry of the first operand, 0 for padding of edge blocks."""
    spec = Spec.parse(text)
    pattern, *factors = bind(arrays, sizes, spec)
    assert pattern.format is not None
    extent = extents([pattern, *factors])
    at = coordinates(pattern.format, pattern.shape, pattern.arrays)
    inside = within(pattern.shape, at)
    there = [torch.where(inside, crd, 0) for crd in at]
    ones = torch.ones_like(widened(pattern.values))
    entries = _Entries(dict(zip(pattern.letters, there, strict=True)), ones)
    found = [_times(piece, factors, "", extent) for piece in _pieces(entries, factors, extent)]
    values = torch.cat(found) if found else pattern.values
    return torch.where(inside, values, 0).to(pattern.values.dtype)


def einsum_sparse(arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    """Computes `gossamer::einsum_sparse`: the arrays of a result in a format."""
    spec = Spec.parse(text)
    operands = bind(arrays, sizes, spec)
    extent, result = extents(operands), spec.result
    assert result.format is not None
    found = _joined(operands, result.letters, extent)
    if len(operands) == 1:
        found = found.summed(result.letters, extent)
    shape = [extent[letter] for letter in result.letters]
    return list(assemble(result.format, shape, list(found.at.values()), found.values.to(arrays[-1].dtype)))


def add_sparse(arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    """Computes `gossamer::add_sparse`: the arrays of the union of two tensors in a format."""
    spec = Spec.parse(text)
    operands = bind(arrays, sizes, spec)
    (left, right), extent = [_Entries.of(operand) for operand in operands], extents(operands)
    assert spec.result.format is not None
    at = [torch.cat([left.at[letter], right.at[letter]]) for letter in spec.result.letters]
    shape = [extent[letter] for letter in spec.result.letters]
    *structure, values = assemble(spec.result.format, shape, at, torch.cat([left.values, right.values]))
    return [*structure, values.to(arrays[-1].dtype)]


# Sparse with sparse


def _joined(operands: Sequence[Bound], needed: str, sizes: Sizes) -> _Entries:
    """Returns the product of all sparse operands. If there are several, it has only the needed letters, in that order.

    Other letters are summed as soon as no remaining operand has them.
    """
    first, *others = [operand for operand in operands if operand.sparse]
    found = _Entries.of(first)
    for number, other in enumerate(others):
        later = "".join([needed, *(each.letters for each in others[number + 1 :])])
        found = _paired(found, _Entries.of(other), later, sizes)
    return found


def _paired(left: _Entries, right: _Entries, needed: str, sizes: Sizes) -> _Entries:
    """Returns the products of all pairs of entries that agree in shared letters, summed if they agree in the needed letters."""
    shared = "".join(letter for letter in left.at if letter in right.at)
    kept = "".join(letter for letter in dict.fromkeys(needed) if letter in left.at or letter in right.at)
    keys, order = _linear(right.at, shared, sizes, right.values).sort(stable=True)
    wanted = _linear(left.at, shared, sizes, left.values)
    first = torch.searchsorted(keys, wanted)
    times = torch.searchsorted(keys, wanted, right=True) - first
    pieces = []
    for low, high in _spans(times):
        which = torch.arange(low, high, device=times.device).repeat_interleave(times[low:high])
        begun = times[low:high].cumsum(0) - times[low:high]
        place = order[first[which] + torch.arange(which.numel(), device=times.device) - begun[which - low]]
        at = {letter: left.at[letter][which] if letter in left.at else right.at[letter][place] for letter in kept}
        pieces.append(_Entries(at, left.values[which] * right.values[place]).summed(kept, sizes))
    if len(pieces) == 1:
        return pieces[0]
    at = {letter: torch.cat([piece.at[letter] for piece in pieces]) for letter in kept}
    return _Entries(at, torch.cat([piece.values for piece in pieces])).summed(kept, sizes)


def _spans(times: Tensor) -> list[tuple[int, int]]:
    """Returns spans of entries that have about as many pairs as a piece may have, at least one span."""
    ends = times.cumsum(0)
    total = int(ends[-1]) if times.numel() else 0
    cuts = torch.searchsorted(ends, torch.arange(_AT_ONCE, max(total, _AT_ONCE), _AT_ONCE, device=ends.device), right=True)
    bounds = [0, *torch.unique_consecutive(cuts).tolist(), times.numel()]
    return [(low, high) for low, high in pairwise(bounds) if low < high] or [(0, 0)]


# Sparse with dense


def _pieces(entries: _Entries, factors: Sequence[Bound], sizes: Sizes) -> Iterator[_Entries]:
    """Yields parts of the entries, so that a part times the other letters of the dense factors is one piece."""
    others = {letter for factor in factors for letter in factor.letters} - set(entries.at)
    count = max(_AT_ONCE // max(prod(sizes[letter] for letter in others), 1), 1)
    for low in range(0, entries.values.shape[0], count):
        part = slice(low, low + count)
        yield _Entries({letter: crd[part] for letter, crd in entries.at.items()}, entries.values[part])


def _times(entries: _Entries, factors: Sequence[Bound], free: str, sizes: Sizes) -> Tensor:
    """Returns entries times dense factors: [entries], or [entries, columns] for the letters of `free`. Others are summed."""
    letters = "".join([free, *(factor.letters for factor in factors)])
    inner = "".join(letter for letter in dict.fromkeys(letters) if letter not in entries.at)
    product = entries.values.view(entries.values.shape[0], *(1 for _ in inner))
    for factor in factors:
        own = "".join(letter for letter in factor.letters if letter in entries.at)
        rest = "".join(letter for letter in inner if letter in factor.letters)
        values = widened(factor.values).permute([factor.letters.index(letter) for letter in own + rest])
        rows = values.reshape(prod(sizes[letter] for letter in own), *(sizes[letter] for letter in rest))
        rows = rows.index_select(0, _linear(entries.at, own, sizes, product)) if own else rows
        product = product * rows.view(rows.shape[0], *(sizes[letter] if letter in rest else 1 for letter in inner))
    product = product.sum(tuple(range(1 + len(free), product.dim()))) if len(inner) > len(free) else product
    return product.reshape(product.shape[0], prod(product.shape[1:])) if free else product


def _segment_sums(positions: Tensor, values: Tensor) -> Tensor:
    """Returns the sum of the values of each segment, [segments, ...]."""
    if values.dim() == 1 and not values.is_complex():
        return segment_reduce(positions, values, "sum")
    if values.is_floating_point():
        return torch.segment_reduce(values, "sum", offsets=positions, axis=0, initial=0)
    rows = torch.arange(positions.numel() - 1, device=values.device).repeat_interleave(positions.diff())
    return _add(values.new_zeros(positions.numel() - 1, *values.shape[1:]), rows, values)


def _add(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Adds values to rows. Complex numbers go part by part, because torch multiplies them by 1, and infinities become NaN."""
    if values.is_complex():
        torch.view_as_real(out).index_add_(0, rows, torch.view_as_real(values.resolve_conj()))
        return out
    return out.index_add_(0, rows, values)


def _linear(at: dict[str, Tensor], letters: str, sizes: Sizes, like: Tensor) -> Tensor:
    """Returns a number for the coordinates in some letters, ascending in their order, for each row of `like`."""
    linear = torch.zeros(like.shape[0], dtype=torch.int64, device=like.device)
    for letter in letters:
        linear = linear * sizes[letter] + at[letter]
    return linear
