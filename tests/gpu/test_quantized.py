"""Quantized models on a GPU: what is decided, and what comes out of the kernels, which the emulator runs."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import gossamer
from gossamer.backend.devices import cuda_cost
from gossamer.backend.devices.device import device_of
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.row_sums import row_sums
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.int8_product import _on_cuda, filled_up, int8_product
from gossamer.sparsity.quantization.quantized_linear import InputGrid, QuantizedLinear, quantized_linear
from tests.backend.harness import compile_and_run, prune_
from tests.gpu.emulated_device import EmulatedDevice, emulated_device

ops = torch.ops.quantized_decomposed


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A GPU in place of the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    emulated = emulated_device()
    region_op._regions.clear()
    with emulated.installed(monkeypatch):
        yield emulated


def weights(*shape: int, density: float = 0.2) -> Tensor:
    """Extreme values among others."""
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    values[torch.rand(shape) < 0.2] = -128
    return values * (torch.rand(shape) < density)


def quantized_model() -> nn.Module:
    return gossamer.quantize(prune_(nn.Sequential(nn.Linear(80, 72), nn.GELU(), nn.Linear(72, 40)))).eval()


class Sums(nn.Module):
    """Integers in, the sums of their products as floats out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x, self.weight.t()).float()


SCHEDULES = ("gpu-quads", "gpu-gather")


@torch.no_grad()
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_layer_is_a_launch_with_all_that_follows_inside(schedule: str, gpu: EmulatedDevice) -> None:
    model, x = quantized_model(), torch.randn(2, 9, 80)
    run = compile_and_run(model, x, regions=2, schedule=schedule)
    assert [d.schedule for d in run.regions] == [schedule] * 2 == gpu.schedules
    assert "5 ops fused" in run.regions[0].reason  # to a float, two scales, the bias, GELU
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)
    x[1, 3, 5], x[0, 2, 7] = torch.nan, -torch.inf
    y = run.function(x)
    assert y.isnan().any(2).nonzero().tolist() == [[0, 2], [1, 3]]
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_are_exact_for_any_number_of_tokens(schedule: str, gpu: EmulatedDevice) -> None:
    model = Sums(weights(40, 90))
    run = compile_and_run(model, weights(33, 90, density=1), dynamic=True, regions=1, schedule=schedule)
    for tokens in (2, 8, 17, 70, 0):
        x = weights(tokens, 90, density=1)
        assert torch.equal(run.function(x), (x.long() @ model.weight.long().t()).float())
    assert gpu.schedules == [schedule] * 5  # none for no tokens


