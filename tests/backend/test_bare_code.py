"""Inductor's code is called without what AOTAutograd puts around it, where the graph needs none of that."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.backend.harness import assert_same, compile_and_run, prune_

AROUND = "runtime_wrapper"
"""The function of AOTAutograd that all other calls go through."""


@pytest.fixture
def model() -> nn.Module:
    return prune_(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))).eval()


def functions_called(call: Callable[[], object]) -> list[str]:
    """The names of all Python functions that run."""
    names = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def compiled(function: Callable[..., Any], *inputs: Any, grad: bool = False, regions: int | None = None) -> Callable[..., Any]:
    """The function, after two calls: the first one tries whether the short way serves."""
    found = compile_and_run(function, *inputs, dense="inductor", grad=grad, regions=regions).function
    with torch.set_grad_enabled(grad):
        found(*inputs)
    return found


@pytest.mark.parametrize("grad", [False, True])
def test_a_model_goes_the_short_way(model: nn.Module, grad: bool) -> None:
    x, other = torch.randn(5, 64), torch.randn(5, 64)
    function = compiled(model, x, grad=grad)
    with torch.set_grad_enabled(grad):
        assert AROUND not in functions_called(lambda: function(other))
        assert_same(function(other), model(other))


def test_gradients_of_a_model_that_went_the_short_way(model: nn.Module) -> None:
    x = torch.randn(5, 64, requires_grad=True)
    function = compiled(model, x, grad=True)
    found = torch.autograd.grad(function(x).square().sum(), [x, *model.parameters()])
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


def test_open_sizes_go_the_short_way(model: nn.Module) -> None:
    function = compile_and_run(model, torch.randn(5, 64), dense="inductor", dynamic=True).function
    with torch.no_grad():
        for tokens in (5, 300, 1000):
            x = torch.randn(tokens, 64)
            assert_same(function(x), model(x))
        assert AROUND not in functions_called(lambda: function(x))


def test_a_view_of_an_input_is_a_view_of_it(model: nn.Module) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:2], model(x)

    x = torch.randn(5, 64)
    run = compiled(function, x)
    with torch.no_grad():
        view, result = run(x)
        assert view.data_ptr() == x.data_ptr() and view._is_view()
        assert_same(result, model(x))
        x.add_(1)
        assert_same(view, x[:2])


def test_a_write_to_an_input_counts(model: nn.Module) -> None:
    def function(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        x.add_(1)
        return y

    x = torch.randn(5, 64)
    run = compiled(function, x)
    version, before = x._version, x.clone()
    with torch.no_grad():
        assert_same(run(x), model(before))
        assert x._version == version + 1
        assert_same(x, before + 1)
        assert AROUND in functions_called(lambda: run(x))


def test_a_result_that_is_given_twice(model: nn.Module) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = model(x)
        return y, y, x

    x = torch.randn(5, 64)
    run = compiled(function, x)
    with torch.no_grad():
        first, second, same = run(x)
        assert first is second and same is x
        assert_same(first, model(x))


def test_a_profiler_sees_inductor(model: nn.Module) -> None:
    x = torch.randn(5, 64)
    run = compiled(model, x)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as trace:
        run(x)
    assert any("CompiledFxGraph" in event.name for event in trace.events())


def test_threads_that_call_first_at_the_same_time(model: nn.Module) -> None:
    x = torch.randn(5, 64)
    run = compile_and_run(model, x, dense="inductor").function
    results: list[Tensor] = []
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        with torch.no_grad():
            results.extend(run(x) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        assert_same(result, model(x).detach())
    with torch.no_grad():
        assert AROUND not in functions_called(lambda: run(x))
