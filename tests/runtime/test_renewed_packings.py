"""A packing takes new values into its arrays if the nonzeros are where they were, and refuses others."""

import pytest
import torch

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.runtime.packing import pack
from tests.runtime.test_packing import random, two_of_four, walk

CHANGING = [Format.CSR, Format.CSC, Format.COO, Format.kblock(4), Format.bsr(2, 4), Format.nm(2, 4)]


@pytest.mark.parametrize("fmt", CHANGING, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(6, 8), (5, 7)])
def test_new_values_in_the_old_pattern_are_taken_over(fmt: Format, shape: tuple[int, int]) -> None:
    dense = two_of_four(*shape)
    packed = pack(dense, fmt)
    memory = [component.data_ptr() for component in packed.components]
    changed = dense * 3
    changed[tuple(dense.nonzero()[0])] = 0.0
    assert not packed.matches(changed)
    assert packed.refresh(changed)
    assert packed.matches(changed)
    assert dict(walk(packed)) == dict.fromkeys(dict(walk(packed)), 0.0) | {
        tuple(index): changed[tuple(index)].item() for index in dense.nonzero().tolist()
    }
    assert [component.data_ptr() for component in packed.components] == memory


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_nonzero_outside_the_pattern_changes_nothing(value: float) -> None:
    dense = random((5, 7), 0.2)
    packed = pack(dense, Format.kblock(4))
    before = packed.values.clone()
    changed = dense * 2
    changed[tuple((dense == 0).nonzero()[0])] = value
    assert not packed.refresh(changed)
    assert not packed.matches(changed)
    assert torch.equal(packed.values, before)


def test_a_moved_nonzero_is_noticed() -> None:
    dense = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    packed = pack(dense, Format.CSR)
    assert not packed.refresh(dense.flip(0))
    assert not packed.matches(dense.flip(0))
    assert packed.refresh(torch.zeros(2, 2))
    assert packed.values.tolist() == [0.0]


def test_another_shape_or_dtype_is_refused() -> None:
    packed = pack(random((4, 6)), Format.CSR)
    for other in (random((6, 4)), random((4, 6)).double()):
        for method in (packed.refresh, packed.matches):
            with pytest.raises(FormatError, match=r"packed from torch.float32 of shape \(4, 6\), got"):
                method(other)
