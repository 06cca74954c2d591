"""Weights that are blocks in another order of rows and columns run as blocks."""

import pytest
import torch
from torch import nn

from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.regions.reorder_into_blocks import block_orders
from tests.backend.harness import assert_same, compile_and_run, pruned


def scattered_blocks(rows: int, columns: int, block: tuple[int, int], density: float = 0.15) -> torch.Tensor:
    """Full blocks, then rows and columns shuffled."""
    occupied = (torch.rand(rows // block[0], columns // block[1]) < density).float()
    matrix = torch.kron(occupied, torch.ones(block)) * torch.randn(rows, columns)
    return matrix[torch.randperm(rows)][:, torch.randperm(columns)]


@pytest.mark.parametrize("block", [(16, 16), (32, 8), (16, 1)])
def test_blocks_are_found_again(block: tuple[int, int]) -> None:
    matrix = scattered_blocks(256, 128, block)
    orders = block_orders(matrix != 0)
    assert orders is not None
    rows, columns = orders
    assert sorted(rows.tolist()) == list(range(256)) and sorted(columns.tolist()) == list(range(128))
    found = Pattern.of(matrix[rows][:, columns]).block
    assert found is not None and found[0] * found[1] >= block[0] * block[1] / 2
    assert Pattern.of(matrix).block is None


@pytest.mark.parametrize("density", [0.02, 0.1, 0.4])
def test_nonzeros_by_chance_are_left_where_they_are(density: float) -> None:
    assert block_orders(pruned(256, 128, density=density) != 0) is None


@pytest.mark.parametrize("bias", [True, False])
def test_a_reordered_layer_computes_the_same(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.regions.reorder_into_blocks.permuting_pays", lambda *_: True)
    linear = nn.Linear(128, 256, bias=bias).eval()
    with torch.no_grad():
        linear.weight.copy_(scattered_blocks(256, 128, (16, 16)))

    def layer(x: torch.Tensor, residual: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(linear(x)) * column + residual

    inputs = torch.randn(2, 20, 128), torch.randn(2, 20, 256), torch.randn(2, 20, 1)
    run = compile_and_run(layer, *inputs)
    assert [d.schedule in ("block", "blockvec") for d in run.regions] == [True]
    assert "reordered into blocks" in run.regions[0].reason
    with torch.no_grad():
        assert_same(run.output, layer(*inputs))
        linear.weight.mul_(2)
        assert_same(run.function(*inputs), layer(*inputs))
        linear.weight.copy_(pruned(256, 128))
        assert_same(run.function(*inputs), layer(*inputs))


def test_a_product_with_the_weight_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.regions.reorder_into_blocks.permuting_pays", lambda *_: True)
    weight = nn.Parameter(scattered_blocks(128, 256, (16, 16)))
    x = torch.randn(40, 128)
    run = compile_and_run(lambda x: x @ weight, x)
    assert [d.schedule in ("block", "blockvec") for d in run.regions] == [True]
    assert_same(run.output, (x @ weight).detach())


def test_small_layers_stay_as_they_are() -> None:
    """Reordering x and y would cost more than blocks save."""
    weight = nn.Parameter(scattered_blocks(256, 128, (16, 16)))
    run = compile_and_run(lambda x: x @ weight.t(), torch.randn(40, 128))
    assert [d.schedule in ("block", "blockvec") for d in run.regions] == [False]
