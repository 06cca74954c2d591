"""Packs weights whose nonzeros are the values of a SparseTensor. In the graph, gossamer::einsum makes them dense.

    evaluate(pos, crd, values) = gossamer::einsum([pos, crd, values], [4096, 1024], "mk #CSR\\nmk")

New values of such a weight go directly into its packing, without a dense matrix. If they change before every call, the packing
has memory for values only during the call. So all weights of a model share that memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx

from gossamer.backend.graph.einsum_calls import call_at
from gossamer.backend.graph.masked_matrix import before_copies, turned
from gossamer.backend.graph.packed_order import InOrder, Places, in_order, renew
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Padded
from gossamer.runtime.memory.huge_pages import placed
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.packers.fill import checked, padded
from gossamer.runtime.packers.nonzeros import divided
from gossamer.runtime.packing import Packed
from gossamer.sparsity.arrays.row_form import stored_by_rows
from gossamer.sparsity.arrays.sorting import sort_keys
from gossamer.sparsity.arrays.stored_entries import coordinates

ours = torch.ops.gossamer


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of these sizes, stored in a format. The leaves are its arrays, and the last one has the values."""

    format: Format
    sizes: tuple[int, int]

    @classmethod
    def of(cls, evaluate: Any) -> Self | None:
        """Returns the matrix that an expression makes dense. Returns None if the expression does anything else to it."""
        if not isinstance(evaluate, fx.GraphModule):
            return None
        node, turns = turned(evaluate.graph.output_node().args[0])
        call = call_at(node, ours.einsum.default)
        leaves = [each for each in evaluate.graph.nodes if each.op == "placeholder"]
        if call is None or turns % 2 or len(call.operands) != 1 or call.operands[0].format is None:
            return None
        matrix = call.operands[0]
        if matrix.letters != call.spec.result.letters or [before_copies(each) for each in matrix.arrays] != leaves:
            return None
        assert matrix.format is not None
        return cls(matrix.format, (matrix.sizes[0], matrix.sizes[1]))

    def packed(self, format: Format | Packing, leaves: Sequence[Tensor]) -> tuple[Packed, InOrder] | None:
        """Packs all stored values, also zeros, without a dense matrix.

        Returns None unless the matrix is CSR on a CPU, with sorted rows, and the format is `Padded`."""
        values = leaves[-1].detach()
        if not isinstance(format, Padded) or not stored_by_rows(self.format, 0) or not values.is_cpu or not values.numel():
            return None
        at = coordinates(self.format, self.sizes, leaves)
        numbers = at[0] * self.sizes[1] + at[1]
        if not bool((numbers[1:] > numbers[:-1]).all()):
            return None  # a row is not sorted
        height, width = self.sizes if format.reduction == 1 else self.sizes[::-1]
        row, column = at if format.reduction == 1 else at[::-1]
        panel, within = divided(column, format.columns)
        starts, order = sort_keys(panel * height + row, -(-width // format.columns) * height, torch.int64)
        arrays, _ = padded(format, starts, within if order is None else within.index_select(0, order))
        arrays = checked(format, arrays)
        packed = Packed(format, self.sizes, placed((*arrays, values.new_empty(arrays[-1].numel()))), None)
        places = InOrder(0 if format.reduction == 1 else format.columns, format.SCALE)
        self.renew(packed, leaves, places)
        return packed, places

    def places(self, packed: Packed, leaves: Sequence[Tensor]) -> Tensor:
        """Returns for each packed value the index of the stored one, int32; -1 for padding, whose value is 0."""
        rows, columns = self.sizes
        at = coordinates(self.format, self.sizes, leaves)
        filled = (rows, columns) if not isinstance(packed.format, Format) else packed.format.padded_shape(self.sizes)
        source = packed.source.long()
        entries = torch.full((filled[0] * filled[1] + 1,), -1, dtype=torch.int32, device=source.device)
        # The source of padding is the last element.
        entries[at[0] * filled[1] + at[1]] = torch.arange(at[0].numel(), dtype=torch.int32, device=source.device)
        return entries.index_select(0, source)

    def has_all(self, places: Tensor, leaves: Sequence[Tensor]) -> bool:
        """Whether every stored value has a place in the packing. Values that were zero at packing time may have none."""
        stored = torch.zeros(leaves[-1].numel(), dtype=torch.bool, device=places.device)
        stored[places[places >= 0].long()] = True
        missing = [at[~stored] for at in coordinates(self.format, self.sizes, leaves)]
        inside = [at < size for at, size in zip(missing, self.sizes, strict=True)]
        return not bool((inside[0] & inside[1]).any())

    def in_order(self, packed: Packed, leaves: Sequence[Tensor], places: Tensor) -> Places:
        """Returns `InOrder` if the packing has each row's values in the order of CSR. Otherwise returns `places`."""
        values = leaves[-1]
        if not stored_by_rows(self.format, 0) or not values.is_cpu:
            return places
        return in_order(packed, leaves[0], values.numel(), places)

    def renew(self, packed: Packed, leaves: Sequence[Tensor], places: Places) -> None:
        """Writes the stored values into a packing, by their `places`."""
        renew(packed, leaves[0], leaves[-1].detach().contiguous(), places)

    def lent(self, packed: Packed, leaves: Sequence[Tensor], places: Places) -> Packed:
        """Returns the packing with the stored values in new memory."""
        values = empty([packed.components[-2].numel() if isinstance(places, InOrder) else places.numel()], leaves[-1].dtype)
        filled = packed.with_values(values)
        self.renew(filled, leaves, places)
        return filled
