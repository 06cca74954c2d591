"""Rows that make a strip."""

import pytest
import torch

from gossamer.runtime.packers.row_order import alike


def steps_of_strips(needed: torch.Tensor, height: int) -> int:
    filled = torch.nn.functional.pad(needed, (0, 0, 0, -len(needed) % height))
    return int(filled.unflatten(0, (len(filled) // height, height)).amax(1).sum())


@pytest.mark.parametrize("shape", [(384, 6), (384, 24), (1000, 12), (17, 3), (16, 1), (1, 4), (0, 4), (40, 0)])
def test_the_order_has_every_row_once_and_strips_take_no_more_steps(shape: tuple[int, int]) -> None:
    needed = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(0))
    order = alike(needed, 16)
    assert order.sort().values.tolist() == list(range(shape[0]))
    assert steps_of_strips(needed[order], 16) <= steps_of_strips(needed, 16)


def test_rows_of_two_kinds_do_not_share_strips() -> None:
    needed = torch.tensor([[1, 9], [9, 1]]).repeat(160, 1)
    order = alike(needed, 16)
    assert steps_of_strips(needed[order], 16) == 20 * 10


def test_strips_of_random_nonzeros_take_a_sixth_fewer_steps() -> None:
    nonzero = torch.rand(1536, 6, 64, generator=torch.Generator().manual_seed(1)) < 0.2
    needed = -(-nonzero.sum(2) // 4)
    assert steps_of_strips(needed[alike(needed, 16)], 16) < 0.84 * steps_of_strips(needed, 16)
