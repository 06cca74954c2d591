"""What was packed can be unpacked, in any format or packing, and be kept compactly meanwhile."""

import pytest
import torch

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.runtime.packers.nonzeros import count_nonzeros, divided, nonzero_mask, nonzero_places
from gossamer.runtime.packing import pack
from tests.runtime.test_packers import PACKINGS
from tests.runtime.test_packing import FORMATS, random, two_of_four


@pytest.mark.parametrize("storage", [*FORMATS, *PACKINGS], ids=lambda storage: storage.name)
@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (33, 50), (1, 1), (4, 0)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_it_is_the_tensor_again(storage: Format | Packing, shape: tuple[int, int], density: float) -> None:
    dense = random(shape, density)
    packed = pack(dense, storage)
    assert torch.equal(packed.unpack(), dense)
    compact = packed.compact()
    assert torch.equal(compact.source, packed.source) and torch.equal(compact.unpack(), dense)


def test_groups_are_the_tensor_again() -> None:
    dense = two_of_four(6, 10)
    packed = pack(dense, Format.nm(2, 4))
    assert torch.equal(packed.unpack(), dense) and torch.equal(packed.compact().unpack(), dense)


def test_a_compact_tensor_takes_a_bit_an_element() -> None:
    dense = random((64, 96), 0.3)
    packed = pack(dense, Format.CSR)
    compact = packed.compact()
    assert compact.source_or_none is None and compact.pattern is not None and compact.pattern.nbytes == 64 * 96 / 8
    assert compact.values is packed.values
    sparser = pack(random((64, 96), 0.01), Format.CSR)
    assert sparser.compact() is sparser, "its places are fewer bytes than the bits"


def test_a_compact_tensor_is_refreshed() -> None:
    dense = random((64, 96), 0.3)
    compact = pack(dense, Format.kblock(32)).compact()
    dense[dense > 1] = 0  # the pattern stays that of the arrays, though some values are zero now
    assert compact.refresh(2 * dense) and compact.matches(2 * dense)
    assert torch.equal(compact.unpack(), 2 * dense)
    assert not compact.refresh(dense + 1) and compact.matches(2 * dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_nonzeros_are_those_of_torch(dtype: torch.dtype) -> None:
    dense = (random((40, 30), 0.3) * 10).to(dtype)
    for tensor in (dense, dense.t(), dense[::2, 1:], dense[:0]):
        assert count_nonzeros(tensor) == torch.count_nonzero(tensor)
        assert torch.equal(nonzero_mask(tensor), tensor != 0)
        mask = nonzero_mask(tensor)
        assert torch.equal(nonzero_places(mask, torch.int32), mask.flatten().nonzero().flatten().int())


def test_a_nan_is_a_nonzero_and_minus_zero_is_not() -> None:
    assert nonzero_mask(torch.tensor([float("nan"), -0.0, 1e-45, float("-inf")])).tolist() == [True, False, True, True]


def test_quotients_and_remainders_are_those_of_torch() -> None:
    numbers = torch.arange(1000, dtype=torch.int32)
    quotient, remainder = divided(numbers, 7)
    assert torch.equal(quotient, numbers // 7) and torch.equal(remainder, numbers % 7)
    assert quotient.dtype == remainder.dtype == torch.int32
