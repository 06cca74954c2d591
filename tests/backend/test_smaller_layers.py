"""Layers with rows, columns, filters or heads of zeros are compiled as smaller ones; results are those of dense torch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.backend.harness import assert_same
from tests.backend.smaller import Attention, Pair, Residual, empty_, run, shifted, small_layers_pay, smaller

__all__ = ["small_layers_pay"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_empty_rows_give_their_bias(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(16, 32).to(dtype), torch.randn(5, 3, 16, dtype=dtype)
    rows = empty_(layer.weight)
    made = run(layer, x)
    assert smaller(made) == {"weight": "16x16"}
    assert_same(made.output, layer(x).detach())
    assert torch.equal(made.output[..., rows], layer.bias[rows].detach().expand(5, 3, -1))


def test_without_a_bias_empty_rows_give_zeros() -> None:
    layer, x = nn.Linear(16, 32, bias=False), torch.randn(7, 16)
    rows = empty_(layer.weight)
    made = run(layer, x)
    assert smaller(made) and not made.output[:, rows].any()
    assert_same(made.output, layer(x).detach())


def test_empty_columns_are_not_read() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    columns = empty_(layer.weight, axis=1)
    made = run(layer, x)
    assert smaller(made) == {"weight": "32x8"}
    assert_same(made.output, layer(x).detach())
    x[:, columns] = torch.nan
    assert made.function(x).isfinite().all()


@pytest.mark.parametrize(
    "between", [F.gelu, torch.relu, torch.sigmoid, lambda x: F.silu(x) * 2 + 1, lambda x: torch.exp(-x).clamp(0, 3)]
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients of x"])
def test_constants_go_into_the_bias_of_the_next_layer(between: Callable[[Tensor], Tensor], grad: bool) -> None:
    pair, x = Pair(between).requires_grad_(False), torch.randn(7, 16, requires_grad=grad)
    empty_(pair.first.weight)
    made = run(pair, x, grad=grad)
    assert smaller(made) == {"first.weight": "16x16", "second.weight": "24x16"}
    assert_same(made.output, pair(x))
    if grad:
        weights = torch.randn(7, 24)
        found, expected = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (made.output, pair(x)))
        assert_same(found, expected)


def test_gradients_of_x_go_through_layers_that_are_made_whole_again() -> None:
    """For one that reads some columns, and one that gives some rows."""
    layers, x = nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 24)).requires_grad_(False), torch.randn(7, 16)
    empty_(layers[0].weight, axis=1)
    empty_(layers[2].weight, axis=0)
    made = run(layers, x.requires_grad_(), grad=True)
    assert smaller(made) == {"0.weight": "32x8", "2.weight": "12x32"}
    weights = torch.randn(7, 24)
    found, expected = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (made.output, layers(x)))
    assert_same(found, expected)


def test_neurons_that_nobody_reads_are_left_out() -> None:
    pair, x = Pair(), torch.randn(7, 16)
    empty_(pair.second.weight, axis=1)
    made = run(pair, x)
    assert smaller(made) == {"first.weight": "16x16", "second.weight": "24x16"}
    assert_same(made.output, pair(x).detach())


def test_a_product_with_zeros_leaves_out_the_other_factor() -> None:
    gate, up, down, x = nn.Linear(16, 32), nn.Linear(16, 32, bias=False), nn.Linear(32, 16), torch.randn(7, 16)
    empty_(up.weight)

    def gated(x: Tensor) -> Tensor:
        return down(F.silu(gate(x)) * up(x))

    made = run(gated, x)
    assert sorted(smaller(made).values()) == ["16x16"] * 3
    assert_same(made.output, gated(x).detach())


def test_a_layer_in_two_halves_loses_the_same_rows_of_each() -> None:
    both, down, x = nn.Linear(16, 64), nn.Linear(32, 16), torch.randn(7, 16)
    empty_(down.weight, axis=1)

    def gated(x: Tensor) -> Tensor:
        gate, up = both(x).chunk(2, -1)
        return down(F.silu(gate) * up)

    made = run(gated, x)
    assert sorted(smaller(made).values()) == ["16x16", "32x16"]
    assert_same(made.output, gated(x).detach())


@pytest.mark.parametrize("spelling", ["sdpa", "written", "fused", "split"])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_nobody_reads_are_left_out(spelling: str, masked: bool) -> None:
    attention, x = Attention(spelling), torch.randn(2, 9, 32)
    with torch.no_grad():
        attention.o.weight[:, 8:24] = 0
    mask = (torch.randn(2, 1, 9, 9),) if masked else ()
    made = run(attention, x, *mask)
    names = ["qkv.weight"] if spelling in ("fused", "split") else ["q.weight", "k.weight", "v.weight"]
    rows = {name: "48x32" if name == "qkv.weight" else "16x32" for name in names}
    assert smaller(made) == {**rows, "o.weight": "32x16"}
    assert_same(made.output, attention(x, *mask).detach())


def test_heads_without_values_give_their_bias() -> None:
    attention, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        for layer in (attention.q, attention.k, attention.v):
            layer.weight[8:24] = 0
    made = run(attention, x)
    assert smaller(made)["o.weight"] == "32x16"
    assert_same(made.output, attention(x).detach())


def test_a_mask_may_hide_everything_and_so_keeps_the_constants_of_a_head() -> None:
    attention, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        attention.v.weight[8:24] = 0
    mask = torch.rand(2, 1, 9, 9) > 0.3
    mask[:, :, 4] = False
    made = run(attention, x, mask, regions=0)
    assert_same(made.output, attention(x, mask).detach())


def test_part_of_a_head_is_no_reason_to_leave_it_out() -> None:
    attention, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        attention.o.weight[:, 4:20] = 0
    made = run(attention, x)
    assert smaller(made)["v.weight"] == "24x32"
    assert_same(made.output, attention(x).detach())


@pytest.mark.parametrize("images", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("filters", [torch.contiguous_format, torch.channels_last])
def test_filters_before_a_shift_are_left_out(filters: torch.memory_format, images: torch.memory_format) -> None:
    """Inside of the image they are constants; around it the next convolution sees zeros, and so one of them stays."""
    network, x = shifted(nn.Sequential(Residual(), Residual())), torch.randn(2, 16, 9, 8)
    network, x = network.to(memory_format=filters), x.to(memory_format=images)
    for block in network:
        empty_(block.a.weight)
    made = run(network, x)
    assert smaller(made) == {f"{n}.{name}.weight": sizes for n in (0, 1) for name, sizes in (("a", "9x16"), ("b", "16x9"))}
    expected = network(x.clone()).detach()
    assert_same(made.output, expected)
    assert made.output.stride() == expected.stride()


class Narrow(nn.Module):
    """Half of the filters, or of the channels, of layers that are dense otherwise: strided, padded by a pad, rows, volumes, and
    transposed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 64, 3, 2, 1), nn.Conv2d(64, 80, 3, bias=False)
        self.rows, self.volume = nn.Conv1d(80, 64, 5, 3, 2), nn.Conv3d(80, 64, (1, 3, 3), padding=(0, 1, 0))
        self.up = nn.ConvTranspose2d(64, 48, 3, 2, 1, 1)
        for layer in self.children():
            prune.ln_structured(layer, "weight", 0.5, n=2, dim=int(layer is self.up))
        prune.ln_structured(self.second, "weight", 0.25, n=2, dim=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.relu(self.first(x))
        z = F.hardswish(self.second(F.pad(y, (0, 1, 1, 0))))
        return self.rows(z.flatten(2)), F.relu(self.volume(z[:, :, None])), self.up(y)


@pytest.mark.parametrize("opened", [False, True])
def test_filters_and_channels_of_zeros_are_left_out(opened: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if opened else torch.float32
    network, x = Narrow().to(dtype).eval(), torch.randn(2, 32, 37, 41, dtype=dtype)
    for axis in (0, 2, 3) if opened else ():
        torch._dynamo.mark_dynamic(x, axis)
    if not opened:
        for layer in network.children():
            prune.remove(layer, "weight")
    made = run(network, x)
    columns = 80 if opened else 40  # nobody knows where channels are in a view of open sizes
    expected = {"first": "33x32", "second": "40x48", "rows": f"32x{columns}", "volume": "32x80", "up": "24x33"}
    assert smaller(made) == {f"{name}.weight": size for name, size in expected.items()}
    with torch.no_grad():
        shapes = ((2, 32, 37, 41), *((1, 32, 30, 9), (3, 32, 12, 12))[: 2 * opened])
        for each in (torch.randn(shape, dtype=dtype) for shape in shapes):
            for actual, expected in zip(made.function(each), network(each), strict=True):
                assert_same(actual, expected)
        for change in (lambda w: w.roll(1, 0), torch.zeros_like, lambda w: 0.1 * torch.randn_like(w)):
            for layer in network.children():
                weight = getattr(layer, "weight_orig", layer.weight)
                weight.copy_(change(weight))
            network.first(x)  # hooks compute the weights anew
            for actual, expected in zip(made.function(x), network(x), strict=True):
                assert_same(actual, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_smaller_convolutions_under_masks(transposed: bool) -> None:
    layer = nn.ConvTranspose2d(48, 64, 3, 2, padding=1) if transposed else nn.Conv2d(48, 64, 3, padding=1)
    prune.ln_structured(layer, "weight", 0.5, n=2, dim=int(transposed))
    prune.ln_structured(layer, "weight", 0.25, n=2, dim=int(not transposed))
    x = torch.randn(2, 48, 13, 9, requires_grad=True)
    made = run(layer, x, grad=True)
    assert smaller(made) == {"weight": "32x36"}
    found = torch.autograd.grad(made.output.square().sum(), (x, layer.weight_orig, layer.bias))
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight_orig, layer.bias))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


class Laid(nn.Module):
    """Images whose empty filters are put back, and tokens that lie across."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1), nn.Linear(9, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        return y, self.b(y.flip(1)), self.c(x).permute(2, 0, 3, 1), y.permute(0, 2, 3, 1).view(-1, 16)


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_put_back_lies_in_memory_as_ever(grad: bool) -> None:
    model, x = Laid(), torch.randn(2, 8, 6, 9).contiguous(memory_format=torch.channels_last)
    for layer in (model.a, model.c):
        prune.ln_structured(layer, "weight", 0.5, 2, 0)
    made = run(model, x, grad=grad)
    assert len(smaller(made)) == 2
    for found, expected in zip(made.output, model(x), strict=True):
        assert_same(found, expected if grad else expected.detach())
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "model, x",
    [
        (nn.Conv2d(8, 16, 3, padding=1), torch.randn(2, 8, 6, 9)),
        (nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(2, 8, 6, 9).contiguous(memory_format=torch.channels_last)),
        (nn.Conv2d(8, 16, 1), torch.randn(2, 8, 1, 1).contiguous(memory_format=torch.channels_last)),
        (nn.Conv3d(8, 16, 1), torch.randn(1, 8, 2, 3, 4).contiguous(memory_format=torch.channels_last_3d)),
        (nn.Linear(8, 16), torch.randn(1, 5, 8)),
        (nn.Linear(8, 16), torch.randn(5, 1, 8).transpose(0, 1)),
    ],
    ids=["images", "channels last", "one pixel", "channels last of volumes", "one sequence", "one sequence, turned"],
)
def test_a_single_line_tells_no_order_of_dimensions(model: nn.Conv2d, x: Tensor, grad: bool) -> None:
    model, x = copy.deepcopy(model).requires_grad_(False), x.clone().requires_grad_(grad)
    with torch.no_grad():
        model.weight[torch.arange(16) != 5] = 0
    made = run(lambda x: model(x)[:, ::2], x, grad=grad)
    assert [*smaller(made).values()] == ["1x8"]
    expected = model(x)[:, ::2]
    assert_same(made.output, expected if grad else expected.detach())
    for found, eager, size in zip(made.output.stride(), expected.stride(), expected.shape, strict=True):
        assert found == eager or size == 1


def test_channels_of_scale_zero_are_constants() -> None:
    network, x = shifted(nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1))), torch.randn(2, 3, 6, 6)
    empty_(network[1].weight)
    made = run(network, x)
    assert smaller(made) == {"0.weight": "8x3", "2.weight": "8x8"}
    assert_same(made.output, network(x).detach())


def test_channels_go_through_depthwise_convolutions_pools_and_flattening() -> None:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(), nn.Linear(144, 10)).eval()
    x = torch.randn(2, 3, 8, 8)
    chosen = empty_(network[0].weight)
    with torch.no_grad():
        network[0].bias[chosen] = -1  # which the activation makes zeros
    made = run(network, x)
    assert smaller(made) == {"0.weight": "8x3", "6.weight": "10x72"}
    assert_same(made.output, network(x).detach())


def test_a_residual_keeps_what_one_of_its_terms_has() -> None:
    a, b, c, x = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16), torch.randn(7, 16)
    with torch.no_grad():
        a.weight[:16], b.weight[8:24] = 0, 0

    def added(x: Tensor) -> Tensor:
        return c(torch.tanh(a(x) + b(x)))

    made = run(added, x)
    assert sorted(str(d.format) for d in made.regions) == ["16x24", "24x16", "24x16"]
    assert_same(made.output, added(x).detach())


def test_what_is_written_to_in_place_and_seen_elsewhere_stays_whole() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(7, 16)
    empty_(layer.weight)

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        z = y.view(7, 4, 8)
        z.mul_(2)
        return y + 1, z

    made = run(seen, x, regions=0)
    for found, expected in zip(made.output, seen(x), strict=True):
        assert_same(found, expected.detach())


def test_layers_may_be_called_by_keywords_and_with_biases_that_broadcast() -> None:
    layer, x, weight = nn.Linear(16, 32), torch.randn(7, 16), torch.randn(16, 32)
    chosen = empty_(layer.weight)
    weight[:, chosen] = 0
    row, number, whole = torch.randn(1, 32), torch.randn(1), torch.randn(7, 32)

    def function(x: Tensor) -> list[Tensor]:
        convolved = F.conv1d(input=x[:, :, None], weight=layer.weight[:, :, None], bias=layer.bias)
        called = [F.linear(input=x, weight=layer.weight, bias=layer.bias), convolved]
        return called + [torch.addmm(bias, x, weight) for bias in (row, number, whole)]

    made = run(function, x)
    assert sorted((d.op, d.format) for d in made.regions) == [("convolution", "16x16"), ("linear", "16x16")]
    for found, expected in zip(made.output, function(x), strict=True):
        assert_same(found, expected.detach())


def test_pools_over_channels_of_one_image_take_all_of_them() -> None:
    images, rows = nn.Conv2d(3, 16, 3), nn.Conv1d(3, 16, 3)
    for layer in (images, rows):
        empty_(layer.weight)

    def function(x: Tensor) -> list[Tensor]:
        y, z = images(x), rows(x[..., 0])
        return [F.max_pool3d(y, (2, 1, 1)), F.avg_pool3d(y, (2, 1, 1)), F.max_pool2d(z, (2, 1)), F.adaptive_avg_pool2d(z, 1)]

    x = torch.randn(2, 3, 8, 8)
    made = run(function, x)
    assert sorted(smaller(made).values()) == ["8x3", "8x3"]
    for found, expected in zip(made.output, function(x), strict=True):
        assert_same(found, expected.detach())


def test_constants_are_none_in_the_mean_of_no_tokens_and_in_attention_without_keys() -> None:
    pair, attention, empty, x = Pair(), Attention(), torch.randn(2, 0, 16), torch.randn(2, 3, 32)
    empty_(pair.first.weight)
    empty_(attention.o.weight)
    with torch.no_grad():
        attention.v.weight[8:24] = 0

    def function(x: Tensor) -> tuple[Tensor, ...]:
        query = attention.q(x).view(2, 3, 4, 8).transpose(1, 2)
        key, value = (layer(x[:, :0]).view(2, 0, 4, 8).transpose(1, 2) for layer in (attention.k, attention.v))
        mixed = F.scaled_dot_product_attention(query, key, value)
        mean = pair.first(empty).mean(1)
        return mean, pair.second(mean), attention.o(mixed.transpose(1, 2).reshape(2, 3, 32))

    made = run(function, x)
    assert smaller(made) == {"attention.o.weight": "16x32"}
    for found, expected in zip(made.output, function(x), strict=True):
        torch.testing.assert_close(found, expected.detach(), equal_nan=True)


def test_one_channel_that_a_vector_repeats_stays() -> None:
    network, scale, x = (
        nn.ModuleList([nn.Conv2d(16, 1, 1), nn.Conv2d(16, 32, 1)]),
        torch.randn(16, 1, 1),
        torch.randn(2, 16, 5, 4),
    )
    empty_(network[0].weight, axis=1)
    empty_(network[1].weight)

    def function(x: Tensor) -> Tensor:
        y: Tensor = network[1](torch.sigmoid(network[0](x)) * scale + scale)
        return y

    made = run(function, x)
    assert smaller(made)
    assert_same(made.output, function(x).detach())
