"""Groups of 4- and 8-bit integers: packed as a plain decode of bits reads them, refused where floats are none."""

import pytest
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.quantized_packings import Groups
from gossamer.runtime.group_scales import scaled
from gossamer.runtime.grouped_values import fitting
from gossamer.runtime.packing import Packed, pack

SHAPES = [(7, 64), (130, 48), (3, 70), (1, 16), (5, 1), (2, 17), (0, 32), (4, 0)]
SCALES = {16: torch.bfloat16, 32: torch.float32}


def on_grid(rows: int, columns: int, bits: int, extreme: int | None = None, scale: int = 16) -> Tensor:
    """A matrix of integers, one of each group the extreme, times scales; a group in two of zeros, and a row without any."""
    generator = torch.Generator().manual_seed(rows * columns + bits)
    most = 1 << bits - 1
    groups = -(-columns // 16)
    integers = torch.randint(-most, most, (rows, groups, 16), generator=generator).float()
    if extreme is not None:
        integers[:, :, 0] = extreme
    scales = torch.randn(rows, groups, 1, generator=generator).to(SCALES[scale]).float()
    kept = torch.rand(rows, groups, 1, generator=generator) < 0.5
    dense = (integers * scales * kept + 0.0).flatten(1)[:, :columns].contiguous()
    if rows > 2:
        dense[2] = 0
    return dense


def unpacked(packed: Packed, rows: int, columns: int) -> Tensor:
    """Number by number."""
    assert isinstance(packed.format, Groups)
    bits = packed.format.bits
    positions, order, coordinates, scales, values = (component.tolist() for component in packed.components)
    floats = packed.components[3].view(SCALES[packed.format.scale]).float()
    assert len(floats) == len(coordinates) == 32 * positions[-1]
    assert len(scales) * 32 == len(floats) * packed.format.scale
    assert len(values) == 2 * bits * len(floats)
    dense = torch.zeros(rows, -(-columns // 16) * 16 + 16)
    for row in range(rows):
        strip, lane = divmod(row // 128 * 128 + order[row] % 256, 16)
        for entry in range(16 * positions[strip] + lane, 16 * positions[strip + 1] + lane, 16):
            for group in range(2):
                for i in range(16):
                    coded = values[16 * entry + i] >> 4 * group if bits == 4 else values[32 * entry + 16 * group + i]
                    integer = (coded + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
                    number = coordinates[2 * entry + group] % (1 << packed.format.places)
                    dense[row, 16 * number + i] += floats[2 * entry + group] * integer
    assert not dense[:, columns:].any()
    return dense[:, :columns]


@pytest.mark.parametrize("scale", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("places", [8, 16])
@pytest.mark.parametrize("extreme", ["lowest", "highest", "any"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_comes_back(shape: tuple[int, int], extreme: str, places: int, bits: int, scale: int) -> None:
    most = 1 << bits - 1
    dense = on_grid(*shape, bits, {"lowest": -most, "highest": most - 1, "any": None}[extreme], scale)
    for reduction, stored in ((1, dense), (0, dense.t().contiguous())):
        packed = pack(stored, Groups(reduction, bits, places, scale))
        assert torch.equal(unpacked(packed, *shape), dense)
        assert torch.equal(packed.unpack(), stored)
        assert [c.itemsize * 8 for c in packed.components] == [c.bits for c in packed.format.components()]


@pytest.mark.parametrize("scale", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_new_integers_are_taken_over_and_new_groups_are_not(bits: int, scale: int) -> None:
    dense = on_grid(300, 64, bits, scale=scale)
    packed = pack(dense, Groups(1, bits, 8, scale))
    assert packed.matches(dense)
    assert packed.compact().matches(dense)
    assert not packed.matches(2 * dense)
    assert packed.refresh(2 * dense)
    assert packed.matches(2 * dense)
    assert not packed.refresh(dense.roll(16, 1))
    assert packed.matches(2 * dense)


@pytest.mark.parametrize("scale", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_few_nonzeros_a_group(bits: int, scale: int) -> None:
    """All integers of a group may have a divisor in common, by which its scale has been rounded."""
    most = 1 << bits - 1
    dense = torch.zeros(2048, 16)
    pairs = torch.randint(-most, most, (2048, 2)).float()
    dense[:, [3, 8]] = pairs * torch.randn(2048, 1).to(SCALES[scale]).float() + 0.0
    assert torch.equal(pack(dense, Groups(1, bits, 8, scale)).unpack(), dense)
    thirds = torch.arange(3, most, 3)[-16:].float()
    dense = torch.zeros(2048, 16)
    dense[:, : len(thirds)] = thirds * torch.rand(2048, 1).to(SCALES[scale]).float()
    assert torch.equal(pack(dense, Groups(1, bits, 8, scale)).unpack(), dense)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_pair_of_integers(bits: int) -> None:
    most = 1 << bits - 1
    integers = torch.cartesian_prod(torch.arange(-most, most), torch.arange(-most, most)).float()
    groups = torch.nn.functional.pad(integers, (0, 14)) * torch.rand(len(integers), 1)
    found = scaled(groups, bits, torch.float32)
    assert found is not None
    assert torch.equal(found[1] * found[0][:, None], groups)


@pytest.mark.parametrize("element", [torch.nan, torch.inf, -torch.inf, 1e-45, 3.4e38])
def test_extremes_come_back_or_are_refused(element: float) -> None:
    group = torch.arange(-8, 8).float()[None]
    assert scaled(group, 4, torch.float32) is not None
    group[0, 3] = element
    assert scaled(group, 4, torch.float32) is None
    alone = torch.zeros(1, 16)
    alone[0, 5] = element
    found = scaled(alone, 4, torch.float32)
    assert (found is None) == alone.isnan().any()
    assert found is None or torch.equal(found[1] * found[0][:, None], alone)


def test_the_fewest_bits_that_fit() -> None:
    for bits in (4, 8):
        for scale in (16, 32):
            assert fitting(on_grid(40, 160, bits, scale=scale)) == (bits, scale)
    assert fitting(on_grid(40, 170, 4)) == (4, 16)
    assert fitting(torch.randn(40, 160) * (torch.arange(160) < 80)) is None
    assert fitting(torch.randint(-8, 8, (40, 160)).float()) is None, "few groups are zeros"


def test_what_no_integers_are_is_refused() -> None:
    with pytest.raises(FormatError, match="groups of 16 elements are no integers of 4 bits times a scale of 16 bits"):
        pack(torch.randn(1, 32), Groups(1, 4, 8, 16))
    with pytest.raises(FormatError, match="stores float32, the tensor is"):
        pack(torch.ones(1, 32, dtype=torch.float64), Groups(1, 4, 8, 16))
    with pytest.raises(FormatError, match="no integers of 4 bits times a scale of 16 bits"):
        pack(torch.full((1, 16), 1.001), Groups(1, 4, 8, 16))
    with pytest.raises(FormatError, match="of 4096 columns its coordinates can tell 4080"):
        pack(torch.ones(1, 1 << 12), Groups(1, 4, 8, 16))
    with pytest.raises(FormatError, match="bits must be 4 or 8"):
        Groups(1, 3, 8, 16)
    with pytest.raises(FormatError, match="places must be 8 or 16"):
        Groups(1, 4, 12, 16)
    with pytest.raises(FormatError, match="scale must be 16 or 32"):
        Groups(1, 4, 8, 8)
