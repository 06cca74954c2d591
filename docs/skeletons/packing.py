"""A packing: rows that are filled up to the longest one, as in ELL.

Its class goes to dialects/packing.py and into `_KINDS` there. Its function goes to runtime/packers/fill.py and into `_FILL`
there. A schedule names it in its `storage`, and its lowering gets the arrays in the order of `components`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gossamer.dialects.packing_base import Component, Packing
from gossamer.runtime.packers.fill import Rows


@dataclass(frozen=True)
class Ell(Packing):
    """As many entries in each row as in the longest one, but `least` at least: a column and a value each; 0, 0 to fill up."""

    kind: ClassVar[str] = "ell"
    least: int

    def __post_init__(self) -> None:
        self._check((self.least > 0, "least must be positive"))

    def components(self) -> tuple[Component, ...]:
        return Component("coordinates", 32), Component("values", 0)


def fill_ell(packing: Ell, rows: Rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The columns, and where the values lie in the stored tensor (`rows.nowhere` for the zeros that fill up)."""
    width = max(packing.least, int(rows.counts.max()) if len(rows.counts) else 0)
    columns = torch.zeros(len(rows.counts), width, dtype=torch.int64)
    source = torch.full((len(rows.counts), width), rows.nowhere, dtype=rows.places.dtype)
    row, column = rows.nonzero.nonzero(as_tuple=True)
    place = torch.arange(len(row)) - (rows.counts.cumsum(0) - rows.counts)[row]
    columns[row, place] = column
    source[row, place] = rows.places[row, column]
    return [columns.flatten()], source.flatten()
