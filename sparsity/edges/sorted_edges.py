"""`SortedEdges`: an edge list sorted into a CSR matrix, so that gathers and scatters over edges run as SpMM and SDDMM.

    sums      out[t] = sum over the edges e into t of weight[e] * x[source[e]]
    products  out[e] = <a[target[e]], b[source[e]]>

Edges keep their numbers: weights and products are in the order of the list. With several heads each node becomes `heads` nodes:
[nodes, heads, features] is read as [nodes * heads, features], so one product serves all heads without a copy.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gossamer.dialects.errors import IndexRangeError
from gossamer.dialects.format import Format
from gossamer.runtime.memory.warm_memory import empty_like
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.arrays.sorting import sort_keys
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, Spec, dense
from gossamer.sparsity.operations.calls import Call, planned_call
from gossamer.sparsity.operations.dense_results import einsum, einsum_ir, sample
from gossamer.sparsity.operations.dispatch import watched
from gossamer.sparsity.operations.matrix_calls import ByRows, RowProduct

_NARROW = Format.CSR.with_widths(32, 32)


@dataclass(frozen=True, eq=False)
class SortedEdges:
    """The edges of a graph as the entries of a CSR matrix.

    positions    [targets + 1]  where the entries of each target start
    coordinates  [entries]      the source of each entry
    order        [entries]      the number of each entry's edge; None if the list is in this order
    sources      the number of columns
    """

    positions: Tensor
    coordinates: Tensor
    order: Tensor | None
    sources: int
    _by_heads: dict[int, "SortedEdges"] = field(default_factory=dict)
    _calls: dict[torch.dtype, Call | None] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Tensor, target: Tensor, sources: int, targets: int, wrapping: str = "") -> "SortedEdges":
        """Sorts edges ([edges] integers each) by target. IndexRangeError if a node is out of bounds.

        Edges with the same target keep their order. Parallel edges are separate entries. Negative nodes count from the end, if
        `wrapping` contains their end, "source" or "target".
        """
        source, target = _nodes("source", source, sources, wrapping), _nodes("target", target, targets, wrapping)
        integers = torch.int32 if max(source.numel(), sources, targets) < 1 << 31 else torch.int64
        positions, order = sort_keys(target, targets, integers)
        if order is not None:
            source = source.index_select(0, order)
        # A copy, because the memory of the list may be freed or written to.
        source = source.to(integers, copy=order is None, memory_format=torch.contiguous_format)
        return cls(positions, source, order, sources)

    @property
    def targets(self) -> int:
        """The number of rows."""
        return self.positions.numel() - 1

    @cached_property
    def degrees(self) -> Tensor:
        """The number of edges into each target, [targets]."""
        return self.positions.diff()

    def sorted(self, weight: Tensor) -> Tensor:
        """Returns rows of edges [edges, ...] in the order of the entries, contiguous."""
        return weight.contiguous() if self.order is None else weight.index_select(0, self.order)

    def unsorted(self, weight: Tensor) -> Tensor:
        """Returns rows of entries in the order of the edges, the inverse of `sorted`."""
        return weight if self.order is None else torch.empty_like(weight).index_copy_(0, self.order, weight)

    def sums(self, x: Tensor, values: Tensor) -> Tensor:
        """Returns, for each target, the sum of values times rows of x over its entries, [targets, heads, features].

        x       [sources, heads, features], contiguous
        values  [entries of `with_heads(heads)`], of the same dtype
        """
        heads, features = x.shape[1:]
        return self.with_heads(heads).times(x.view(-1, features), values).view(self.targets, heads, features)

    def times(self, x: Tensor, values: Tensor) -> Tensor:
        """Returns the matrix with values [entries] times x [sources, features], contiguous, of one dtype, without gradients.

        It does not check the structure, which was checked when the edges were sorted. This saves time for small products.
        """
        rows, features = self.targets, x.shape[1]
        call = self._call(x.dtype) if x.is_cpu and features > 1 and not watched() else None
        if (
            call is None
            or values.dtype is not x.dtype
            or (x.shape[0], values.numel()) != (self.sources, self.coordinates.numel())
        ):
            return einsum([self._bound("ij", values), dense("jk", x)], "ik")
        out = empty_like(x, rows, features)
        if out.numel():
            kernel = call.kernel(RowForm(self.positions, self.coordinates, None))
            kernel((ByRows(self.positions, self.coordinates, values, rows, self.sources), x), out)
        return out

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns, for each edge and head, the dot product of the target's row of a and the source's row of b, [edges, heads].

        a, b  [targets, heads, features] and [sources, heads, features], contiguous
        """
        heads, features = a.shape[1:]
        expanded = self.with_heads(heads)
        pattern = expanded._bound("ij", a.new_empty(1).expand(expanded.coordinates.numel()))
        found = sample(pattern, [dense("ik", a.view(-1, features)), dense("jk", b.view(-1, features))])
        return expanded.unsorted(found).view(-1, heads)

    def with_heads(self, heads: int) -> "SortedEdges":
        """Returns the graph with `heads` copies of each node. Each edge connects copies with the same number.

        Its edge `e * heads + h` is edge e between copies h.
        """
        if heads == 1:
            return self
        known = self._by_heads.get(heads)
        if known is None:
            known = self._by_heads[heads] = self._expanded(heads)
        return known

    def _expanded(self, heads: int) -> "SortedEdges":
        degrees, starts = self.degrees.long(), self.positions[:-1].long()
        place = self.coordinates.device
        entries, copies = torch.arange(self.coordinates.numel(), device=place), torch.arange(heads, device=place)
        # Entry p of a row of `degree` entries from `start` on goes to start * heads + h * degree + (p - start).
        offset = (starts * (heads - 1)).repeat_interleave(degrees) + entries
        places = (offset[:, None] + degrees.repeat_interleave(degrees)[:, None] * copies).flatten()
        numbers = entries if self.order is None else self.order
        integers = torch.int32 if max(places.numel(), self.sources * heads) < 1 << 31 else torch.int64
        coordinates = torch.empty(places.numel(), dtype=integers, device=place)
        coordinates[places] = (self.coordinates[:, None] * heads + copies).flatten().to(integers)
        order = torch.empty_like(places)
        order[places] = (numbers[:, None] * heads + copies).flatten()
        positions = torch.zeros(self.targets * heads + 1, dtype=integers, device=place)
        torch.cumsum(degrees.repeat_interleave(heads), 0, out=positions[1:])
        return SortedEdges(positions, coordinates, order, self.sources * heads)

    def _call(self, dtype: torch.dtype) -> Call | None:
        """Returns the prepared call of `einsum` for several columns, None if no kernel computes it."""
        if dtype not in self._calls:
            spec = str(Spec((Operand("ij", self._format), Operand("jk")), Operand("ik")))
            call = planned_call(einsum_ir, RowProduct.of, spec, dtype)
            self._calls[dtype] = None if call.product is None else call
        return self._calls[dtype]

    @property
    def _format(self) -> Format:
        return _NARROW if self.positions.dtype == torch.int32 else Format.CSR

    def _bound(self, letters: str, values: Tensor) -> Bound:
        return Bound(Operand(letters, self._format), (self.positions, self.coordinates, values), (self.targets, self.sources))


def _nodes(end: str, nodes: Tensor, extent: int, wrapping: str) -> Tensor:
    """Returns the nodes as numbers in [0, extent). IndexRangeError for nodes out of bounds."""
    low, high = (int(bound) for bound in torch.aminmax(nodes)) if nodes.numel() else (0, -1)
    if low < (least := -extent if end in wrapping else 0) or high >= extent:
        wrong = high if high >= extent else low
        raise IndexRangeError(
            f"edge list: {end} {wrong} is out of bounds: must be at least {least}, and less than {extent}, the number of such "
            "nodes"
        )
    return torch.where(nodes < 0, nodes + extent, nodes) if low < 0 else nodes
