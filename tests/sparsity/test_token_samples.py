"""The schedule "tokens": gradients of stored weights over packed tokens, and how packed weights take over stored values."""

import pytest
import torch
from torch import Tensor

from gossamer import Format, SparseTensor, einsum
from gossamer.dialects.packing import Padded
from gossamer.runtime.packing import pack
from gossamer.sparsity.compiler.taking import take, take_in_order
from gossamer.sparsity.operations import matrix_calls
from gossamer.sparsity.operations.token_samples import FEWEST, sampled_over_tokens
from tests.sparsity.made import team_of

SHAPES = [(1, 3, 5, 1.0), (17, 33, 70, 0.3), (128, 60, 50, 0.1), (300, 20, 17, 0.5), (40, 9, 9000, 0.01)]


def entries(rows: int, columns: int, density: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    kept = torch.rand(rows, columns) < density
    kept[rows // 2] = False
    return torch.cat([torch.zeros(1), kept.sum(1).cumsum(0)]), kept.nonzero()[:, 1], kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_gives_the_gradient_of_a_dense_product_at_the_entries(dtype: torch.dtype) -> None:
    for tokens, rows, columns, density in SHAPES:
        positions, coordinates, kept = entries(rows, columns, density)
        x, y = (torch.randn(tokens, n).to(dtype) for n in (rows, columns))
        expected = (x.double().T @ y.double())[kept]
        for integers, threads in ((torch.int32, 1), (torch.int64, 3)):
            with team_of(threads):
                found = sampled_over_tokens(positions.to(integers), coordinates.to(integers), x, y)
            tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {}
            torch.testing.assert_close(found, expected.to(dtype), **tolerance)


def test_nan_and_inf_reach_the_entries_of_their_row_and_column_only() -> None:
    positions, coordinates, kept = entries(20, 30, 0.5)
    x, y = torch.randn(33, 20), torch.randn(33, 30)
    x[32, 3], y[5, 7] = torch.inf, torch.nan
    found = torch.zeros(20, 30).masked_scatter(kept, sampled_over_tokens(positions.int(), coordinates.int(), x, y))
    touched = torch.zeros(20, 30, dtype=torch.bool)
    touched[3], touched[:, 7] = True, True
    assert torch.equal(~found.isfinite(), touched & kept)


def test_what_is_not_zero_in_front_of_few_tokens_is_left_to_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of tokens takes this way from some number of them on, in either format and order."""
    taken: list[int] = []

    def seen(positions: Tensor, coordinates: Tensor, x: Tensor, y: Tensor) -> Tensor:
        taken.append(x.shape[0])
        return sampled_over_tokens(positions, coordinates, x, y)

    monkeypatch.setattr(matrix_calls, "sampled_over_tokens", seen)
    dense = torch.rand(12, 14).where(torch.rand(12, 14) < 0.4, 0.0)
    for tokens in (FEWEST - 1, FEWEST):
        g, x = torch.randn(tokens, 12), torch.randn(tokens, 14)
        for format in (Format.CSR, Format.CSC, Format.COO):
            pattern = SparseTensor.from_dense((dense != 0).float(), format)
            for factors in (("ti", "tj", g, x), ("tj", "ti", x, g)):
                found = einsum(f"ij,{factors[0]},{factors[1]}->ij", pattern, *factors[2:])
                torch.testing.assert_close(found.to_dense(), (g.T @ x) * (dense != 0))
    assert taken == [FEWEST] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_are_taken_from_their_places_and_zeros_from_none(dtype: torch.dtype) -> None:
    for values, places in ((1, 1), (5, 3), (1000, 20037), (7, 0)):
        given = torch.arange(1, values + 1).to(dtype)
        given[0] = torch.nan
        at = torch.randint(-1, values, (places,), dtype=torch.int32)
        out = torch.full((places,), 5.0, dtype=dtype)
        with team_of(3):
            take(given, at, out)
        expected = torch.where(at < 0, torch.zeros((), dtype=dtype), given[at.clamp(min=0).long()])
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduction", [0, 1])
def test_values_are_taken_in_the_order_of_rows_for_a_packing(reduction: int, integers: torch.dtype, threads: int) -> None:
    """Zeros where it fills up, whatever the values are; rows and columns without any, sizes that are no multiple of a panel."""
    torch.manual_seed(0)
    for rows, columns, width, density in ((1, 1, 16, 1.0), (37, 50, 16, 0.3), (300, 70, 64, 0.05), (40, 600, 8, 0.5)):
        kept = torch.rand(rows, columns) < density
        kept[rows // 2 : rows // 2 + 1, 1:] = kept[1:, columns // 2] = False
        kept[0, 0] = True
        packed = pack(kept.double(), Padded(reduction, width))
        values = torch.randn(int(kept.sum()), dtype=torch.float64)
        values[-1] = torch.nan
        starts = torch.cat([torch.zeros(1), kept.sum(1).cumsum(0)]).to(integers)
        out = torch.full_like(packed.values, 5.0)
        with team_of(threads):
            take_in_order(values, starts, packed.components[:2], 0 if reduction == 1 else width, Padded.SCALE, out)
        dense = torch.zeros(rows, columns, dtype=torch.float64).masked_scatter(kept, values)
        assert packed.refresh(dense)
        torch.testing.assert_close(out, packed.values, rtol=0, atol=0, equal_nan=True)
