"""gossamer.quantize and QuantizedLinear: what they compute, by integer arithmetic in torch, and what becomes of a model."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import gossamer
from gossamer.sparsity.prepare import Mask
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from tests.backend.harness import prune_


def layer_of(inputs: int, outputs: int, bias: bool = True, density: float = 0.2) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    prune_(layer, density)
    return layer


def by_integers(x: Tensor, layer: QuantizedLinear) -> Tensor:
    """The formula, token by token, sums in int64."""
    w, rows = layer.weight_int8.long(), []
    for token in x.reshape(-1, x.shape[-1]).float():
        step = max(float(token.abs().max()) / 127, torch.finfo(torch.float32).tiny)
        q = (token * (1 / torch.tensor(step))).round().long()
        row = (w @ q).float() * torch.tensor(step) * layer.weight_scale
        rows.append(row if layer.bias is None else row + layer.bias.float())
    return torch.stack(rows).view(*x.shape[:-1], -1)


@torch.no_grad()
def test_it_computes_what_integers_do() -> None:
    torch.manual_seed(0)
    for inputs, outputs, bias in ((70, 33, True), (1, 5, True), (128, 1, False)):
        x = torch.randn(2, 3, inputs)
        x[0, 0] = 0
        layer = QuantizedLinear.of(layer_of(inputs, outputs, bias))
        torch.testing.assert_close(layer(x), by_integers(x, layer), rtol=1e-6, atol=1e-6)
        assert layer(x[:0]).shape == (0, 3, outputs)


@torch.no_grad()
def test_weights_are_rounded_to_nearest_by_rows_and_zeros_stay() -> None:
    torch.manual_seed(0)
    linear = layer_of(64, 48)
    linear.weight[3] = 0
    weight = linear.weight.clone()
    layer = QuantizedLinear.of(linear)
    assert layer is linear
    assert isinstance(layer, nn.Linear)
    assert layer.weight_int8.dtype == torch.int8
    assert int(layer.weight_int8.abs().amax(1)[0]) == 127
    assert not layer.weight_int8[weight == 0].any()
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((layer.weight - weight).abs() <= step / 2 * 1.0001).all())


@torch.no_grad()
def test_a_token_that_is_not_finite_gives_nan_and_leaves_the_others_alone() -> None:
    layer, x = QuantizedLinear.of(layer_of(16, 8)), torch.randn(4, 16)
    clean = layer(x)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y = layer(x)
    assert bool(y[1:3].isnan().all())
    torch.testing.assert_close(y[[0, 3]], clean[[0, 3]], rtol=0, atol=0)


def test_the_gradient_goes_straight_through() -> None:
    torch.manual_seed(0)
    layer, x, g = QuantizedLinear.of(layer_of(24, 10)), torch.randn(5, 24, requires_grad=True), torch.randn(5, 10)
    y = layer(x)
    y.backward(g)
    assert x.grad is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(x.grad, g @ layer.weight)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))
    with torch.no_grad():
        torch.testing.assert_close(y, layer(x))


def test_a_model_keeps_what_was_not_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer_of(16, 16), nn.ReLU(), nn.Linear(16, 16), layer_of(16, 4))
    parametrize.register_parametrization(model[0], "weight", Mask(model[0].weight.detach() != 0))
    assert gossamer.quantize(model, skip="3") is model
    assert [type(layer) for layer in model] == [QuantizedLinear, nn.ReLU, nn.Linear, nn.Linear]
    gossamer.quantize(model, only=["2"])
    assert isinstance(model[2], QuantizedLinear)
    names = ["0.weight_int8", "0.weight_scale", "0.bias"]
    assert sorted(name for name in model.state_dict() if name.startswith("0.")) == sorted(names)
    other, x = copy.deepcopy(model), torch.randn(3, 16)
    for layer in (other[0], other[2]):
        layer.weight_int8.zero_()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def test_a_file_has_the_nonzeros_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gossamer.quantize(nn.Sequential(layer_of(256, 128, density=0.1)))
    other, x = copy.deepcopy(model), torch.randn(3, 256)
    other[0].weight_int8.zero_()
    assert gossamer.save(model, tmp_path / "model.safetensors") < 0.08 * 4 * 256 * 128
    gossamer.load(other, tmp_path / "model.safetensors")
    assert torch.equal(other(x), model(x))


def test_what_cannot_be_quantized_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(layer_of(16, 16), layer_of(16, 16))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(gossamer.GossamerError, match=r"the weight of '1', of shape \(16, 16\) has a NaN or an infinity"):
        gossamer.quantize(model)
    assert type(model[0]) is nn.Linear
    with pytest.raises(gossamer.OptionError, match="no layer with a weight is called 'absent'"):
        gossamer.quantize(model, only="absent")
