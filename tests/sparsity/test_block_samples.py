"""Gradients of weights in whole blocks of bf16: which patterns are taken for such, and their sums against float64."""

import pytest
import torch
from torch import Tensor

from gossamer.runtime.target import host
from gossamer.sparsity.operations.block_samples import WholeBlocks, whole_blocks
from gossamer.sparsity.operations.token_samples import sampled_over_tokens
from tests.sparsity.made import team_of

needs_dot = pytest.mark.skipif(
    host().vector_bits < 512 or "bf16dots" not in host().instructions, reason="this machine has no AVX512-BF16"
)


def in_blocks(rows: int, columns: int, width: int, density: float = 0.4) -> Tensor:
    """What is kept; the second row of blocks has none, the first all."""
    torch.manual_seed(0)
    blocks = torch.rand(rows // width, columns // width) < density
    blocks[0] = True
    blocks[1:2] = False
    return blocks.repeat_interleave(width, 0).repeat_interleave(width, 1)


def csr(kept: Tensor, integers: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    return positions.to(integers), kept.nonzero()[:, 1].to(integers)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize(("blocks", "width"), [(128, 32), (64, 32), (32, 32), (16, 16), (48, 16)])
def test_blocks_are_found_whatever_they_consist_of(blocks: int, width: int, integers: torch.dtype) -> None:
    kept = in_blocks(3 * blocks, 4 * blocks, blocks)
    found = WholeBlocks.of(*csr(kept, integers), 4 * blocks)
    assert found is not None and found.width == width
    again = torch.zeros(kept.shape[0] // width, kept.shape[1] // width, dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(len(again)), found.positions.diff().long())
    again[rows, found.coordinates.long()] = True
    assert torch.equal(again.repeat_interleave(width, 0).repeat_interleave(width, 1), kept)


def test_what_is_not_whole_blocks_is_none() -> None:
    hole = in_blocks(64, 128, 32)
    hole[3, 5] = False
    moved = torch.zeros(64, 128, dtype=torch.bool)
    moved[:32, :32] = moved[32:, 32:64] = True
    moved[1] = moved[1].roll(32)  # as many entries in each row, one of them elsewhere
    for kept in (hole, moved, in_blocks(64, 128, 8), torch.rand(64, 128) < 0.3):
        assert WholeBlocks.of(*csr(kept), kept.shape[1]) is None
    for shape in ((33, 64), (64, 40), (8, 8)):
        assert WholeBlocks.of(*csr(torch.ones(shape, dtype=torch.bool)), shape[1]) is None
    positions, coordinates = csr(torch.ones(32, 32, dtype=torch.bool))
    assert WholeBlocks.of(positions, coordinates.flip(0), 32) is None
    aligned_to_half = torch.zeros(64, 128, dtype=torch.bool)
    aligned_to_half[:32, 16:48] = True
    found = WholeBlocks.of(*csr(aligned_to_half), 128)
    assert found is not None and found.width == 16


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("tokens", [16, 17, 128, 333])
def test_sums_are_those_of_float64(tokens: int, width: int) -> None:
    """On machines without the dot products by other ways."""
    kept = in_blocks(5 * width, 7 * width, width)
    g, x = torch.randn(tokens, 5 * width).bfloat16(), torch.randn(tokens, 7 * width).bfloat16()
    expected = (g.double().T @ x.double())[kept].bfloat16()
    for integers, threads in ((torch.int32, 1), (torch.int64, 3)):
        with team_of(threads):
            found = sampled_over_tokens(*csr(kept, integers), g, x)
        torch.testing.assert_close(found, expected, rtol=0.008, atol=0.02)


def test_nan_and_inf_reach_their_row_and_column_only() -> None:
    kept = in_blocks(96, 64, 32)
    g, x = torch.randn(33, 96).bfloat16(), torch.randn(33, 64).bfloat16()
    g[32, 3], x[5, 7] = torch.inf, torch.nan
    found = torch.zeros(96, 64, dtype=torch.bfloat16).masked_scatter(kept, sampled_over_tokens(*csr(kept), g, x))
    touched = torch.zeros(96, 64, dtype=torch.bool)
    touched[3], touched[:, 7] = True, True
    assert torch.equal(~found.isfinite(), touched & kept)


@needs_dot
def test_blocks_are_found_once_a_pattern_and_for_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    positions, coordinates = csr(in_blocks(64, 64, 32))
    found = whole_blocks(positions, coordinates, 64, torch.bfloat16)
    assert found is not None and whole_blocks(positions, coordinates, 64, torch.bfloat16) is found
    assert whole_blocks(positions, coordinates, 64, torch.float32) is None
    coordinates.copy_(csr(torch.ones(64, 64, dtype=torch.bool))[1][: coordinates.numel()].flip(0))
    assert whole_blocks(positions, coordinates, 64, torch.bfloat16) is None
    assert whole_blocks(positions, coordinates[:0], 64, torch.bfloat16) is None
