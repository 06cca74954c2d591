"""The patterns that the workloads prune to."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.pruning import density, pattern, prune


def test_unstructured_keeps_the_largest() -> None:
    weight = torch.tensor([[1.0, -4.0, 2.0], [-3.0, 0.5, 6.0]])
    prune(weight, "unstructured", 0.5)
    assert weight.tolist() == [[0, -4, 0], [-3, 0, 6]]


def test_skewed_rows_differ_in_their_number_of_nonzeros() -> None:
    weight, even = torch.randn(64, 256), torch.randn(64, 256)
    prune(weight, "skewed", 0.9)
    prune(even, "unstructured", 0.9)
    assert (weight == 0).float().mean() == pytest.approx(0.9, abs=0.01)
    assert (weight != 0).sum(1).float().std() > 3 * (even != 0).sum(1).float().std()


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (1, 8), (8, 1), (3, 5)])
def test_blocks_are_kept_or_pruned_as_a_whole(rows: int, columns: int) -> None:
    weight = torch.randn(24, 40)
    prune(weight, f"{rows}x{columns}", 0.75)
    blocks = (weight != 0).view(24 // rows, rows, 40 // columns, columns).float().mean((1, 3))
    assert set(blocks.unique().tolist()) == {0.0, 1.0}
    assert blocks.mean().item() == pytest.approx(0.25, abs=0.02)


def test_blocks_at_the_edge_may_be_cut() -> None:
    weight = torch.randn(10, 7)
    prune(weight, "4x4", 0.5)
    assert weight.shape == (10, 7) and 0 < torch.count_nonzero(weight) < 70


@pytest.mark.parametrize(("name", "n", "m"), [("2:4", 2, 4), ("1:4", 1, 4), ("4:8", 4, 8)])
def test_n_of_m_keeps_so_many_of_every_group(name: str, n: int, m: int) -> None:
    weight = torch.randn(6, 32)
    largest = weight.abs().view(6, -1, m).amax(-1)
    prune(weight, name, 0)
    groups = weight.view(6, -1, m)
    assert ((groups != 0).sum(-1) == n).all()
    assert torch.equal(groups.abs().amax(-1), largest)
    assert density(name, 0) == n / m


def test_unknown_pattern_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'triangles' is no pattern"):
        pattern("triangles")