@torch.no_grad()
def test_few_tokens_gather_and_more_expand(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    # Launches are most of what so small a layer takes.
    monkeypatch.setattr(cuda_cost, "EXPECTED", cuda_cost.Rates(kernel_us=0, call_us=0))
    model = Sums(weights(80, 512, density=0.1))
    run = compile_and_run(model, weights(40, 512, density=1), dynamic=True, regions=1)
    assert run.regions[0].schedule == "gpu-gather, gpu-quads"
    for tokens in (1, 70):
        x = weights(tokens, 512, density=1)
        assert torch.equal(run.function(x), (x.long() @ model.weight.long().t()).float())
    assert gpu.schedules == ["gpu-quads", "gpu-gather", "gpu-quads"]


@torch.no_grad()
def test_many_tokens_multiply_blocks(gpu: EmulatedDevice) -> None:
    kept = torch.rand(8, 6) < 0.3
    model = Sums(weights(128, 96, density=1) | 1)
    model.weight *= kept.repeat_interleave(16, 0).repeat_interleave(16, 1)
    x = weights(300, 96, density=1)
    run = compile_and_run(model, x, regions=1)
    assert gpu.schedules == ["gpu-blocks"]
    assert torch.equal(run.output, (x.long() @ model.weight.long().t()).float())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_other_types(dtype: torch.dtype, gpu: EmulatedDevice) -> None:
    model, x = quantized_model().to(dtype), torch.randn(9, 80).to(dtype)
    model[2].weight_scale.mul_(0.5)
    run = compile_and_run(model, x, regions=2, schedule="gpu-quads")
    assert run.output.dtype == dtype and len(gpu.schedules) == 2
    torch.testing.assert_close(run.output, model(x), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_doubles_end_a_region_and_integers_stay_torch_s() -> None:
    layer = QuantizedLinear.of(prune_(nn.Linear(80, 40)))
    x = torch.randn(9, 80).double()
    run = compile_and_run(layer, x, regions=1)
    assert run.output.dtype is torch.float64 and run.regions[0].reason == "4 ops fused"
    torch.testing.assert_close(run.output, layer(x), rtol=1e-5, atol=1e-5)

    class Integers(Sums):
        def forward(self, x: Tensor) -> Tensor:
            return torch._int_mm(x, self.weight.t()) // 3

    model, q = Integers(weights(40, 80)), weights(20, 80, density=1)
    run = compile_and_run(model, q, regions=0)
    assert [d.reason for d in run.decisions] == ["its sums are used as integers"]
    assert torch.equal(run.output, model(q))


def test_training_goes_straight_through(gpu: EmulatedDevice) -> None:
    model = quantized_model().train()
    reference = copy.deepcopy(model)
    x = torch.randn(11, 80, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    run = compile_and_run(model, x, grad=True, regions=4)
    run.output.square().sum().backward()
    reference(other).square().sum().backward()
    assert len(gpu.schedules) == 4  # two of integers forward, two of floats backward
    torch.testing.assert_close(run.output, reference(other), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_changed_weights_are_seen_and_full_ones_multiplied_by_torch(gpu: EmulatedDevice) -> None:
    model, x = Sums(weights(40, 80)), weights(20, 80, density=1)
    run = compile_and_run(model, x, regions=1)
    for _ in range(3):
        model.weight.copy_(weights(40, 80))
        assert torch.equal(run.function(x), model(x))
    (key,) = region_op._regions
    region = region_op.known(key)
    assert isinstance(region, CompiledRegion)
    region.densest = 0.5
    model.weight.fill_(3)
    gpu.schedules.clear()
    assert torch.equal(run.function(x), model(x)) and not gpu.schedules
    assert any(node.target is int8_product for node in region.body.graph.nodes)  # of int32 GPUs have no product


@torch.no_grad()
def test_products_as_torchao_has_them_on_gpus(gpu: EmulatedDevice) -> None:
    """Inductor makes `_int_mm` of them there."""

    class Layer(Sums):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            sums = out_dtype(torch.ops.aten.mm.default, torch.int32, x, self.weight.t())
            return (sums * scale.expand(sums.shape)) * 0.5 + 1.0

    model, x, scale = Layer(weights(40, 80)), weights(9, 80, density=1), 2.0 ** torch.randint(-8, 0, (9, 1))
    run = compile_and_run(model, x, scale, regions=1)
    assert torch.equal(run.output, (x.long() @ model.weight.long().t()).float() * scale * 0.5 + 1)
    assert run.regions[0].reason == "3 ops fused" and len(gpu.schedules) == 1

    class Other(Sums):
        def forward(self, x: Tensor) -> Tensor:
            return out_dtype(torch.ops.aten.mm.default, torch.int16, x, self.weight.t()).float()

    other = Other(weights(40, 80))
    assert torch.equal(compile_and_run(other, x, regions=0).output, other(x))


@torch.no_grad()
def test_products_as_pt2e_has_them(gpu: EmulatedDevice) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Buffer(weights(40, 80))
            self.scale, self.zero = nn.Buffer(torch.rand(40) * 1e-3), nn.Buffer(torch.zeros(40, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            q = ops.quantize_per_tensor.default(x, 0.031, 117, 0, 255, torch.uint8)
            x = ops.dequantize_per_tensor.default(q, 0.031, 117, 0, 255, torch.uint8)
            w = ops.dequantize_per_channel.default(self.weight, self.scale, self.zero, 0, -128, 127, torch.int8)
            return torch.relu(nn.functional.linear(x, w))

    model, x = Layer(), torch.randn(2, 9, 80)
    run = compile_and_run(model, x, regions=1)
    assert len(gpu.schedules) == 1 and run.regions[0].dense_bytes == 40 * 80  # of bytes
    torch.testing.assert_close(run.output, model(x), rtol=1e-4, atol=1e-3)


# What torch multiplies: on GPUs more than 16 tokens, and sizes in eights


@pytest.mark.parametrize(
    ("tokens", "columns", "rows"), [(1, 80, 40), (16, 7, 3), (17, 8, 8), (40, 33, 41), (0, 8, 8), (5, 1, 8)]
)
def test_factors_are_filled_up(tokens: int, columns: int, rows: int) -> None:
    x, weight = weights(tokens, columns, density=1), weights(rows, columns).t()
    filled, other = filled_up(x, weight)
    assert filled.shape[0] >= 17 and filled.shape[1] % 8 == 0 and other.shape[1] % 8 == 0
    expected = x.long() @ weight.long()
    assert torch.equal((filled.long() @ other.long())[:tokens, :rows], expected)
    for product in (int8_product, _on_cuda):
        assert torch.equal(product(x, weight).long(), expected)


def test_layers_on_gpus_take_the_product_of_any_sizes() -> None:
    grid = InputGrid.between(-1.0, 2.0)
    with FakeTensorMode() as mode:
        x, w, scale = (torch.empty(size, device="cuda") for size in ((3, 80), (40, 80), (40,)))
        found = make_fx(lambda x: quantized_linear(x, w.to(torch.int8), scale))(x)
        assert row_sums(w.to(torch.int8)).device == x.device
        steps = InputGrid(*(mode.from_tensor(each) for each in grid))
        assert quantized_linear(x, w.to(torch.int8), scale, None, steps, scale).shape == (3, 40)
    assert [node.target for node in found.graph.nodes if "int8_product" in str(node.target)] == [int8_product]


# Predictions, for the H100 that the driver tells of


@pytest.mark.parametrize(
    ("size", "density", "tokens", "pays"),
    [(8192, 0.1, 1, True), (8192, 0.2, 16, True), (4096, 0.1, 8, True), (1024, 0.1, 1, False), (8192, 0.1, 512, False)],
)
def test_where_sparse_pays(size: int, density: float, tokens: int, pays: bool) -> None:
    predicted = device_of(torch.device("cpu")).predict(Matrix(size, size, 1, "i8", 1024, density), tokens)
    assert (predicted.gain > 1.1) is pays


def test_blocks_pay_for_many_tokens() -> None:
    predicted = device_of(torch.device("cpu")).predict(Matrix(4096, 4096, 1, "i8", 1024, 0.2, block=(64, 64)), 4096)
    assert predicted.schedule == "gpu-blocks" and 1.3 < predicted.gain < 2.0


def test_dense_is_predicted_as_fast_as_cublas_is() -> None:
    """An H100 has 1979 TOP/s of int8 without sparsity, of which cuBLAS reaches 1200 to 1500."""
    dense_us = device_of(torch.device("cpu")).predict(Matrix(8192, 8192, 1, "i8", 1024), 8192).dense_us
    assert 1200e6 < 2 * 8192**3 / dense_us < 1500e6
