"""Mixtures of experts with pruned weights: the whole layer is one region, whatever its tokens choose."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import Tensor

from gossamer.backend import sparse
from gossamer.backend.run import expert_regions, pruned_mixture
from gossamer.backend.run.pruned_mixture import PrunedMixture
from tests.backend.experts_in_models import Mixture, Sorted, SortedAndAdded, SortedTwice, exact, grouped
from tests.backend.harness import Run, assert_same, compile_and_run
from tests.sparsity.made import team_of

assert transformers.integrations.moe  # has defined the product with offsets


def pruned_model(kind: Callable[..., Mixture] = Sorted, dtype: torch.dtype = torch.float32, **options: Any) -> Mixture:
    torch.manual_seed(0)
    model = kind(**options).eval()
    with torch.no_grad():
        for weight in (model.gate_up, model.down):
            weight.mul_(torch.rand_like(weight) < 0.2)
    return model.to(dtype)


def compiled(model: Mixture, tokens: int = 90, **options: Any) -> Run:
    """Compiled for any number of tokens."""
    x = torch.randn(tokens, model.router.in_features).to(model.router.weight.dtype)
    run = compile_and_run(model, x, dynamic=True, **options)
    assert_same(run.output, exact(model, x))
    return run


def reasons(run: Run) -> list[str]:
    """What was decided about the experts."""
    return [decision.reason for decision in run.regions if decision.op == "experts"]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of such a layer, whether it ran chains."""
    found, original = list[bool](), PrunedMixture.__call__

    def call(self: PrunedMixture, operands: list[Tensor]) -> Tensor:
        experts = operands[1]
        found.append(bool(self.chains) and experts.numel() >= pruned_mixture.MANY * experts.unique().numel())
        return original(self, operands)

    monkeypatch.setattr(PrunedMixture, "__call__", call)
    return found


@pytest.mark.parametrize("kind", [Sorted, SortedAndAdded, SortedTwice])
def test_few_and_many_tokens(kind: Callable[..., Mixture], ways: list[bool]) -> None:
    model = pruned_model(kind)
    run = compiled(model)
    how = "a region for each of 5, and a chain of its products, one operation for the layer"
    assert reasons(run) == [how] * 2
    with torch.no_grad():
        for tokens in (1, 2, 17, 64, 300) + (0,) * (kind is SortedAndAdded):  # others view what is empty by -1
            x = torch.randn(tokens, 24)
            assert_same(run.function(x), exact(model, x))
    assert {True, False} == set(ways), "both ways ran"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    run = compiled(pruned_model(dtype=dtype))
    assert all("one operation for the layer" in reason for reason in reasons(run))


@pytest.mark.parametrize("act", [F.relu, F.gelu, torch.tanh])
def test_other_activations(act: Callable[[Tensor], Tensor]) -> None:
    assert all("and a chain" in reason for reason in reasons(compiled(pruned_model(act=act))))


