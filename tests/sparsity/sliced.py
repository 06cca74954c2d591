"""Products that are brought into slices of rows: matrices for them, and fixtures that watch."""

from collections.abc import Iterator

import pytest
import torch

from gossamer import Format, SparseTensor
from gossamer.sparsity.arrays import sliced_rows
from gossamer.sparsity.arrays.sliced_rows import SlicedRows

CSR = Format.CSR.with_widths(32, 32)
TIMES = sliced_rows._SETTLED
"""Products with a matrix before its values are copied."""


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_rows, "_LEAST", 1)
    monkeypatch.setattr(
        sliced_rows, "_clock", lambda threads: lambda: 0.0
    )  # slices are as fast as rows, even if values are hashed


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The values that are brought into slices."""
    found: list[torch.Tensor] = []
    fill = SlicedRows.fill
    monkeypatch.setattr(SlicedRows, "fill", lambda form, values, stored: found.append(stored) or fill(form, values, stored))
    yield found


def skewed(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Small integers, rows of all lengths, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, 1, generator=generator) ** 3
    return (
        torch.randint(1, 4, (rows, columns), generator=generator) * (torch.rand(rows, columns, generator=generator) < share)
    ).float()


def again(a: SparseTensor, x: torch.Tensor, times: int = TIMES + 2) -> list[torch.Tensor]:
    return [a @ x for _ in range(times)]


def band(rows: int, dtype: torch.dtype = torch.float32, value: float = 1.0) -> SparseTensor:
    """Five entries in each row."""
    columns = (torch.arange(rows).unsqueeze(1) + torch.arange(5)).remainder(rows).sort(1).values
    positions = 5 * torch.arange(rows + 1, dtype=torch.int32)
    return SparseTensor.from_parts(
        CSR, (rows, rows), positions, columns.flatten().int(), torch.full((5 * rows,), value, dtype=dtype)
    )
