"""Max pooling beside sparse convolutions: torch's kernel, with its values, gradients and order of images."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.backend.convolution import max_pools
from gossamer.backend.run.max_pool import max_pool
from tests.backend.harness import Run, assert_same, compile_and_run

CASES: dict[str, dict[str, Any]] = {
    "3x3 by steps of two": {"kernel_size": 3, "stride": 2, "padding": 1},
    "5x5 over every pixel": {"kernel_size": 5, "stride": 1, "padding": 2},
    "2x2": {"kernel_size": 2},
    "odd windows up to the end": {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 1), "ceil_mode": True},
    "with gaps": {"kernel_size": 2, "dilation": 2},
}


def sparse(layer: nn.Conv2d) -> nn.Conv2d:
    with torch.no_grad():
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.2)
    return layer


class Network(nn.Module):
    """A sparse convolution, its activation, max pooling, and a dense convolution."""

    def __init__(self, indices: bool = False, **window: Any) -> None:
        super().__init__()
        self.one, self.two = sparse(nn.Conv2d(4, 8, 3, padding=1)), nn.Conv2d(8, 4, 1)
        self.window, self.indices = window, indices

    def forward(self, x: Tensor) -> Tensor:
        y: Any = F.max_pool2d(F.relu(self.one(x)), return_indices=self.indices, **self.window)
        if self.indices:
            y = y[0] + y[1]
        out: Tensor = self.two(y)
        return out


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pools, "_FEWEST", 0)


def pooled(call: Any, *inputs: Tensor) -> int:
    """How often a call, and its gradients, use the operation."""
    with torch.profiler.profile() as profile:
        y = call(*inputs)
        if torch.is_grad_enabled():
            y.square().mean().backward()
    return sum(event.name == "gossamer::max_pool" for event in profile.events())


def run(model: nn.Module, x: Tensor, **options: Any) -> Run:
    return compile_and_run(model, x, dense="inductor", **options)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_maxima_and_gradients_are_those_of_torch(name: str, grad: bool) -> None:
    model, x = Network(**CASES[name]), torch.randn(3, 4, 13, 11)
    twin, given, other = copy.deepcopy(model), x.clone().requires_grad_(grad), x.clone().requires_grad_(grad)
    compiled = run(model, given, grad=grad)
    with torch.set_grad_enabled(grad):
        assert pooled(compiled.function, given) == 1
        y = twin(other)
    assert_same(compiled.output, y)
    assert compiled.output.stride() == y.stride()
    if grad:
        y.square().mean().backward()
        pairs = zip([given, *model.parameters()], [other, *twin.parameters()], strict=True)
        assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    model, x = Network(kernel_size=3, stride=2).to(dtype), torch.randn(2, 4, 12, 12, dtype=dtype)
    compiled = run(model, x)
    with torch.no_grad():
        assert pooled(compiled.function, x) == 1
    assert_same(compiled.output, model(x).detach())


def test_images_of_open_sizes() -> None:
    model, x = Network(kernel_size=3, stride=2, padding=1), torch.randn(2, 4, 12, 10)
    compiled = run(model, x, dynamic=True)
    for sizes in ((2, 4, 12, 10), (3, 4, 17, 9), (1, 4, 3, 3)):
        x = torch.randn(sizes)
        with torch.no_grad():
            assert_same(compiled.function(x), model(x))
            assert pooled(compiled.function, x) == 1


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_indices_that_the_model_reads(order: torch.memory_format) -> None:
    """The activation makes many zeros, so windows have several maxima."""
    model = Network(indices=True, kernel_size=3, stride=2, padding=1)
    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=order)
    compiled = run(model, x)
    with torch.no_grad():
        assert_same(compiled.output, model(x))
        assert pooled(compiled.function, x) == 1


def test_images_in_any_order_with_ties_and_nans() -> None:
    x = torch.randn(2, 3, 8, 8).relu().contiguous(memory_format=torch.channels_last)
    x[0, 1, 4, 4] = torch.nan
    for given in (x, x.contiguous(), x[:, :, ::2], x[:0]):
        maxima, places = max_pool(given, [3, 3], [2, 2], [1, 1], [1, 1], False, True)
        expected = F.max_pool2d(given, 3, 2, 1, return_indices=True) if len(given) else (maxima, places)
        assert maxima.is_contiguous() and places.is_contiguous()
        torch.testing.assert_close(maxima, expected[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places, expected[1])
        assert max_pool(given, [3, 3], [2, 2], [1, 1], [1, 1], False, False)[1].numel() == 0


def test_dense_networks_keep_the_pooling_of_inductor() -> None:
    model, x = Network(kernel_size=3), torch.randn(2, 4, 12, 12)
    compiled = run(model, x, regions=0, min_gain=1e9)
    with torch.no_grad():
        assert pooled(compiled.function, x) == 0
        assert_same(compiled.output, model(x))


def test_the_pass_can_be_left_out() -> None:
    model, x = Network(kernel_size=3), torch.randn(2, 4, 12, 12)
    compiled = run(model, x, disable=["max-pools"])
    with torch.no_grad():
        assert pooled(compiled.function, x) == 0
    assert gossamer.Report(compiled.decisions).sparse
