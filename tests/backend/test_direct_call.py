"""Inductor's code calls regions without the dispatcher, unless somebody profiles."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.profiler import ProfilerActivity, profile

from gossamer.backend import direct_call
from tests.backend.harness import assert_same, prune_

OPTIONS = {"dense": "inductor", "min_gain": 0, "strict": True}


@pytest.fixture
def model() -> nn.Module:
    return prune_(nn.Sequential(nn.Linear(64, 48), nn.Softmax(-1))).eval().requires_grad_(False)


def test_the_call_is_a_function_in_the_code(model: nn.Module) -> None:
    x = torch.randn(5, 64)
    with fresh_cache():
        compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
        output, (code,) = run_and_get_code(compiled, x)
    assert "from gossamer.backend.direct_call import call_region" in code
    assert "= call_region([" in code and "torch.ops.gossamer.region.default(" not in code
    assert_same(output, model(x))


def test_a_profiler_sees_the_region(model: nn.Module) -> None:
    x = torch.randn(5, 64)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    compiled(x)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        output = compiled(x)
    assert [event.count for event in trace.key_averages() if event.key == "gossamer::region"] == [1]
    assert_same(output, model(x))


def test_backward_and_dynamic_shapes(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="sparse", fullgraph=True, dynamic=True, options=OPTIONS)
    for tokens in (5, 9):
        x = torch.randn(tokens, 64, requires_grad=True)
        (expected,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
        (actual,) = torch.autograd.grad(compiled(x)[:, 0].sum(), x)
        assert_same(actual, expected)


def test_an_unknown_region_says_so() -> None:
    with pytest.raises(Exception, match="region 0123 was compiled by another process"):
        direct_call.call_region([torch.ones(2, 3), torch.ones(3, 3)], "0123")
