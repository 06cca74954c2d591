"""gossamer.quantize(model, batches): the grids that inputs get, by the data, and what layers compute with them, by integers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.quantization.input_grids import grid_of, histogram
from gossamer.sparsity.quantization.quantized_linear import InputGrid, QuantizedLinear
from tests.backend.harness import prune_
from tests.fuzz.references import by_integers


class Attention(nn.Module):
    """Three layers of one input, and one of what comes of it; as Hugging Face calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.unused = nn.Linear(24, 8)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.out(torch.relu(self.q(x) + self.k(x) + self.v(x)))
        return y


def model(**kwargs: Any) -> Attention:
    torch.manual_seed(0)
    made: Any = prune_(Attention(), 0.5)
    return made


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4, 9, 24), "attention_mask": torch.ones(4, 9).long()} for _ in range(3)]


def error(grid: InputGrid, x: Tensor) -> float:
    return float(((grid.integers(x) - grid.zero) * grid.step - x).square().mean())


@pytest.mark.parametrize(
    "values", [torch.randn(50_000), torch.randn(50_000).relu(), torch.rand(50_000) - 3, -torch.rand(5000) * 1e-6]
)
def test_a_grid_has_nearly_the_least_error_of_all(values: Tensor) -> None:
    grid = grid_of(histogram(values))
    assert grid is not None
    assert -128 <= float(grid.zero) <= 127
    assert float(grid.zero) == round(float(grid.zero))
    low, high = float(values.min().clamp(max=0)), float(values.max().clamp(min=0))
    shares = torch.linspace(0.1, 1.1, 21).tolist()
    others = [InputGrid.between(low * a, high * b) for a in shares for b in shares]
    assert error(grid, values) <= 1.05 * min(error(other, values) for other in others)


def test_few_large_values_are_clipped() -> None:
    values = torch.cat([torch.randn(1_000_000), torch.tensor([30.0, -12.0])])
    grid = grid_of(histogram(values))
    assert grid is not None
    assert error(grid, values) < 0.5 * error(InputGrid.between(-12, 30), values)
    assert float(grid.step) * 255 < 20


def test_of_zeros_there_is_no_grid() -> None:
    assert grid_of(histogram(torch.zeros(20))) is None
    assert grid_of(histogram(torch.zeros(0))) is None


@torch.no_grad()
def test_layers_compute_what_integers_do() -> None:
    net = model()
    assert gossamer.quantize(net, batches()) is net
    assert all(isinstance(layer, QuantizedLinear) for layer in net.children())
    x = torch.randn(2, 3, 24) * 3  # some of it is clipped
    x[0, 0] = 0
    for layer in (net.q, net.out):
        torch.testing.assert_close(layer(x).double(), by_integers(x, layer), rtol=1e-5, atol=1e-6)
        assert layer(x[:0]).shape == (0, 3, 24)
    assert float(net.q.input_zero_point) != 0
    assert torch.equal(net.q.input_offset, net.q.input_zero_point * net.q.weight_int8.sum(1))


@torch.no_grad()
def test_who_gets_the_same_tensor_has_the_same_grid_and_who_gets_none_has_none() -> None:
    net = gossamer.quantize(model(), batches())
    for made in (net, copy.deepcopy(net)):
        assert made.q.input_scale is made.k.input_scale is made.v.input_scale
        assert made.q.input_zero_point is made.v.input_zero_point
        assert made.out.input_scale is not made.q.input_scale
    assert net.unused.input_scale is None
    assert "unused.input_scale" not in net.state_dict()
    x = torch.randn(5, 24)
    torch.testing.assert_close(net.unused(x).double(), by_integers(x, net.unused), rtol=1e-6, atol=1e-6)


def test_padding_does_not_count() -> None:
    data = batches()
    padded = copy.deepcopy(data)
    for batch in padded:
        batch["attention_mask"][:, 7:] = 0
        batch["x"][:, 7:] = 1e4
    for batch in data:
        batch["x"] = batch["x"][:, :7].contiguous()
        del batch["attention_mask"]
    cut, whole = gossamer.quantize(model(), data), gossamer.quantize(model(), padded)
    assert torch.equal(cut.q.input_scale, whole.q.input_scale)
    assert torch.equal(cut.out.input_scale, whole.out.input_scale)


@torch.no_grad()
def test_outputs_are_near_those_of_floats_and_of_a_scale_for_each_token() -> None:
    net = model()
    static, dynamic = (gossamer.quantize(copy.deepcopy(net), data) for data in (batches(), None))
    x = torch.randn(64, 24)
    wanted = net(x)
    errors = [float((made(x) - wanted).norm() / wanted.norm()) for made in (static, dynamic)]
    assert errors[0] < 0.02
    assert errors[0] < 2.5 * errors[1]


