"""gossamer.quantize in groups, and GroupedLinear: its bits, what it computes, and what becomes of a model."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gossamer
from gossamer.runtime.grouped_values import joined, parts
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear, grouped
from tests.backend.harness import prune_

SHAPES = [(64, 33), (70, 5), (16, 1), (1, 7), (17, 2), (200, 24)]


def layer_of(inputs: int, outputs: int, bits: int = 4, bias: bool = True) -> GroupedLinear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    prune_(linear, 0.5, (1, 16))
    return GroupedLinear.of(linear, bits)


def decoded(codes: Tensor, scale: Tensor, kept: Tensor, columns: int, bits: int) -> Tensor:
    """Number by number."""
    dense = torch.zeros(kept.shape[0], columns, dtype=torch.float64)
    line = 0
    for row in range(kept.shape[0]):
        for group in range(-(-columns // 16)):
            if not int(kept[row, group // 8]) >> group % 8 & 1:
                continue
            for i in range(min(16, columns - 16 * group)):
                number = int(codes[line, i]) if bits == 8 else int(codes[line, i // 2]) >> 4 * (i % 2) & 15
                dense[row, 16 * group + i] = (number - (1 << bits) if number >> bits - 1 else number) * float(scale[line])
            line += 1
    assert line == len(codes) == len(scale)
    return dense


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_bits_are_integers_times_scales(shape: tuple[int, int], bits: int) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(*shape, bits), torch.randn(2, 3, shape[0])
    weight = decoded(layer.weight_codes, layer.weight_scale, layer.weight_kept, shape[0], bits)
    assert torch.equal(layer.weight.double(), weight)
    assert layer.weight_codes.shape[1] == 2 * bits
    expected = x.double() @ weight.t() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert layer(x[:0]).shape == (0, 3, shape[1])
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_the_nearest_and_use_the_range(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 64) * (torch.rand(40, 4) < 0.5).repeat_interleave(16, 1)
    codes, scale, kept = parts(grouped(weight, bits), 40, 64)
    found = decoded(codes, scale, kept, 64, bits).float()
    assert torch.equal(found.view(40, 4, 16).ne(0).any(2), weight.view(40, 4, 16).ne(0).any(2))
    most = 1 << bits - 1
    step = weight.view(40, 4, 16).abs().amax(2).repeat_interleave(16, 1) / (most - 1)
    # Half a step, and a whole one where both ends of the range are used: the upper one lacks a number.
    assert bool(((found - weight).abs() <= 1.02 * step).all())
    assert float((found - weight).norm() / weight.norm()) < (0.08 if bits == 4 else 0.005)


def test_what_is_there_and_what_is_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))
    prune_(model[0], 0.5, (1, 16))
    gossamer.quantize(model, weights="int4", group=16)
    assert [type(layer) for layer in model] == [GroupedLinear, nn.ReLU, nn.Linear]
    assert "int4 in groups of 16" in repr(model)
    gossamer.quantize(model, weights="int8", group=16, only="2")
    assert isinstance(model[2], GroupedLinear)
    names = {"weight_groups", "bias"}
    assert {name for name in model.state_dict() if name.startswith("0.")} == {f"0.{name}" for name in names}
    with pytest.raises(gossamer.OptionError, match="weights='int2' is not supported"):
        gossamer.quantize(model, weights="int2")  # type: ignore[arg-type]
    with pytest.raises(gossamer.OptionError, match=r"in groups of 16 along their inputs. Give group=16"):
        gossamer.quantize(model, weights="int4", group=32)
    broken = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
    with torch.no_grad():
        broken[1].weight[0, 0] = torch.inf
    with pytest.raises(gossamer.GossamerError, match="NaN or an infinity"):
        gossamer.quantize(broken, weights="int4", only=nn.Linear)
    assert type(broken[0]) is nn.Linear
    with pytest.raises(gossamer.GossamerError, match="too many for groups"):
        gossamer.quantize(nn.Linear(1 << 20, 1), weights="int4", only=nn.Linear)


def test_all_of_it_zero_or_tiny() -> None:
    layer = nn.Linear(32, 4)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[1, 3] = 1e-45
        layer.weight[2, 20] = 3e38
    GroupedLinear.of(layer, 4)
    assert layer.weight[0].eq(0).all()
    assert layer.weight.isfinite().all()
    assert float(layer.weight[2, 20]) > 2.9e38


def test_gradients_reach_inputs_and_bias() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(48, 10), torch.randn(5, 48, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(5, 10) @ layer.weight)
    torch.testing.assert_close(layer.bias.grad, torch.full((10,), 5.0))


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
def test_checkpoints_keep_other_groups(tmp_path: Path, bits: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer_of(256, 128, bits), nn.ReLU(), layer_of(128, 30, bits, bias=False))
    x, file = torch.randn(3, 256), tmp_path / "model.safetensors"
    # A kept group has its integers and two bytes; a bit a group.
    elements = 256 * 128 + 128 * 30
    assert gossamer.save(model, file) < elements * (0.55 * (bits / 8 + 2 / 16) + 1 / 128) + 4 * 128 + 2000
    for load in (lambda other: gossamer.load(other, file), lambda other: other.load_state_dict(model.state_dict())):
        other = nn.Sequential(layer_of(256, 128, bits), nn.ReLU(), layer_of(128, 30, bits, bias=False))
        assert other[0].weight_groups.shape != model[0].weight_groups.shape
        load(other)
        assert torch.equal(other(x), model(x))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))


def test_broken_checkpoints_are_refused_before_anything_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = nn.Sequential(layer_of(64, 8), layer_of(8, 8)), tmp_path / "model.safetensors"
    gossamer.save(model, file)
    arrays, before = load_file(file), model[0].weight_groups
    codes, scale, kept = model[0].weight_codes, model[0].weight_scale, model[0].weight_kept
    cases = {
        "a line is missing": {"1.weight_groups": arrays["1.weight_groups"][:-1]},
        "a line too many": {"0.weight_groups": F.pad(before, (0, 0, 0, 1))},
        "other integers": {"1.weight_groups": arrays["1.weight_groups"].to(torch.int16)},
        "other bits": {"0.weight_groups": grouped(model[0].weight, 8)},
        "more groups are kept than there are": {"0.weight_groups": joined(codes, scale, kept | 15)},
        "groups behind the last column": {"0.weight_groups": joined(codes, scale, kept | 128)},
        "not even that": {"0.weight_groups": before[:0]},
    }
    for wrong in cases.values():
        save_file({**arrays, **wrong}, tmp_path / "wrong.safetensors")
        with pytest.raises(gossamer.FormatError):
            gossamer.load(model, tmp_path / "wrong.safetensors")
        assert model[0].weight_groups is before
