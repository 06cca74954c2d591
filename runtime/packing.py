"""Packs a dense tensor in a format: `pack` returns the arrays that a kernel reads.

    [[0, 5, 0],          positions    [0, 1, 3]
     [7, 0, 9]]   →      coordinates  [1, 0, 2]        (CSR)
                         values       [5, 7, 9]

A `Packing` has its own arrays, which `packers/fill.py` makes. The arrays of a `Format` are the operands of MLIR's
`sparse_tensor.assemble`, in the same order: for each level its positions and coordinates, as far as it has them; last the
values. Arrays of 8, 16 and 32 bits hold unsigned numbers in torch's signed types: a 16-bit coordinate of 65535 reads as -1 in
torch.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
import torch

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime import grouped_values
from gossamer.runtime.memory.huge_pages import placed
from gossamer.runtime.packers.fill import fill
from gossamer.runtime.packers.nonzeros import count_nonzeros, divided, nonzero_mask, nonzero_places

_INTEGER = {0: torch.int64, 8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed tensor.

    shape       the sizes of the dense tensor
    components  the arrays, in the order of the module docstring

    `source` has, for each stored value, its index in the flat, row-major dense tensor. A Format first pads the dense tensor to
    `padded_shape`. A Packing appends one 0, which is the source of all values that only fill up.

    `source` takes 4 bytes a value. `compact` keeps one bit for each element instead, in `pattern`, and `source` is computed
    from it on demand. Both are None (`has_source` is False) where the owner packs the dense tensor again when it changes.
    """

    format: Format | Packing
    shape: tuple[int, ...]
    components: tuple[torch.Tensor, ...]
    source_or_none: torch.Tensor | None = field(repr=False)
    pattern: torch.Tensor | None = field(default=None, repr=False)

    @property
    def has_source(self) -> bool:
        """Whether `source` is known."""
        return self.source_or_none is not None or self.pattern is not None

    @property
    def source(self) -> torch.Tensor:
        """The index of each stored value in the dense tensor; see the class."""
        if self.source_or_none is not None:
            return self.source_or_none
        assert self.pattern is not None
        bits = _unpacked_bits(self.pattern, self.shape)
        source = fill(self.format, bits)[1] if isinstance(self.format, Packing) else pack(bits, self.format).source
        return source.to(self.values.device)

    @property
    def values(self) -> torch.Tensor:
        """The stored values, one-dimensional."""
        return self.components[-1]

    @property
    def elements(self) -> torch.Tensor:
        """The stored elements of the dense tensor. Differs from `values` where the values are quantized."""
        if not isinstance(self.format, Groups):
            return self.values
        return grouped_values.decoded(self.format, *self.components[-self.format.coded :])

    @property
    def nnz(self) -> int:
        """The number of stored elements, including zeros that a block or an N:M group stores."""
        return self.values.numel() * 8 // self.format.bits if isinstance(self.format, Groups) else self.values.numel()

    @property
    def nbytes(self) -> int:
        """The bytes of all components, and of the pattern if there is one."""
        return sum(array.nbytes for array in (*self.components, self.pattern) if array is not None)

    @cached_property
    def words(self) -> tuple[int, ...]:
        """Address and length of each component, as a kernel's entry takes them."""
        return tuple(word for component in self.components for word in (component.data_ptr(), component.numel()))

    def unpack(self) -> torch.Tensor:
        """Returns the dense tensor, row-major."""
        return self._spread(self.elements)

    def _spread(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor, row-major, with these elements in the stored places and 0 elsewhere."""
        filled = self.shape if isinstance(self.format, Packing) else self.format.padded_shape(self.shape)
        flat = elements.new_zeros(prod(filled) + isinstance(self.format, Packing))
        flat[self.source] = elements
        return flat[: prod(filled)].view(filled)[tuple(slice(extent) for extent in self.shape)].contiguous()

    def to(self, device: torch.device) -> "Packed":
        """Returns the packed tensor on another device; itself if it is already there."""
        if self.values.device == device:
            return self
        arrays, source = tuple(array.to(device) for array in self.components), self.source_or_none
        return replace(self, components=arrays, source_or_none=None if source is None else source.to(device))

    def with_values(self, values: torch.Tensor) -> "Packed":
        """Returns the same arrays with other values, and without `source`: the caller knows where these values come from."""
        return replace(self, components=(*self.components[:-1], values), source_or_none=None)

    def has_pattern_of(self, other: "Packed") -> bool:
        """Whether both store the same places of tensors of the same shape, in the same format."""
        coded = self.format.coded if isinstance(self.format, Groups) else 1
        pairs = zip(self.components[:-coded], other.components[:-coded], strict=True)
        return self.shape == other.shape and self.format == other.format and all(torch.equal(a, b) for a, b in pairs)

    def compact(self) -> "Packed":
        """Returns the same arrays with a bit for each element in place of `source`.

        Returns itself if the bits would be larger, or would not give the same `source`.
        """
        if self.source_or_none is None or prod(self.shape) / 8 >= self.source_or_none.nbytes:
            return self
        stored = self._spread(self.values.new_ones(self.nnz, dtype=torch.bool))
        bits = torch.from_numpy(np.packbits(stored.cpu().numpy()))
        compacted = replace(self, source_or_none=None, pattern=bits)
        return compacted if torch.equal(compacted.source, self.source_or_none) else self

    def refresh(self, dense: torch.Tensor) -> bool:
        """Copies the values of `dense` (same shape and dtype), if all its nonzeros lie in the stored pattern.

        Returns False, and changes nothing, if a nonzero lies elsewhere.
        """
        elements = self._gather(dense)
        if elements is None:
            return False
        values = _stored(self.format, elements)
        for own, new in zip(self.components[-len(values) :], values, strict=True):
            own.copy_(new)
        return True

    def matches(self, dense: torch.Tensor) -> bool:
        """Whether `dense` (same shape and dtype) has the stored values, bit for bit, and 0 elsewhere."""
        elements = self._gather(dense)
        return elements is not None and torch.equal(elements.view(torch.uint8), self.elements.view(torch.uint8))

    def _gather(self, dense: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of `dense` in the stored pattern; None if a nonzero lies elsewhere."""
        dtype = torch.float32 if isinstance(self.format, Groups) else self.values.dtype
        if tuple(dense.shape) != self.shape or dense.dtype != dtype:
            raise FormatError(
                f"packed from {dtype} of shape {self.shape}, got {dense.dtype} of shape {tuple(dense.shape)}: pack it anew"
            )
        dense = dense.detach()
        values = _flat(dense, self.format).index_select(0, self.source)
        return values if count_nonzeros(values) == count_nonzeros(dense) else None


def pack(dense: torch.Tensor, format: Format | Packing) -> Packed:
    """Stores the nonzeros of `dense` (any strides, any dtype; NaN is a nonzero) in `format`. Coordinates ascend.

    Some zeros are stored, too:

    dense levels below a sparse one  all their zeros
    N:M groups                       their first zeros, up to N elements
    blocks                           0 beyond the edge of the tensor

    Raises FormatError if positions or coordinates overflow their width, or if a group has more than N nonzeros. Also if a
    unique level would need a coordinate twice, and for levels whose arrays MLIR cannot assemble.
    """
    dense = dense.detach()
    if isinstance(format, Packing):
        arrays, source = fill(format, dense)
        held = _stored(format, _flat(dense, format).index_select(0, source))
        return Packed(format, tuple(dense.shape), placed((*arrays, *held)), source)
    layout = _Layout(format, tuple(dense.shape))
    occupied = layout.by_entry(_in_level_order(nonzero_mask(dense), format))
    arrays, stored = layout.walk((occupied if occupied.shape[1] == 1 else occupied.any(1)).flatten())
    source = layout.source(stored)
    values = _flat(dense, format).index_select(0, source)
    return Packed(format, layout.shape, placed((*arrays, values)), source)


class _Layout:
    """Walks the levels of a format for one shape, from the outermost level to the last one that is not dense.

    The dense levels below that one make each stored entry a block of `block` values. An entry of a level is a
    linear index over the sizes of the levels down to it, so that ascending entries are in storage order.
    """

    def __init__(self, format: Format, shape: tuple[int, ...]) -> None:
        sparse = [number for number, level in enumerate(format.levels) if level.kind != "dense"]
        outer = sparse[-1] + 1 if sparse else 0
        sizes = format.level_sizes(shape)
        self.format, self.shape, self.block = format, shape, prod(sizes[outer:])
        self.levels, self.sizes = format.levels[:outer], sizes[:outer]
        # The divisions below take half the time with 32 bits.
        self.integer = torch.int32 if prod(sizes) < 1 << 31 else torch.int64
        self._check()

    def _check(self) -> None:
        pos, crd = self.format.pos_width, self.format.crd_width
        for level, size in zip(self.levels, self.sizes, strict=True):
            if level.kind == "batch":
                raise FormatError(f"'{level}': pack the members of a batch one by one and stack their arrays")
            if level.kind != "dense" and crd and size > 1 << crd:
                raise FormatError(
                    f"'{level}': coordinates up to {size - 1} do not fit {crd} bits, "
                    f"use format.with_widths({pos}, {_width_for(size - 1)})"
                )

    def by_entry(self, in_level_order: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that is in level order as [entries of the last level, block]."""
        return in_level_order.view(prod(self.sizes), self.block)

    def source(self, entries: torch.Tensor) -> torch.Tensor:
        """Returns the index of each value of these entries of the last level, in the flat, row-major, padded tensor."""
        filled, sizes = self.format.padded_shape(self.shape), self.format.level_sizes(self.shape)
        places, rest = torch.zeros_like(entries), entries
        inside = entries.new_zeros(1)
        for number, (level, size) in enumerate(zip(self.format.levels, sizes, strict=True)):
            stride = prod(filled[level.dim + 1 :]) * (1 if level.inner else level.block)
            if number >= len(self.levels):
                coordinates = torch.arange(size, dtype=self.integer, device=entries.device)
                inside = (inside[:, None] + coordinates * stride).flatten()
                continue
            below = prod(self.sizes[number + 1 :])
            coordinate, rest = divided(rest, below) if below > 1 else (rest, torch.zeros_like(rest))
            places += coordinate * stride
        return places if self.block == 1 else (places[:, None] + inside).flatten()

    def walk(self, occupied: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns the arrays of positions and coordinates, and the stored entries of the last level.

        `occupied` says for each entry of the last level, flat, whether it has a nonzero.
        """
        leaves = nonzero_places(occupied, self.integer)
        arrays: list[torch.Tensor] = []
        stored = leaves.new_zeros(1)
        at = 0
        while at < len(self.levels):
            size, end = self.sizes[at], at + 1
            if self.levels[at].kind == "dense":
                inside = torch.arange(size, dtype=self.integer, device=stored.device)
                stored = (stored[:, None] * size + inside).flatten()
            elif self.levels[at].structured:
                stored = self._choose(occupied.view(stored.numel(), size))
                arrays += self._coordinates(stored, at, end)
            else:
                while end < len(self.levels) and self.levels[end].kind == "singleton":
                    end += 1
                below, span = prod(self.sizes[end:]), prod(self.sizes[at:end])
                entries = leaves if below <= 1 else torch.unique_consecutive(divided(leaves, below)[0])
                arrays.append(self._positions(divided(entries, max(span, 1))[0], stored, at))
                arrays += self._coordinates(entries, at, end)
                stored = entries
            at = end
        return arrays, stored

    def _positions(self, parents: torch.Tensor, stored: torch.Tensor, at: int) -> torch.Tensor:
        """Returns where the entries of each stored parent begin, and where the last ones end; both for each if loose."""
        level, pos, count = self.levels[at], self.format.pos_width, parents.numel()
        if pos and count >= 1 << pos:
            raise FormatError(
                f"'{level}': positions up to {count} do not fit {pos} bits, "
                f"use format.with_widths({_width_for(count)}, {self.format.crd_width})"
            )
        edges = torch.cat([torch.searchsorted(parents, stored, out_int32=True), stored.new_full((1,), count)])
        if level.kind == "loose_compressed":
            edges = torch.stack([edges[:-1], edges[1:]], 1).flatten()
        return edges.to(_INTEGER[pos])

    def _coordinates(self, entries: torch.Tensor, at: int, end: int) -> list[torch.Tensor]:
        """Returns an array for each level from `at` to `end` - 1, or one array [entries, levels] if they are interleaved."""
        arrays = []
        for number in range(at, end):
            below, size = prod(self.sizes[number + 1 : end]), self.sizes[number]
            prefixes = divided(entries, below)[0] if below > 1 else entries
            if number + 1 < end and not self.levels[number].nonunique:
                twice = (prefixes[1:] == prefixes[:-1]).nonzero()
                if twice.numel():
                    coordinate = int(prefixes[twice[0]]) % size
                    raise FormatError(f"'{self.levels[number]}' needs {coordinate} twice, make it nonunique")
            coordinates = divided(prefixes, size)[1] if size and number else prefixes
            arrays.append(coordinates.to(_INTEGER[self.format.crd_width]))
        if end == at + 1 or self.levels[at + 1].soa:
            return arrays
        if end < len(self.format.levels):
            raise FormatError(f"'{self.levels[at + 1]}': interleaved singletons must be the last levels, use soa")
        return [torch.stack(arrays, 1)]

    def _choose(self, groups: torch.Tensor) -> torch.Tensor:
        """Returns the n entries that each of the [groups, m] stores: its nonzeros, and its first zeros up to n entries."""
        structured, size = self.levels[-1], groups.shape[1]
        assert structured.structured
        n, m = structured.structured
        if size < n:
            raise FormatError(f"'{structured}' stores {n} elements, but d{structured.dim} has only {size}")
        spare = n - groups.sum(1, dtype=self.integer)
        full = (spare < 0).nonzero()
        if full.numel():
            group = int(full[0])
            place = self.source(torch.tensor([group * size]))[0]
            index = torch.unravel_index(place, self.format.padded_shape(self.shape))
            start = int(index[structured.dim])
            row = ", ".join(str(int(i)) for dim, i in enumerate(index) if dim != structured.dim)
            raise FormatError(
                f"{self.format.name} stores {n} of every {m} elements, but row {row} has "
                f"{n - int(spare[group])} nonzeros in elements {start} to {start + size - 1}: "
                f"prune it to {n}:{m} or choose another format"
            )
        chosen = groups | ((~groups).cumsum(1, dtype=self.integer) <= spare[:, None])
        return nonzero_places(chosen, self.integer)


def _unpacked_bits(bits: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a bool tensor of this shape from one bit for each element."""
    flat = np.unpackbits(bits.numpy(), count=prod(shape)).view(np.bool_)
    return torch.from_numpy(flat).view(shape)


def _stored(format: Format | Packing, elements: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the arrays that store these elements. Raises FormatError for elements that the format cannot represent."""
    return grouped_values.encoded(format, elements) if isinstance(format, Groups) else (elements,)


def _flat(dense: torch.Tensor, format: Format | Packing) -> torch.Tensor:
    """Returns the flat tensor that `source` is an index into."""
    if isinstance(format, Packing):
        return torch.cat([dense.flatten(), dense.new_zeros(1)])
    return _filled(dense, format).flatten()


def _filled(dense: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the tensor, padded with zeros to whole blocks."""
    filled = format.padded_shape(dense.shape)
    edges = [edge for have, want in zip(dense.shape, filled, strict=True) for edge in (want - have, 0)]
    return torch.nn.functional.pad(dense, edges[::-1]) if any(edges) else dense


def _in_level_order(dense: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the elements in the order of the levels, flat, padded with zeros to whole blocks."""
    dense = _filled(dense, format)
    numbers = range(len(format.levels))
    by_dim = sorted(numbers, key=lambda number: format.levels[number].dim)
    split = [format.levels[number].size(dense.shape[format.levels[number].dim]) for number in by_dim]
    return dense.reshape(split).permute([by_dim.index(number) for number in numbers]).flatten()


def _width_for(number: int) -> int:
    """Returns the least width in bits that holds the number."""
    return next(width for width in (8, 16, 32, 64) if number < 1 << width)