@torch.no_grad()
def test_a_token_that_is_not_finite_gives_nan_and_what_is_huge_is_clipped() -> None:
    layer, x = gossamer.quantize(model(), batches()).q, torch.randn(5, 24)
    clean = layer(x)
    x[1, 3], x[2, 5], x[4, 7] = torch.nan, -torch.inf, 3e38
    y = layer(x)
    assert bool(y[1:3].isnan().all())
    torch.testing.assert_close(y[[0, 3]], clean[[0, 3]], rtol=0, atol=0)
    torch.testing.assert_close(y[4].double(), by_integers(x, layer)[4], rtol=1e-5, atol=1e-6)


def test_the_gradient_goes_straight_through() -> None:
    layer, x, g = gossamer.quantize(model(), batches()).q, torch.randn(5, 24, requires_grad=True), torch.randn(5, 24)
    y = layer(x)
    y.backward(g)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, g @ layer.weight)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))
    with torch.no_grad():
        torch.testing.assert_close(y, layer(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_other_types(dtype: torch.dtype) -> None:
    net = model().to(dtype)
    gossamer.quantize(net, [(batch["x"].to(dtype),) for batch in batches()])
    x = torch.randn(7, 24).to(dtype)
    assert net.q(x).dtype == dtype
    torch.testing.assert_close(net.q(x), by_integers(x, net.q).to(dtype), rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_grids_are_float32_under_any_default_type(other_default: torch.dtype) -> None:
    net, x = model(), torch.randn(7, 24)
    gossamer.quantize(net, [(batch["x"],) for batch in batches()])
    assert {each.dtype for each in (net.q.input_scale, net.q.input_zero_point, net.q.input_offset)} == {torch.float32}
    torch.testing.assert_close(net.q(x), by_integers(x, net.q).to(other_default), rtol=1e-2, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "quantize",
    [
        lambda net: gossamer.quantize(net, [torch.rand(64, 512)]),  # its zero point is -128, and sums of rows are large
        gossamer.quantize,
        lambda net: gossamer.quantize(net, weights="int4", group=16),
    ],
)
def test_conversions_after_quantizing_keep_integers_and_scales(
    quantize: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(512, 64))
    net[0].weight[:, 128:] = 0
    quantize(net)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    x = torch.rand(9, 512).to(dtype)
    expected = net(x.float())
    net.to(dtype)
    assert net[0].weight.dtype == net[0].bias.dtype == net(x).dtype == dtype
    torch.testing.assert_close(net(x).float(), expected, rtol=1e-2, atol=5e-3)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)
    net.to("meta").to_empty(device="cpu")
    assert [buffer.dtype for buffer in net.buffers()] == [buffer.dtype for buffer in buffers.values()]


@torch.no_grad()
def test_states_and_files_keep_grids(tmp_path: Path) -> None:
    net, x = gossamer.quantize(model(), batches()), torch.randn(5, 24)
    other = gossamer.quantize(model(), [batch["x"] * 2 for batch in batches()])
    assert not torch.equal(other(x), net(x))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))
    gossamer.save(net, tmp_path / "model.safetensors")
    again = gossamer.load(gossamer.quantize(model(), [batch["x"] * 2 for batch in batches()]), tmp_path / "model.safetensors")
    assert torch.equal(again(x), net(x))
    for device in ("cpu", "meta"):
        with torch.device(device):
            floats = Attention()
        made = gossamer.load(floats, tmp_path / "model.safetensors")
        assert made.q.input_scale is made.k.input_scale is made.v.input_scale
        assert torch.equal(made(x), net(x))
        assert made.unused.input_scale is None


def test_models_trained_for_int8_and_stored_ones_can_be_calibrated() -> None:
    for prepared in (gossamer.quantize(model(), aware=True), gossamer.store_sparse(model())):
        net = gossamer.quantize(prepared, batches())
        assert net.q.input_scale is not None
        assert torch.equal(net.q.input_scale, gossamer.quantize(model(), batches()).q.input_scale)


def test_training_mode_and_hooks_stay_as_they_were() -> None:
    net = model().train()
    net.out.eval()
    gossamer.quantize(net, batches())
    assert net.training
    assert not net.out.training
    assert not any(layer._forward_pre_hooks for layer in net.modules())


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (torch.randn(4, 24), {}, "must be batches"),
        ([], {}, "no batch"),
        ([torch.full((2, 24), torch.nan)], {}, "'q' inputs with NaN"),
        ([torch.randn(2, 24)], {"group": 16}, "layers with groups keep floats as inputs.*leave out data"),
        ([torch.randn(2, 24)], {"aware": True}, "leave out data"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_changes(data: Any, options: dict[str, Any], said: str) -> None:
    net = model()
    with pytest.raises(gossamer.OptionError, match=said):
        gossamer.quantize(net, data, **options)
    assert type(net.q) is nn.Linear
