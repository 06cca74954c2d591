"""Weights that hooks compute and write to their module: computed when a parameter changes, not at every call."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.backend.harness import Run, assert_same, compile_and_run

Hook = Callable[[nn.Linear], object]
MODES = ["no_grad", "eval", "train"]


def prune_half(layer: nn.Linear) -> object:
    return prune.l1_unstructured(layer, "weight", 0.8)


def prune_in_turns(layer: nn.Linear) -> object:
    prune.l1_unstructured(layer, "weight", 0.5)
    return prune.ln_structured(layer, "weight", 0.3, n=2, dim=0)


def normalize(layer: nn.Linear) -> object:
    with torch.no_grad():
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


def network(hook: Hook, mode: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    for layer in (model[0], model[2]):
        hook(layer)  # type: ignore[arg-type]
    return model.train(mode == "train")


def run(model: nn.Module, x: Tensor, mode: str, **options: Any) -> Run:
    return compile_and_run(model, x, grad=mode != "no_grad", **options)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an element for each computation of static results."""
    from gossamer.backend import static_results

    calls, apart = list[int](), static_results._apart

    def counting(*args: Any) -> tuple[Callable[..., Any], Sequence[int]]:
        compute, needed = apart(*args)
        return (lambda *inputs: (calls.append(1), compute(*inputs))[1]), needed

    monkeypatch.setattr(static_results, "_apart", counting)
    return calls


@pytest.mark.parametrize("mode", ["no_grad", "eval"])
def test_models_that_share_a_graph_keep_theirs(mode: str, computed: list[int]) -> None:
    models, x = [network(prune_half, mode) for _ in range(2)], torch.randn(8, 32)
    with torch.no_grad():
        models[1][0].weight_orig.mul_(2)  # type: ignore[operator, union-attr]
    functions = [run(model, x, mode, regions=0 if n else None).function for n, model in enumerate(models)]
    with torch.set_grad_enabled(mode != "no_grad"):
        for _ in range(3):
            for model, function in zip(models, functions, strict=True):
                assert_same(function(x), model(x))
    assert len(computed) == 2


