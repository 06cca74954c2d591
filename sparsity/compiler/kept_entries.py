"""`KeptEntries`: the entries that a mask keeps of a matrix, by rows. They are found once for each mask.

Gradients, packings of the weight, and steps of optimizers use them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.compiler.spreading import collect, collect_counted, map_of, put, spread, step


@dataclass(frozen=True, eq=False)
class KeptEntries:
    """The kept entries as CSR, the mask's values there as factors (None if all are 1), and maybe a map (see `map_of`)."""

    positions: Tensor
    coordinates: Tensor
    factors: Tensor | None
    map: Tensor | None

    @classmethod
    def of(cls, mask: Tensor) -> "KeptEntries":
        """Returns the entries that a mask on the CPU keeps. They are remembered until the mask changes."""
        mask = mask.detach()
        return _known.get([mask], (), lambda: cls._of(mask))

    @classmethod
    def known(cls, mask: Tensor) -> "KeptEntries | None":
        """Returns the remembered entries of a mask, None if there are none."""
        return _known.known([mask.detach()], ())

    @classmethod
    def _of(cls, mask: Tensor) -> Self:
        kept = mask != 0
        places = kept.flatten().nonzero().flatten()
        positions = torch.zeros(mask.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(kept.sum(1), 0, out=positions[1:])
        factors = mask.flatten()[places]
        whole = bool((factors == 1).all())
        return cls(positions, (places % max(mask.shape[1], 1)).int(), None if whole else factors, map_of(kept))

    def shared_values(self, matrix: Tensor, mask: Tensor) -> Tensor:
        """Returns `values`, shared by all callers until the matrix or the mask is written to. Callers must not write to it."""
        matrix = matrix.detach()
        return _read.get([matrix, mask.detach()], (), lambda: self.values(matrix))

    def values(self, matrix: Tensor) -> Tensor:
        """Returns the kept entries of a contiguous matrix, times the factors."""
        values = collect(self.positions, self.coordinates, matrix.detach(), self.map)
        return values if self.factors is None else values.mul_(self.factors.to(matrix.dtype))

    def collected(self, tensor: Tensor) -> Tensor:
        """Returns the kept entries of a tensor without the factors. It may have more dimensions than the mask."""
        return collect(self.positions, self.coordinates, self._matrix(tensor), self.map)

    def collected_alone(self, tensor: Tensor) -> Tensor | None:
        """Returns `collected`, None if an element that the mask hides is not 0."""
        values, others = collect_counted(self.positions, self.coordinates, self._matrix(tensor), self.map)
        return None if others else values

    def spread(self, values: Tensor, columns: int) -> Tensor:
        """Returns a matrix with the values at the kept entries, 0 elsewhere."""
        return spread(self.positions, self.coordinates, values, columns, self.map)

    def put(self, values: Tensor, tensor: Tensor) -> None:
        """Writes values to the kept entries of a tensor, and leaves its other elements. torch counts the write."""
        tensor = tensor.detach()
        dense = tensor.contiguous()
        put(self.positions, self.coordinates, values.detach(), self._matrix(dense), self.map)
        if not tensor.is_contiguous():
            tensor.copy_(dense)

    def step(self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, rates: Sequence[float]) -> None:
        """Does a step of Adam on the kept entries of a contiguous tensor; see `Rate`. torch counts the write."""
        step(self.positions, self.coordinates, gradient, rates, (self._matrix(parameter), mean, square), self.map)
        torch.autograd.graph.increment_version(parameter)

    def _matrix(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().view(self.positions.shape[0] - 1, -1)


_known: Remembered[KeptEntries] = Remembered(most=256)

_read: Remembered[Tensor] = Remembered(compared="none", most=256)
"""The shared kept values of parameters, by parameter and mask."""
