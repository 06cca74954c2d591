"""A model in eval mode with gradients enabled keeps nothing of a call for backward but its inputs, parameters and buffers."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)), torch.randn(16, 32)


def encoder() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True), torch.randn(2, 8, 32)


def images() -> tuple[nn.Module, Tensor]:
    first = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
    model = nn.Sequential(*first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    for statistics in model.buffers():
        if statistics.is_floating_point():
            nn.init.uniform_(statistics, 0.5, 2)
    return model, torch.randn(2, 4, 9, 9)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {
    "MLP": (mlp, 2),
    "encoder": (encoder, 4),
    "images": (images, 3),
}


def made(name: str) -> tuple[nn.Module, Tensor, int]:
    torch.manual_seed(0)
    make, layers = MODELS[name]
    model, x = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.2)
    return model.eval(), x, layers


def memory_of(*tensors: Tensor) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors}


def given_to(model: nn.Module, x: Tensor) -> set[int]:
    return memory_of(x, *model.parameters(), *model.buffers())


def saved_by(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A result, and the tensors that autograd saved for its gradients."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return call(x), saved


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["gradients of weights", "gradients of all"])
@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_autograd_saves_nothing_but_what_the_call_was_given(name: str, dense: str, needs_gradient: bool) -> None:
    model, x, layers = made(name)
    x.requires_grad_(needs_gradient)
    run = compile_and_run(model, x, grad=True, dense=dense, regions=layers)
    found, saved = saved_by(run.function, x)
    known = given_to(model, x)
    assert saved, "the hooks see what the call saves"
    assert not [tuple(each.shape) for each in saved if not memory_of(each) <= known]
    _, of_eager = saved_by(model, x)
    assert [each for each in of_eager if not memory_of(each) <= known], "eager code saves intermediate results"
    wanted = [*model.parameters(), *([x] if needs_gradient else [])]
    assert_same(found, model(x))
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in (found, model(x))), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_no_tensor_stays_alive_but_the_result(name: str, dense: str) -> None:
    """Also none that a function of autograd holds without autograd's knowledge."""
    model, x, layers = made(name)
    call = compile_and_run(model, x, grad=True, dense=dense, regions=layers).function
    call(x)
    before = alive()
    result = call(x)
    assert result.requires_grad
    assert alive() - before - given_to(model, x) <= memory_of(result)


def alive() -> set[int]:
    gc.collect()
    return memory_of(*(each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"))
