"""Models that PyTorch's own tools have quantized: dynamically, and by operations in an exported graph."""

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn

import gossamer
from gossamer.runtime.target import host
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from tests.backend.harness import Run, compile_and_run, prune_

in_chains = "bytedots" in host().instructions
ops = torch.ops.quantized_decomposed


def weights(*shape: int, density: float = 0.2) -> Tensor:
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    return values * (torch.rand(shape) < density)


class Quantized(nn.Module):
    """A layer as convert_pt2e leaves it: of uint8 or int8, a step known before or found for each x, scales by row or one."""

    def __init__(
        self,
        weight: Tensor,
        dynamic: bool = False,
        signed: bool = False,
        by_row: bool = True,
        offset: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.scale, self.zero = nn.Buffer(torch.rand(len(weight)) * 1e-3), nn.Buffer(torch.full((len(weight),), offset))
        self.bias = nn.Parameter(torch.randn(len(weight))) if bias else None
        self.dynamic, self.signed, self.by_row = dynamic, signed, by_row

    def forward(self, x: Tensor) -> Tensor:
        low, high, dtype = (-128, 127, torch.int8) if self.signed else (0, 255, torch.uint8)
        by: Any = (0.031, -3 if self.signed else 117)
        kind = "default"
        if self.dynamic:
            kind, by = "tensor", ops.choose_qparams.tensor(x, low, high, 1e-4, dtype)
        q = getattr(ops.quantize_per_tensor, kind)(x, *by, low, high, dtype)
        x = getattr(ops.dequantize_per_tensor, kind)(q, *by, low, high, dtype)
        if self.by_row:
            w = ops.dequantize_per_channel.default(self.weight, self.scale, self.zero, 0, -128, 127, torch.int8)
        else:
            w = ops.dequantize_per_tensor.default(self.weight, 1e-3, 0, -128, 127, torch.int8)
        return torch.relu(nn.functional.linear(x, w, self.bias))


def check(function: Any, model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(function(x), model(x), rtol=1e-4, atol=1e-3)


def in_bytes(run: Run) -> bool:
    """Whether its regions multiply int8."""
    return all(d.dense_bytes == d.shape[0] * d.shape[1] for d in run.regions)


@torch.no_grad()
def test_products_of_dequantized_factors() -> None:
    torch.manual_seed(0)
    model = Quantized(weights(90, 70))
    x = torch.randn(2, 9, 70)
    torch._dynamo.mark_dynamic(x, 1)
    run = compile_and_run(model, x, regions=1, schedule="quads", dense="inductor")
    assert in_bytes(run)
    for tokens in (9, 3, 130, 0):
        check(run.function, model, torch.randn(2, tokens, 70))
    x = torch.randn(2, 9, 70)
    x[0, 3, 2], x[1, 1, 1] = torch.inf, -torch.inf  # the largest integers
    check(run.function, model, x)
    model.weight.copy_(weights(90, 70))  # new sums of its rows, too
    model.scale.mul_(2)
    check(run.function, model, x)
    with torch.compiler.set_stance("fail_on_recompile"):
        run.function(torch.randn(2, 33, 70))


class Gated(nn.Module):
    """Two products of the same integers, and a third of what becomes of them."""

    def __init__(self, signed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Quantized(weights(*shape), signed=signed) for shape in ((96, 64), (96, 64), (64, 96)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.layers
        return x + down(gate(x) * up(x))


@torch.no_grad()
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_they_are_members_of_chains(signed: bool, dense: str) -> None:
    torch.manual_seed(0)
    model, x = Gated(signed), torch.randn(2, 40, 64)
    torch._dynamo.mark_dynamic(x, 1)
    run = compile_and_run(model, x, regions=3, dense=dense)
    assert in_bytes(run)
    assert all(("in a chain of 3" in d.reason) is in_chains for d in run.regions)
    for tokens in (40, 3, 130, 0):
        check(run.function, model, torch.randn(2, tokens, 64))
    x = torch.randn(2, 9, 64)
    x[0, 3, 2], x[1, 1, 1] = 1e9, -1e30  # the largest integers
    check(run.function, model, x)
    model.layers[2].weight.copy_(weights(64, 96))
    check(run.function, model, 3 * torch.randn(2, 9, 64))


class Turned(nn.Module):
    """A product of integers that were transposed and put into other dimensions, as heads of attention are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Quantized(weights(96, 64)), Quantized(weights(64, 96))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).unflatten(-1, (4, 24)).transpose(1, 2)
        q = ops.quantize_per_tensor.default(torch.tanh(heads), 0.009, 128, 0, 255, torch.uint8)
        floats = ops.dequantize_per_tensor.default(q.transpose(1, 2).flatten(2), 0.009, 128, 0, 255, torch.uint8)
        last = self.last
        w = ops.dequantize_per_channel.default(last.weight, last.scale, last.zero, 0, -128, 127, torch.int8)
        return nn.functional.linear(floats, w, last.bias)


@torch.no_grad()
@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_integers_are_found_behind_views(dense: str) -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(2, 40, 64)
    run = compile_and_run(model, x, regions=2, dense=dense)
    assert in_bytes(run)
    check(run.function, model, x)


@torch.no_grad()
def test_steps_that_are_found_at_every_call() -> None:
    torch.manual_seed(0)
    model, x = Quantized(weights(90, 70), dynamic=True), torch.randn(2, 9, 70)
    run = compile_and_run(model, x, regions=1, dense="inductor")
    assert in_bytes(run)
    check(run.function, model, x)
    model.weight.copy_(weights(90, 70))
    check(run.function, model, 3 * x + 1)


@torch.no_grad()
def test_one_scale_one_token_and_what_no_kernel_may_take() -> None:
    torch.manual_seed(0)
    model, x = Quantized(weights(24, 40), signed=True, by_row=False, bias=False), torch.randn(1, 40)
    run = compile_and_run(model, x, regions=1)
    assert in_bytes(run)
    check(run.function, model, x)
    for left in (
        Quantized(weights(24, 40), offset=3),  # whose zeros are no zeros
        Quantized(torch.ones(24, 40, dtype=torch.int8)),
        Quantized(weights(24, 1)),
    ):
        x = torch.randn(5, left.weight.shape[1])
        run = compile_and_run(left, x, min_gain=1e9, regions=0)
        check(run.function, left, x)
    floats = compile_and_run(model, torch.randn(5, 40), regions=1, disable=("dequantized-products",))
    assert not in_bytes(floats)


@torch.no_grad()
def test_rows_whose_sum_f32_would_round_stay_floats() -> None:
    """Small results would be differences of two rounded large numbers."""
    torch.manual_seed(0)
    weight = torch.randint(100, 128, (8, 4096), dtype=torch.int8) * (torch.rand(8, 4096) < 0.5)
    model, x = Quantized(weight, bias=False), torch.full((4, 4096), 0.0)  # the integer 117
    x[0, 0], x[1, 1], x[2, :2] = 1, 1, 1
    run = compile_and_run(model, x, regions=1)
    assert not in_bytes(run)
    torch.testing.assert_close(run.output, model(x), rtol=1e-4, atol=1e-7)


def test_the_bias_can_be_trained() -> None:
    torch.manual_seed(0)
    model = Quantized(weights(24, 40))
    reference = copy.deepcopy(model)
    x = torch.randn(5, 40)
    run = compile_and_run(model, x, grad=True, regions=1)
    run.output.square().sum().backward()
    reference(x).square().sum().backward()
    torch.testing.assert_close(model.bias.grad, reference.bias.grad, rtol=1e-4, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_models_that_torchao_exported(dynamic: bool) -> None:
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    torch.manual_seed(0)
    model, x = prune_(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))).eval(), torch.randn(12, 64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = pt2e.prepare_pt2e(exported, quantizer)
    prepared(x)
    quantized = pt2e.convert_pt2e(prepared)
    run = compile_and_run(quantized, x, regions=2)
    assert in_bytes(run)
    check(run.function, quantized, x)


def dynamically(model: nn.Module, **options: Any) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, options.pop("which", {nn.Linear}), **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(torch.backends.quantized.engine in ("none", ""), reason="torch has no quantized engine here")
@torch.no_grad()
def test_dynamically_quantized_layers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(70, 90), nn.GELU(), nn.Linear(90, 40, bias=False), nn.Linear(40, 8)).eval()
    prune_(plain[:3])
    by_row = torch.ao.quantization.per_channel_dynamic_qconfig
    for which in ({nn.Linear}, {nn.Linear: by_row}):
        model = dynamically(plain, which=which)
        stored = [model[i].weight().dequantize() for i in (0, 2)]
        layer = model[0]
        expected, x = model(torch.ones(3, 70)), torch.randn(2, 9, 70)
        assert gossamer.prepare(model) is model
        assert [type(model[i]) is QuantizedLinear for i in (0, 2, 3)] == [True, True, False]  # the last is dense
        assert model[0] is layer
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for index, weight in zip((0, 2), stored, strict=True):
            torch.testing.assert_close(model[index].weight, weight, rtol=1e-6, atol=0)
        torch.testing.assert_close(model(torch.ones(3, 70)), expected, rtol=0.1, atol=0.03)  # by torch in 7 bits
        other = copy.deepcopy(model[:3])
        other.load_state_dict(model[:3].state_dict())
        if which == {nn.Linear}:
            run = compile_and_run(other, x, regions=2)
            torch.testing.assert_close(run.output, model[:3](x), rtol=1e-4, atol=1e-4)
    half = dynamically(plain, dtype=torch.float16)
    gossamer.prepare(half)
    assert not any(isinstance(module, QuantizedLinear) for module in half.modules())
