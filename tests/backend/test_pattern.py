"""What is read from a weight, by weights whose pattern is known by construction."""

import pytest
import torch
from torch import Tensor

from gossamer.backend.graph.zero_pattern import Lines, Pattern, rounded_density

ROWS, COLUMNS = 512, 384


def unstructured(density: float, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns) * (torch.rand(rows, columns) < density)


def blocks(r: int, c: int, density: float, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    kept = torch.rand(-(-rows // r), -(-columns // c)) < density
    return torch.randn(rows, columns) * kept.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]


def groups(n: int, m: int) -> Tensor:
    kept = torch.rand(ROWS, COLUMNS // m, m).argsort(-1) < n
    return torch.randn(ROWS, COLUMNS) * kept.view(ROWS, COLUMNS)


@pytest.mark.parametrize("density", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (333, 1000), (40, 40)])
def test_zeros_at_random_have_no_structure(density: float, shape: tuple[int, int]) -> None:
    pattern = Pattern.of(unstructured(density, *shape))
    assert pattern.density == pytest.approx(density, abs=0.05)
    assert pattern.block is None and pattern.fill == 1
    assert pattern.rows.nm is None and pattern.columns.nm is None


@pytest.mark.parametrize("block", [(4, 4), (16, 16), (32, 32), (1, 16), (16, 1), (64, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_blocks(block: tuple[int, int], density: float) -> None:
    pattern = Pattern.of(blocks(*block, density))
    assert pattern.block == block and pattern.fill == 1
    assert pattern.transposed.block == block[::-1]


def test_blocks_that_are_not_quite_full() -> None:
    pattern = Pattern.of(blocks(16, 16, 0.1) * (torch.rand(ROWS, COLUMNS) < 0.9))
    assert pattern.block == (16, 16) and pattern.fill == pytest.approx(0.9, abs=0.03)
    assert pattern.rounded.fill == 0.9


def test_half_empty_blocks_are_none() -> None:
    assert Pattern.of(blocks(16, 16, 0.1) * (torch.rand(ROWS, COLUMNS) < 0.5)).block is None


def test_blocks_at_the_edges_of_odd_sizes() -> None:
    assert Pattern.of(blocks(8, 8, 0.2, 501, 389)).block == (8, 8)


def test_larger_blocks_are_made_of_the_largest_known() -> None:
    assert Pattern.of(blocks(128, 128, 0.4)).block == (64, 64)


@pytest.mark.parametrize("nm", [(2, 4), (1, 4), (4, 8), (1, 2), (2, 8)])
def test_n_of_m(nm: tuple[int, int]) -> None:
    pattern = Pattern.of(groups(*nm))
    assert pattern.rows == Lines(nm, 1.0) and pattern.columns.nm is None
    assert pattern.transposed.columns == pattern.rows
    assert Pattern.of(groups(*nm).t()).columns.nm == nm


def test_n_of_m_with_further_zeros() -> None:
    assert Pattern.of(groups(2, 4) * (torch.rand(ROWS, COLUMNS) < 0.6)).rows.nm == (2, 4)


def test_few_nonzeros_alone_are_no_n_of_m() -> None:
    weight = torch.zeros(ROWS, COLUMNS)
    weight[torch.arange(0, ROWS, 8), torch.randint(0, COLUMNS, (ROWS // 8,))] = 1
    assert Pattern.of(weight).rows.nm is None


def test_equal_rows_have_no_skew() -> None:
    kept = torch.rand(ROWS, COLUMNS).argsort(-1) < 40
    pattern = Pattern.of(torch.randn(ROWS, COLUMNS) * kept)
    assert pattern.rows.skew == 1.0 and pattern.rounded.rows.skew == 1.0
    assert pattern.columns.skew > 1


def test_skew_is_the_longest_row_over_the_mean() -> None:
    weight = torch.zeros(4, 8)
    weight[0], weight[1:, 0] = 1, 1
    assert Pattern.of(weight).rows.skew == pytest.approx(8 / (11 / 4))
    assert Pattern.of(weight).rounded.rows.skew == 3.0


@pytest.mark.parametrize("value, density", [(0.0, 0.0), (1.0, 1.0), (float("nan"), 1.0)])
def test_weights_that_are_all_alike(value: float, density: float) -> None:
    even = Lines(None, 1.0)
    assert Pattern.of(torch.full((8, 8), value)) == Pattern(density, None, 1.0, even, even)


def test_an_empty_weight_is_dense() -> None:
    assert Pattern.of(torch.empty(0, 5)).density == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types_do_not_matter(dtype: torch.dtype) -> None:
    weight = blocks(4, 4, 0.2)
    assert Pattern.of(weight.to(dtype)) == Pattern.of(weight)


def test_strides_do_not_matter() -> None:
    weight = unstructured(0.2)
    assert Pattern.of(weight.t()) == Pattern.of(weight).transposed


@pytest.mark.parametrize(
    "density, rounded", [(0.0, 0.01), (0.012, 0.01), (0.023, 0.02), (0.045, 0.05), (0.07, 0.05), (0.11, 0.1), (0.999, 1.0)]
)
def test_rounded_density(density: float, rounded: float) -> None:
    assert rounded_density(density) == rounded


def test_similar_weights_share_a_class() -> None:
    torch.manual_seed(0)
    assert len({Pattern.of(unstructured(0.1)).rounded for _ in range(5)}) <= 2
