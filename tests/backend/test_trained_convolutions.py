"""Pruned convolutions in training: regions forward and backward, gradients against float64, weights and masks that change."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import gossamer
from gossamer.backend.run import masked_filters
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.sparsity.prepare import Mask
from tests.backend.harness import Run, assert_same, compile_and_run

TYPES = [torch.float32, torch.float64]


class Network(nn.Module):
    """Pointwise, depthwise, k x k, strided and dilated layers, batch norm in training, one layer of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.norm = nn.Conv2d(6, 20, 1, bias=False), nn.BatchNorm2d(20)
        self.depthwise = nn.Conv2d(20, 20, 3, 2, 1, groups=20, bias=False)
        self.square, self.shortcut = nn.Conv2d(20, 9, 3, padding=1), nn.Conv2d(9, 11, 1, 2)
        self.rows, self.wide = nn.Conv2d(9, 9, (3, 5), (1, 2), (0, 1), groups=9), nn.Conv2d(9, 4, 2, dilation=2)
        self.empty = nn.Conv2d(9, 5, 1)
        for layer in (self.widen, self.square, self.shortcut, self.wide, self.empty):
            kept = torch.rand_like(layer.weight) < (0 if layer is self.empty else 0.2)
            parametrize.register_parametrization(layer, "weight", Mask(kept.float()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.square(self.depthwise(F.relu(self.norm(self.widen(x))))))
        sums = self.shortcut(y).sum((2, 3)).square().sum() + self.empty(y).square().mean()
        return sums + self.wide(self.rows(y)).square().mean()


def assert_same_gradients(run: Run, model: nn.Module, x: Tensor, steps: int = 3) -> None:
    """Of several steps, against float64 in eager mode."""
    wide = copy.deepcopy(model).double()
    for _ in range(steps):
        given, twin = (each.detach().clone().requires_grad_() for each in (x, x.double()))
        for each, call, images in ((model, run.function, given), (wide, wide, twin)):
            each.zero_grad()
            call(images).backward()  # type: ignore[operator]
        assert given.grad is not None and twin.grad is not None
        _close(given.grad, twin.grad)
        for one, other in zip(model.parameters(), wide.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            _close(one.grad, other.grad)
        with torch.no_grad():
            for one, other in zip(model.parameters(), wide.parameters(), strict=True):
                one.add_(0.1)
                other.copy_(one)


def _close(actual: Tensor, expected: Tensor) -> None:
    size = max([1.0, *expected.abs().flatten().tolist()])
    assert_same(actual / size, (expected / size).to(actual.dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_all_kinds_of_layers_over_several_steps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Network().to(dtype), torch.randn(2, 6, 21, 19, dtype=dtype)
    run = compile_and_run(model, x.clone().requires_grad_(), grad=True)
    ops = sorted(d.op for d in run.regions)
    forward = ["conv 1x1", "conv 1x1", "conv 1x1", "conv 2x2", "conv 3x3"]
    assert ops == sorted([*forward, *(f"{op} backward" for op in forward), *["gradient"] * 5])
    depthwise = sorted(d.op for d in run.decisions if "depthwise" in d.op)
    assert depthwise == [f"conv {size} depthwise{way}" for size in ("3x3", "3x5") for way in ("", " backward")]
    assert len(run.decisions) == len(ops) + len(depthwise)  # nothing is said of masks
    assert_same_gradients(run, model, x)
    masks = [layer.parametrizations.weight[0].mask for layer in (model.widen, model.square)]
    for mask in masks:
        mask.copy_(torch.rand_like(mask) < 0.3)
    assert_same_gradients(run, model, x)
    assert_same_gradients(run, model, x.contiguous(memory_format=torch.channels_last), steps=1)


@pytest.mark.parametrize("how", ["hook", "zeros", "product"])
def test_weights_pruned_otherwise(how: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv1d(12, 8, 3, padding=1), torch.randn(3, 12, 31)
    model: nn.Module = nn.Sequential(layer)
    if how == "hook":
        prune.l1_unstructured(layer, "weight", 0.8)
        gossamer.prepare(model)
    elif how == "zeros":
        with torch.no_grad():
            layer.weight *= torch.rand_like(layer.weight) < 0.2
    else:

        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(layer.weight.detach().clone())
                self.register_buffer("mask", (torch.rand_like(layer.weight) < 0.2).float())

            def forward(self, x: Tensor) -> Tensor:
                return F.conv1d(x, self.weight * self.mask, padding=1)

        model = Masked()
    summed = _Squared(model)
    dense = "inductor" if how == "hook" else "eager"
    masked = [] if how == "zeros" else ["gradient"]
    run = compile_and_run(summed, x.clone().requires_grad_(), grad=True, regions=2 + len(masked), dense=dense)
    assert sorted(d.op for d in run.regions) == ["conv 3", "conv 3 backward", *masked]
    assert_same_gradients(run, summed, x)


class _Squared(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()  # type: ignore[no-any-return]


def test_batches_are_dynamic_and_empty_and_what_is_not_finite_arrives() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 7, 1)
    parametrize.register_parametrization(layer, "weight", Mask((torch.rand(7, 5, 1, 1) < 0.3).float()))
    model, x = _Squared(layer), torch.randn(3, 5, 8, 6)
    torch._dynamo.mark_dynamic(x, 0)
    run = compile_and_run(model, x, grad=True, regions=2)
    for batch in (1, 4, 0):
        assert_same_gradients(run, model, torch.randn(batch, 5, 8, 6), steps=1)
    x[1, :, 2, 2] = float("nan")
    given = x.clone().requires_grad_()
    run.function(given).backward()
    assert given.grad is not None and given.grad[1, :, 2, 2].isnan().any() and not given.grad[0].isnan().any()


@pytest.mark.parametrize("recipe", ["fixed", "set"])
def test_recipes_train_convolutions_in_compiled_steps(recipe: str) -> None:
    """Their masks come and change between steps; the compiled model follows."""
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 6, 1)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(4, 4, 9, 9), torch.randn(4, 6, 9, 9)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        with torch.no_grad():
            for kernel in (each[0].weight, each[2].weight):
                kernel[kernel.abs() < kernel.abs().median()] = 0
        gossamer.train_sparse(each, optimizer, recipe, steps=6, **({} if recipe == "fixed" else {"sparsity": 0.5, "every": 2}))
    run = compile_and_run(model, x, grad=True, regions=3)
    assert [d.op for d in run.regions] == ["conv 3x3", "conv 1x1", "conv 1x1 backward"]
    losses: list[list[float]] = [[], []]
    for call, optimizer, found in zip((run.function, twin), optimizers, losses, strict=True):
        for _ in range(6):
            optimizer.zero_grad()
            loss = F.mse_loss(call(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert found[-1] < found[0]
    assert_same(*map(torch.tensor, losses))


class Others(nn.Module):
    """Groups, strided kernels, transposed ones, volumes, a padding larger than the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.up = nn.Conv2d(6, 9, 3, 2, 1, groups=3), nn.ConvTranspose2d(9, 4, 4, 2, 1)
        self.apart, self.wide = nn.Conv2d(4, 5, 2, 3, bias=False), nn.Conv2d(4, 3, 1, padding=2)
        self.volume, self.rise = nn.Conv3d(3, 4, 3, (1, 2, 1), 1), nn.ConvTranspose3d(4, 2, (1, 3, 2), (1, 2, 2), groups=2)
        for layer in self.children():
            parametrize.register_parametrization(layer, "weight", Mask((torch.rand_like(layer.weight) < 0.3).float()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.relu(self.grouped(x)))
        z = self.rise(F.silu(self.volume(self.wide(y)[:, :, None].expand(-1, -1, 2, -1, -1))))
        return self.apart(y).square().sum() + z.square().mean()


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_other_kinds_of_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Others().to(dtype), torch.randn(2, 6, 11, 14, dtype=dtype)
    run = compile_and_run(model, x.clone().requires_grad_(), grad=True, regions=18)
    kernels = ["1x1", "1x3x2", "2x2", "3x3", "3x3x3", "4x4"]
    assert sorted(d.op for d in run.regions if "backward" in d.op) == [f"conv {kernel} backward" for kernel in kernels]
    assert_same_gradients(run, model, x)


class Strided(nn.Module):
    """Kernels with strides, of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 9, (5, 2), (3, 2), (2, 0), (1, 2))
        self.shortcut, self.grouped = nn.Conv2d(6, 9, 1, 2), nn.Conv2d(9, 6, 3, (1, 2), 1, groups=3)
        for layer in self.children():
            parametrize.register_parametrization(layer, "weight", Mask((torch.rand_like(layer.weight) < 0.3).float()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x))).square().sum()
        return y + self.grouped(F.relu(self.shortcut(x))).square().sum()


def test_gradients_behind_strides_for_images_of_open_sizes() -> None:
    torch.manual_seed(0)
    model, x = Strided(), torch.randn(2, 6, 23, 30, requires_grad=True)
    for axis in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, axis)
    run = compile_and_run(model, x, grad=True, regions=12)
    assert sum(d.op.endswith("backward") for d in run.regions) == 4
    for shape in ((2, 6, 23, 30), (3, 6, 24, 31), (1, 6, 40, 17), (0, 6, 22, 41)):
        assert_same_gradients(run, model, torch.randn(shape), steps=1)


class Summed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def test_gradients_behind_strides_for_images_of_unbacked_sizes() -> None:
    torch.manual_seed(0)
    model = Summed(nn.Conv2d(6, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 12, 3, 2, 1, bias=False))
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(torch.rand_like(layer.weight) < 0.3)  # type: ignore[union-attr, operator, arg-type]
    x = torch.randn(2, 6, 20, 19, requires_grad=True)
    torch._dynamo.decorators.mark_unbacked(x, 2)
    run = compile_and_run(model, x, grad=True)
    assert sum(d.op.endswith("backward") for d in run.regions) == 2
    for shape in ((2, 6, 20, 19), (2, 6, 23, 19), (2, 6, 2, 19)):
        assert_same_gradients(run, model, torch.randn(shape), steps=1)


def test_gradients_that_stay_with_torch_say_why() -> None:
    model, x = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6), torch.randn(1, 6, 12, 12, requires_grad=True)
    parametrize.register_parametrization(model, "weight", Mask((torch.rand_like(model.weight) < 0.2).float()))
    for axis in (2, 3):
        torch._dynamo.mark_dynamic(x, axis)
    run = compile_and_run(model, x, grad=True, regions=1)
    why = "no sparse gradient behind a stride of a depthwise convolution for images of open sizes"
    assert [d.reason for d in run.decisions if d.op == "conv 3x3 depthwise backward"] == [why]
    run.output.square().sum().backward()
    found, x.grad = x.grad, None
    model(x).square().sum().backward()
    assert found is not None and x.grad is not None
    assert_same(found, x.grad)


class Between(nn.Module):
    """Two layers under masks, and between them a convolution with a kernel that is an input, which stays torch's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        for layer in (self.first, self.last):
            prune.random_unstructured(layer, "weight", 0.8)

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        y: Tensor = self.last(F.relu(F.conv2d(F.relu(self.first(x)), kernel, padding=1)))
        return y


def test_steps_pack_nothing_anew_beside_dense_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would put channels innermost around the dense layer, and copy all weights and masks at every step."""
    model, twin, x = Between(), Between(), (torch.randn(2, 4, 12, 12), torch.randn(8, 8, 3, 3))
    run = compile_and_run(model, *x, grad=True, dense="inductor", regions=5)
    made: list[object] = []

    def step(call: nn.Module, each: nn.Module) -> Tensor:
        each.zero_grad()
        loss = call(*x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]
        return loss

    for number in range(4):
        assert_same(step(run.function, model), step(twin, twin))  # type: ignore[arg-type]
        if number == 0:
            monkeypatch.setattr(masked_filters._Kept, "of", lambda *given: made.append(given))
            monkeypatch.setattr(CompiledRegion, "dense", lambda *given: made.append(given))
    assert made == []


class Chosen(nn.Module):
    """A dense layer under a mask, on as many of the images as their values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        parametrize.register_parametrization(self.layer, "weight", Mask((torch.rand_like(self.layer.weight) < 0.5).float()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.relu(self.layer(x[x[:, 0, 0, 0] > 0])))
        return y


def test_dense_layers_on_an_unknown_number_of_images() -> None:
    torch.manual_seed(0)
    model = Chosen()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compile_and_run(model, torch.randn(6, 3, 9, 9), grad=True, dense="inductor", min_gain=1e9, regions=0)
        for images in (6, 9, 1):
            x = torch.randn(images, 3, 9, 9)
            x[0, 0, 0, 0] = 1
            given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            for call, each in ((run.function, given), (model, other)):
                call(each).square().mean().backward()
            assert given.grad is not None and other.grad is not None
            assert_same(run.function(x), model(x))
            assert_same(given.grad, other.grad)
