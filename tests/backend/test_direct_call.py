"""Inductor's code calls operations without the dispatcher, unless somebody profiles."""

import sys
from types import FrameType

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code, run_fw_bw_and_get_code
from torch.profiler import ProfilerActivity, profile

from gossamer import SparseTensor
from gossamer.runtime.direct_call import direct
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
    assert 'call_region = direct("region")' in code
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
        direct("region")([torch.ones(2, 3), torch.ones(3, 3)], "0123")


def _matrix(nonzeros: int) -> SparseTensor:
    dense = torch.zeros(40, 40)
    dense.view(-1)[torch.randperm(1600)[:nonzeros]] = torch.rand(nonzeros) + 0.5
    return SparseTensor.from_dense(dense)


def test_so_are_operations_on_sparse_tensors_forward_and_backward() -> None:
    a, x = _matrix(60), torch.randn(40, 3, requires_grad=True)
    compiled = torch.compile(torch.matmul, backend="sparse", fullgraph=True, options=OPTIONS)
    with fresh_cache():
        out, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(a, x))
    for code in (forward, backward):
        assert "= call_einsum([" in code and "= torch.ops.gossamer." not in code
    assert_same(out, a.to_dense() @ x)
    assert x.grad is not None
    assert_same(x.grad, a.to_dense().t() @ torch.ones(40, 3))


def test_a_call_runs_little_python_of_ours() -> None:
    a, x = _matrix(60), torch.randn(40, 3)
    compiled = torch.compile(torch.matmul, backend="sparse", fullgraph=True, options=OPTIONS)
    expected = [compiled(a, x) for _ in range(2)][-1]
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("gossamer."):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    out = compiled(a, x)
    sys.setprofile(None)
    assert "RowProduct.run" in entered  # or nothing has been counted
    assert len(entered) <= (17 if torch.__version__ >= "2.13" else 32), entered  # Dynamo takes the tensor apart more often
    assert torch.equal(out, expected)


def test_what_changes_is_noticed() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("sparse")
    compiled = torch.compile(torch.matmul, backend=counter, fullgraph=True)
    x = torch.randn(40, 3)
    for nonzeros in (60, 90, 120, 90):
        a = _matrix(nonzeros)
        assert_same(compiled(a, x), a.to_dense() @ x)
        a.mul_(2)
        assert_same(compiled(a, x), a.to_dense() @ x)
    assert counter.frame_count <= 2
