"""Groups of 4- and 8-bit integers: packed as a plain decode of bits reads them, refused where floats are none."""

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime.packing import Packed, pack

SHAPES = [(7, 64), (3, 70), (1, 16), (5, 1), (2, 17), (0, 32), (4, 0)]


def on_grid(rows: int, columns: int, bits: int, scales: str = "any") -> Tensor:
    """A matrix of integers times scales, a group in two of zeros; a row without any."""
    generator = torch.Generator().manual_seed(rows * columns + bits)
    most = 1 << bits - 1
    groups = -(-columns // 16)
    integers = torch.randint(-most, most, (rows, groups, 16), generator=generator).float()
    integers[:, :, 0] = -most  # that the scale can be found from floats that are rounded
    scale = torch.randn(rows, groups, 1, generator=generator)
    if scales == "short":  # products without rounding
        integers[:, :, 0] = most - 1
        scale = scale.bfloat16().float()
    kept = torch.rand(rows, groups, 1, generator=generator) < 0.5
    dense = (integers * scale * kept).flatten(1)[:, :columns].contiguous()
    if rows > 2:
        dense[2] = 0
    return dense


def unpacked(packed: Packed, rows: int, columns: int) -> Tensor:
    """Number by number."""
    assert isinstance(packed.format, Groups)
    bits, together = packed.format.bits, packed.format.together
    positions, coordinates, scales, values = (component.tolist() for component in packed.components)
    floats = packed.components[2].view(torch.float32)
    assert len(scales) == len(coordinates) == together * positions[-1]
    assert len(values) == 16 * positions[-1]
    dense = torch.zeros(rows, -(-columns // 16) * 16 + 16)
    for row in range(rows):
        for entry in range(positions[row], positions[row + 1]):
            for group in range(together):
                at = together * entry + group
                for i in range(16):
                    bits_of = values[16 * entry + i] >> bits * group & (1 << bits) - 1
                    integer = bits_of - (1 << bits) if bits_of >> bits - 1 else bits_of
                    dense[row, coordinates[at] % (1 << 16) + i] += floats[at] * integer
    assert not dense[:, columns:].any()
    return dense[:, :columns]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", ["any", "short"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_comes_back(shape: tuple[int, int], scales: str, bits: int) -> None:
    dense = on_grid(*shape, bits, scales)
    for reduction, stored in ((1, dense), (0, dense.t().contiguous())):
        packed = pack(stored, Groups(reduction, bits))
        assert torch.equal(unpacked(packed, *shape), dense)
        assert torch.equal(packed.unpack(), stored)
        assert [c.itemsize * 8 for c in packed.components] == [c.bits for c in packed.format.components()]


@pytest.mark.parametrize("bits", [4, 8])
def test_new_integers_are_taken_over_and_new_groups_are_not(bits: int) -> None:
    dense = on_grid(20, 64, bits)
    packed = pack(dense, Groups(1, bits))
    assert packed.matches(dense)
    assert packed.compact().matches(dense)
    assert not packed.matches(2 * dense)
    assert packed.refresh(2 * dense)
    assert packed.matches(2 * dense)
    assert not packed.refresh(dense.roll(16, 1))
    assert packed.matches(2 * dense)


def test_what_no_integers_are_is_refused() -> None:
    with pytest.raises(FormatError, match="2 groups of 16 elements are no integers of 4 bits times a scale"):
        pack(torch.randn(1, 32), Groups(1, 4))
    with pytest.raises(FormatError, match="stores float32, the tensor is"):
        pack(torch.ones(1, 32, dtype=torch.float64), Groups(1, 4))
    with pytest.raises(FormatError, match="of 65536 columns its coordinates can tell 65520"):
        pack(torch.ones(1, 1 << 16), Groups(1, 4))
    with pytest.raises(FormatError, match="bits must be 4 or 8"):
        Groups(1, 3)