@pytest.mark.parametrize("hook", [prune_half, prune_in_turns, normalize])
@pytest.mark.parametrize("mode", MODES)
def test_results_weights_and_gradients_are_those_of_eager_code(hook: Hook, mode: str) -> None:
    model, other, x = network(hook, mode), network(hook, mode), torch.randn(16, 32)
    function = run(model, x, mode).function
    for _ in range(3):
        with torch.set_grad_enabled(mode != "no_grad"):
            ours, theirs = function(x), other(x)
            assert_same(ours, theirs)
            torch.testing.assert_close(model[0].weight, other[0].weight)
            assert model[0].weight.requires_grad == other[0].weight.requires_grad == (mode != "no_grad")
            if mode != "no_grad":  # a loss that reads the computed weight, too
                (ours.square().mean() + model[0].weight.abs().mean()).backward()
                (theirs.square().mean() + other[0].weight.abs().mean()).backward()
                for a, b in zip(model.parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for each in (*model.parameters(), *other.parameters()):
                each.mul_(0.9)


@pytest.mark.parametrize("mode", MODES)
def test_pruned_layers_are_sparse_as_without_hooks(mode: str) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    with_hooks = run(network(prune_half, mode), x, mode)
    torch._dynamo.reset()
    model = network(prune_half, mode)
    for layer in (model[0], model[2]):
        prune.remove(layer, "weight")
    without = run(model, x, mode)
    if mode == "train":  # the mask says more than zeros do: the gradient is sparse as well
        assert len(with_hooks.regions) > len(without.regions)
    else:
        assert [d.reason for d in with_hooks.regions] == [d.reason for d in without.regions]


@pytest.mark.parametrize("mode", ["no_grad", "eval"])
def test_they_are_computed_once_until_something_changes(mode: str, computed: list[int]) -> None:
    model, x = network(prune_half, mode), torch.randn(16, 32)
    function = run(model, x, mode).function
    with torch.set_grad_enabled(mode == "eval"):
        for _ in range(3):
            function(x)
        assert len(computed) == 1
        with torch.no_grad():
            model[0].weight_orig.mul_(2)
        function(x)
        assert len(computed) == 2
        model[0].weight_mask.zero_()
        function(x)
        assert len(computed) == 3 and not model[0].weight.any()


@pytest.mark.parametrize("hook", [prune_half, normalize])
def test_inference_mode_and_others_take_turns(hook: Hook) -> None:
    model, x = network(hook, "eval"), torch.randn(8, 32)
    expected = model(x).detach()
    with torch.inference_mode():
        function = run(model, x, "no_grad").function
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            result = function(x)
            assert_same(result.detach().clone(), expected)
    result.sum().backward()


def test_a_weight_that_somebody_overwrites_is_computed_again() -> None:
    model, x = network(prune_half, "no_grad"), torch.randn(16, 32)
    function = run(model, x, "no_grad").function
    expected = model[0].weight.clone()
    model[0].weight.zero_()
    with torch.no_grad():
        function(x)
    torch.testing.assert_close(model[0].weight, expected)


def test_a_buffer_that_the_graph_writes_to_is_no_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = prune_in_place(nn.Linear(32, 32))
            self.register_buffer("scale", torch.ones(1))
            self.register_buffer("scaled", torch.ones(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.add_(1)
            self.scaled = self.layer.weight * self.scale
            return self.layer(x)

    model, other, x = Scaled().eval(), Scaled().eval(), torch.randn(16, 32)
    other.load_state_dict(model.state_dict())
    function = run(model, x, "no_grad").function
    with torch.no_grad():
        other(x)
        for _ in range(3):
            assert_same(function(x), other(x))
            torch.testing.assert_close(model.scaled, other.scaled)


def prune_in_place(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.2)
    return layer


def test_large_weights_are_what_the_mask_keeps_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.sparsity.compiler.kept_entries import KeptEntries

    made, spread = list[int](), KeptEntries.spread
    monkeypatch.setattr(KeptEntries, "spread", lambda *given: (made.append(1), spread(*given))[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.9)
    x, optimizer = torch.randn(128, 256), torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"min_gain": 0})
    for step in range(4):
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        for layer in (model[0], model[2]):
            kept = layer.weight_orig.detach() * layer.weight_mask
            assert torch.equal(layer.weight.detach(), kept) and layer.weight.requires_grad
        optimizer.step()
        if step == 2:  # another mask
            with torch.no_grad():
                model[0].weight_mask.copy_(torch.rand(512, 256) < 0.1)
    assert len(made) >= 4 * 2 + 4  # gradients are written so, too
    model[0].weight_orig.grad = None
    model[0].weight.sum().backward()
    assert torch.equal(model[0].weight_orig.grad, model[0].weight_mask)


@pytest.mark.parametrize("grad", [False, True])
def test_writes_views_and_constants_of_a_returned_weight_are_those_of_eager_code(grad: bool) -> None:
    weight, mask, x = nn.Parameter(torch.randn(32, 32)), (torch.rand(32, 32) < 0.2).float(), torch.randn(16, 32)

    def function(x: Tensor) -> list[Tensor]:
        without_diagonal, viewed = weight * mask, weight * mask
        without_diagonal.diagonal().zero_()
        with torch.no_grad():
            scale = weight * 2
        return [x @ without_diagonal, without_diagonal, viewed, viewed.view(-1), weight * mask / scale, scale]

    made = compile_and_run(function, x, grad=grad)
    for output in (made.output, torch.set_grad_enabled(grad)(made.function)(x)):
        with torch.set_grad_enabled(grad):
            expected = function(x)
        for found, wanted in zip(output, expected, strict=True):
            assert_same(found.detach(), wanted.detach())
            assert found.requires_grad == wanted.requires_grad
        if grad:
            gradients = (torch.autograd.grad(each[4].sum(), weight)[0] for each in (output, expected))
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        output[3].detach().fill_(7)
        assert bool((output[2] == 7).all())


@pytest.mark.parametrize("mode", MODES)
def test_parameters_under_hooks_can_be_swapped(mode: str) -> None:
    model, x = network(prune_half, mode), torch.randn(8, 32)
    made = run(model, x, mode)
    del made.output
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(2 * parameter.detach()))
    with torch.set_grad_enabled(mode != "no_grad"):
        assert_same(made.function(x).detach(), model(x).detach())