class Ungated(Sorted):
    """No gates: the activation of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(5, 24, 32) * 0.3)

    def products(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        hidden = F.gelu(grouped(x[order // self.top], self.gate_up.transpose(-2, -1), ends))
        return grouped(hidden, self.down.transpose(-2, -1), ends), order

    def expert(self, x: Tensor, e: int) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.gate_up[e])), self.down[e])


class Interleaved(Sorted):
    """Gates and up in turns."""

    def products(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        sums = grouped(x[order // self.top], self.gate_up.transpose(-2, -1), ends)
        return grouped(F.silu(sums[..., ::2]) * sums[..., 1::2], self.down.transpose(-2, -1), ends), order

    def expert(self, x: Tensor, e: int) -> Tensor:
        sums = F.linear(x, self.gate_up[e])
        return F.linear(F.silu(sums[..., ::2]) * sums[..., 1::2], self.down[e])


@pytest.mark.parametrize("kind", [Ungated, Interleaved])
def test_other_layouts(kind: Callable[..., Mixture]) -> None:
    assert all("and a chain" in reason for reason in reasons(compiled(pruned_model(kind))))


def test_experts_of_few_tokens_have_no_chains() -> None:
    run = compiled(pruned_model(), tokens=4)
    assert reasons(run) == ["a region for each of 5, one operation for the layer"] * 2


@pytest.mark.parametrize("tokens", [3, 200])
def test_a_token_that_is_not_finite_stays_alone(tokens: int) -> None:
    model = pruned_model()
    run = compiled(model)
    x = torch.randn(tokens, 24)
    with torch.no_grad():
        expected = exact(model, x)
        x[1] = torch.nan
        found = run.function(x)
    assert found[1].isnan().all()
    keep = torch.arange(tokens) != 1
    assert_same(found[keep], expected[keep])


def test_transposed_and_expanded_tokens() -> None:
    model = pruned_model()
    run = compiled(model)
    with torch.no_grad():
        for x in (torch.randn(24, 70).t(), torch.randn(1, 24).expand(70, 24), torch.randn(70, 48)[:, ::2]):
            assert_same(run.function(x), exact(model, x))


@pytest.mark.parametrize("tokens", [3, 200])
def test_changed_weights_and_an_expert_without_any(tokens: int) -> None:
    model = pruned_model()
    run = compiled(model)
    x = torch.randn(tokens, 24)
    with torch.no_grad():
        model.down.mul_(3)
        assert_same(run.function(x), exact(model, x))
        model.gate_up[2] = 0
        assert_same(run.function(x), exact(model, x))
        model.gate_up[1] = torch.randn(32, 24) * (torch.rand(32, 24) < 0.1)
        assert_same(run.function(x), exact(model, x))
        model.down[3] = torch.randn(24, 16)  # dense now
        assert_same(run.function(x), exact(model, x))


def test_copies_and_modes(ways: list[bool]) -> None:
    model = pruned_model()
    compiled(model)
    x = torch.randn(64, 24)
    for other in (copy.deepcopy(model), copy.deepcopy(model).train()):
        with torch.no_grad():
            other.down.mul_(2)
            ways.clear()
            found = torch.compile(other, backend=sparse, dynamic=True, options={"dense": "eager", "min_gain": 0})(x)
            assert ways == [True]
            assert_same(found, exact(other, x))


def test_with_gradients_the_layer_is_dense() -> None:
    model = pruned_model()
    x = torch.randn(30, 24)
    run = compile_and_run(model.train(), x, grad=True)
    assert [d.schedule for d in run.regions if d.op == "experts"] == ["routed"] * 2
    run.output.sum().backward()
    found, model.down.grad = model.down.grad, None
    exact(model, x).sum().backward()
    assert found is not None and model.down.grad is not None
    assert_same(found, model.down.grad)


def test_the_next_process_loads_no_compiler(tmp_path: Path) -> None:
    """Neither MLIR nor the passes, nor what only sparse tensors need: the kernels are on disk, that which sorts slots, too."""
    program = """
import sys, torch, transformers.integrations.moe
from torch._dynamo.utils import counters
from tests.backend.experts_in_models import Sorted, exact
torch.manual_seed(0)
model = Sorted().eval()
with torch.no_grad():
    for weight in (model.gate_up, model.down):
        weight.mul_(torch.rand_like(weight) < 0.2)
    options = {"min_gain": 0, "dense": "inductor"}
    compiled = torch.compile(model, backend="sparse", fullgraph=True, dynamic=True, options=options)
    for tokens in 90, 3:
        x = torch.randn(tokens, 24)
        torch.testing.assert_close(compiled(x), exact(model, x))
compiler = ("torch_mlir", "gossamer.passes.weights", "gossamer.passes.pipelines", "gossamer.sparsity")
print(counters["gossamer"]["regions"], counters["aot_autograd"]["autograd_cache_hit"])
print(sorted({part for part in compiler if any(name.startswith(part) for name in sys.modules)}))
"""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "GOSSAMER_CACHE_DIR": str(tmp_path / "gossamer")}
    environment = {**os.environ, **caches}
    found = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout.split("\n"))
    cold, warm = found
    assert cold[0] == "3 0" and "torch_mlir" in cold[1]
    assert warm[:2] == ["3 1", "[]"]


@pytest.mark.parametrize("tokens", [3, 200])
def test_any_team_gives_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = pruned_model(), torch.randn(tokens, 24)
    run = compiled(model)
    called, original = list[bool](), expert_regions.run_at_once
    monkeypatch.setattr(expert_regions, "run_at_once", lambda *given: called.append(original(*given)) or called[-1])
    found = []
    for threads in (1, 2, 5):
        with team_of(threads), torch.no_grad():
            found.append(run.function(x))
    assert all(torch.equal(each, found[0]) for each in found)
    assert_same(found[0], exact(model, x))
    assert called[0], "one thread takes all experts"


@pytest.mark.parametrize("tokens", [3, 200])
def test_tokens_that_all_choose_one_expert_are_shared_by_the_team(tokens: int) -> None:
    model = pruned_model(top=1)
    run = compiled(model)
    with torch.no_grad():
        model.router.weight.zero_()
        x = torch.randn(tokens, 24)
        with team_of(4):
            assert_same(run.function(x), exact(model, x))
