"""Results behind sparse convolutions have eager's strides and memory format, whatever follows the convolution."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run

CHANNELS = 8


def norm(layer: nn.Module) -> nn.Module:
    """A norm whose scales and shifts do something."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


class Applied(nn.Module):
    """A function of the convolution's result y and of the model's input x, with a layer that it may use."""

    def __init__(self, function: Callable[..., object], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, y: Tensor, x: Tensor) -> object:
        return self.function(y, x) if self.layer is None else self.function(self.layer, y, x)


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(CHANNELS, 4, 1), nn.Conv2d(4, CHANNELS, 1)

    def forward(self, y: Tensor) -> Tensor:
        return y * torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))


def behind(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer."""
    return lambda: Applied(lambda layer, y, x: layer(y), norm(make()))


def function(call: Callable[..., object]) -> Callable[[], nn.Module]:
    """A function of y and x."""
    return lambda: Applied(call)


TAILS: dict[str, Callable[[], nn.Module]] = {
    "nothing": function(lambda y, x: y),
    "activations": function(lambda y, x: F.hardswish(F.gelu(F.leaky_relu(y, 0.1)))),
    "prelu": behind(lambda: nn.PReLU(CHANNELS)),
    "max pool": function(lambda y, x: F.max_pool2d(y, 3, 2, 1)),
    "max pool and its places": function(lambda y, x: F.max_pool2d(y, 2, return_indices=True)),
    "average pool": function(lambda y, x: F.avg_pool2d(F.relu(y), 2)),
    "adaptive pools": function(
        lambda y, x: (F.adaptive_avg_pool2d(y, 3), F.adaptive_max_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1))
    ),
    "batch norm": behind(lambda: nn.BatchNorm2d(CHANNELS)),
    "group norm": behind(lambda: nn.GroupNorm(2, CHANNELS)),
    "instance norm": behind(lambda: nn.InstanceNorm2d(CHANNELS, affine=True)),
    "norm of channels": behind(lambda: nn.LocalResponseNorm(3)),
    "layer norm": function(lambda y, x: F.layer_norm(y.permute(0, 2, 3, 1), [CHANNELS]).permute(0, 3, 1, 2)),
    "nearest": function(lambda y, x: F.interpolate(F.relu(y), scale_factor=2)),
    "bilinear": function(lambda y, x: F.interpolate(y, size=(9, 11), mode="bilinear", align_corners=False)),
    "beside the input": function(lambda y, x: torch.cat([y, x], 1)),
    "beside itself": function(lambda y, x: torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(y, 2)], 1)),
    "halves": function(lambda y, x: F.relu(y).chunk(2, 1)),
    "added to the input": function(lambda y, x: F.relu(y + x)),
    "padded": function(lambda y, x: F.pad(y, (1, 1, 2, 0))),
    "shuffled": function(lambda y, x: F.pixel_shuffle(y, 2)),
    "softmax": function(lambda y, x: y.softmax(1)),
    "gate": behind(Gate),
    "flat": function(lambda y, x: (y.flatten(1), y.flatten(2).mT, y.mean((2, 3)))),
    "depthwise": behind(lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)),
    "dense convolution": behind(lambda: nn.Conv2d(CHANNELS, 5, 3, 2, 1)),
    "transposed convolution": behind(lambda: nn.ConvTranspose2d(CHANNELS, 5, 2, 2)),
}


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv 1x1": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 1), (6, 8)),
    "conv 3x3": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), (6, 8)),
    "strided": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1), (11, 9)),
    "grouped": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=2, bias=False), (9, 8)),
    "one channel": (lambda: nn.Conv2d(CHANNELS, 1, 3), (9, 8)),
    "one pixel": (lambda: nn.Conv2d(CHANNELS, CHANNELS, (6, 8)), (6, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, 2, 1), (6, 5)),
    "of lines": (lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1), (20,)),
    "of volumes": (lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1), (4, 6, 5)),
}


class Model(nn.Module):
    """A pruned convolution, and what follows."""

    def __init__(self, convolution: nn.Module, tails: Sequence[nn.Module]) -> None:
        super().__init__()
        self.convolution, self.tails = convolution, nn.ModuleList(tails)
        with torch.no_grad():
            weight = convolution.get_parameter("weight")
            weight.mul_(torch.rand_like(weight) < 0.3)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.convolution(x)
        found = [tail(y, x) for tail in self.tails]
        return [each for results in found for each in ([results] if isinstance(results, Tensor) else results)]


def gradients(results: list[Tensor], x: Tensor, model: nn.Module) -> list[Tensor]:
    """Of a loss that norms do not make constant: of the input and of all parameters."""
    weighted = [y.square() * torch.linspace(-1, 2, y.numel()).to(y).view(y.shape) for y in results if y.is_floating_point()]
    torch.cat([each.flatten() for each in weighted]).sum().backward()
    return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


def assert_lies_alike(found: Tensor, expected: Tensor) -> None:
    """Strides and memory formats are the same. Views that eager code can take exist."""
    assert strides(found) == strides(expected)
    assert found.is_contiguous() == expected.is_contiguous()
    if (last := LAST.get(found.dim())) is not None:
        assert found.is_contiguous(memory_format=last) == expected.is_contiguous(memory_format=last)
        if expected.is_contiguous(memory_format=last):
            assert found.movedim(1, -1).view(-1, found.shape[1]).shape[1] == found.shape[1]
    if expected.is_contiguous():
        assert found.view(found.shape[0], -1).shape[0] == found.shape[0]


def strides(tensor: Tensor) -> list[int]:
    """Without those of dimensions of size 1, which say nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def check(convolution: str, tails: Sequence[Callable[[], nn.Module]], innermost: bool, training: bool, dense: str) -> None:
    """Compares values with float64, and layouts with eager code."""
    torch.manual_seed(0)
    make, sizes = CONVOLUTIONS[convolution]
    model, x = Model(make(), [tail() for tail in tails]).train(training), torch.randn(2, CHANNELS, *sizes)
    x = x.to(memory_format=LAST[x.dim()] if innermost else torch.contiguous_format)
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    given, plain, double = (x.detach().clone().to(y.dtype).requires_grad_(training) for y in (x, x, x.double()))
    run = compile_and_run(model, given, grad=training, dense=dense)
    assert run.regions[0].name == "convolution.weight" and run.regions[0].op.startswith("conv")
    with torch.set_grad_enabled(training):
        again, expected, exact = run.function(given), eager(plain), wide(double)
    for results in (run.output, again):
        for found, alike, right in zip(results, expected, exact, strict=True):
            torch.testing.assert_close(found.detach().double(), right.detach().double(), rtol=1e-4, atol=1e-4)
            assert_lies_alike(found, alike)
    if training:
        lists = gradients(again, given, model), gradients(expected, plain, eager), gradients(exact, double, wide)
        size = torch.stack([gradient.abs().max() for gradient in lists[-1]]).max()
        for found, alike, right in zip(*lists, strict=True):
            assert_same(found / size, (right / size).float())
            assert strides(found) == strides(alike)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("innermost", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_results_have_the_memory_format_of_eager_code(tail: str, innermost: bool, training: bool) -> None:
    check(["conv 1x1", "conv 3x3"][list(TAILS).index(tail) % 2], [TAILS[tail]], innermost, training, "eager")


@pytest.mark.parametrize("innermost", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_results_of_inductor_have_it_too(innermost: bool, training: bool) -> None:
    tails = ["max pool", "average pool", "group norm", "bilinear", "beside the input"]
    check("conv 3x3", [TAILS[tail] for tail in tails], innermost, training, "inductor")


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.parametrize("innermost", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_results_of_all_convolutions_have_it(convolution: str, innermost: bool, training: bool) -> None:
    if innermost and convolution == "of lines":
        pytest.skip("torch has no such format for three dimensions")
    tails = [function(lambda y, x: [y, F.relu(y), torch.cat([y, y.sigmoid()], 1), y.mean(-1, keepdim=True)])]
    check(convolution, tails, innermost, training, "eager")
