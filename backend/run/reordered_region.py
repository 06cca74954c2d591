"""What runs where the weight of a region is stored in another order of rows and columns (see reorder_into_blocks.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.run.compiled_region import CompiledRegion


@dataclass(frozen=True, eq=False)
class ReorderedRegion:
    """A region whose weight is reordered, between a selection of the columns of x and one of those of the result.

    columns    of x, in the order of the weight's
    order      of the rows of the weight
    restored   where each row of the weight is now
    vectors, matrices  numbers of the operands that have an element, or a column, a row of the weight
    """

    region: CompiledRegion
    columns: torch.Tensor
    order: torch.Tensor
    restored: torch.Tensor
    vectors: tuple[int, ...]
    matrices: tuple[int, ...]

    @classmethod
    def of(cls, region: CompiledRegion, orders: tuple[torch.Tensor, torch.Tensor], kinds: Sequence[str]) -> "ReorderedRegion":
        """`orders` are those of results and of what is summed over, `kinds` those of the extra operands."""
        order, columns = orders
        first = region.variants[0].others.start
        vectors, matrices = (
            tuple(first + n for n, kind in enumerate(kinds) if kind == wanted) for wanted in ("vector", "matrix")
        )
        return cls(region, columns, order, order.argsort(), vectors, matrices)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of the region."""
        return self.region.kernels

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and type of the result."""
        return self.region.outputs(operands)

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        given = list(operands)
        given[0] = given[0].index_select(1, self.columns)
        for number in self.vectors:
            given[number] = given[number].index_select(0, self.order)
        for number in self.matrices:
            given[number] = given[number].index_select(1, self.order)
        result: torch.Tensor = self.region(given)
        return result.index_select(1, self.restored)
