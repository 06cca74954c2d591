"""A model in eval mode asks for the edges to its parameters once: what autograd promises of parameters holds all the same."""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from gossamer.backend import sparse
from tests.backend.harness import assert_same, compile_and_run, prune_

OPTIONS = {"dense": "eager", "min_gain": 0, "strict": True}


class Net(nn.Module):
    """Two pruned layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 32)
        prune_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def compiled(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    return compile_and_run(model.eval(), x, grad=True).function


def edges(result: Tensor) -> Any:
    """The node that leads to the parameters."""
    return result.grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def assert_gradients(model: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    wanted = [each for each in (x, *model.parameters()) if each.requires_grad]
    ours, theirs = (torch.autograd.grad(each(x).square().sum(), wanted) for each in (function, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_calls_share_one_node_until_a_parameter_changes() -> None:
    model, x = Net(), torch.randn(16, 32)
    function = compiled(model, x)
    node = edges(function(x))
    assert edges(function(-x)) is node
    assert len(function(x).grad_fn.next_functions) == 2  # the other one is that of x
    assert len(node.next_functions) == 4
    with torch.no_grad():
        model.a.bias.add_(1)
    assert edges(function(x)) is not node
    assert edges(function(x)) is edges(function(x))
    assert_gradients(model, function, x)


@pytest.mark.parametrize("name", ["a.weight", "b.bias", "x"])
def test_one_gradient_can_be_asked_for(name: str) -> None:
    model, x = Net(), torch.randn(16, 32, requires_grad=True)
    function = compiled(model, x)
    wanted = x if name == "x" else model.get_parameter(name)
    for _ in range(5):  # by then the training graph is taken at once
        ours, theirs = (torch.autograd.grad(each(x).square().sum(), wanted) for each in (function, model))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        function(x).square().sum().backward(inputs=[wanted])
        assert [each for each in (x, *model.parameters()) if each.grad is not None] == [wanted]
        wanted.grad = None


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_passes_of_one_loss_add_up(again: bool) -> None:
    model, x = Net(), torch.randn(16, 32, requires_grad=True)
    function = compiled(model, x)
    wanted = [x, *model.parameters()]
    found = []
    for each in (function, model):
        loss = (each(x) * each(2 * x)).sum() + each(each(x)).square().sum()
        gradients = torch.autograd.grad(loss, wanted, create_graph=again)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), wanted) if again else gradients)  # type: ignore[arg-type]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_a_checkpoint_repeats_a_pass_as_it_was() -> None:
    model, x = Net(), torch.randn(16, 32, requires_grad=True)
    function = compiled(model, x)
    for _ in range(8):
        assert_gradients(model, lambda x: checkpoint(function, x, use_reentrant=False), x)


def test_hooks_of_parameters_run_once() -> None:
    model, x = Net(), torch.randn(16, 32)
    function = compiled(model, x)
    function(x).sum().backward()  # hooks that come later count, too
    model.zero_grad()
    seen: list[Tensor] = []
    model.a.weight.register_hook(lambda gradient: 2 * gradient)
    model.a.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    function(x).sum().backward()
    ours, model.a.weight.grad = model.a.weight.grad, None
    model(x).sum().backward()
    assert len(seen) == 2 and all(each is model.a.weight for each in seen)
    torch.testing.assert_close(ours, model.a.weight.grad, rtol=1e-4, atol=1e-4)


def replace(model: Net) -> None:
    model.a.weight = nn.Parameter(model.a.weight.detach() * -1)


def swap(model: Net) -> None:
    torch.utils.swap_tensors(model.a.weight, nn.Parameter(model.a.weight.detach() * -1))


def load(model: Net) -> None:
    model.load_state_dict({name: -value for name, value in model.state_dict().items()}, assign=True)


def freeze(model: Net) -> None:
    model.a.requires_grad_(False)


def write(model: Net) -> None:
    torch.optim.SGD(model.parameters(), 0.1).step()


CHANGES: list[Callable[[Net], None]] = [replace, swap, load, freeze, write]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_may_be_others_in_the_next_call(change: Callable[[Net], None]) -> None:
    model, x = Net(), torch.randn(16, 32, requires_grad=True)
    function = compiled(model, x)
    function(x).sum().backward()
    change(model)
    assert_same(function(x), model(x))
    assert_gradients(model, function, x)
    model.requires_grad_(True)
    assert_gradients(model, function, x)


def test_a_parameter_that_is_a_result_stays_a_leaf() -> None:
    class Both(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.a.bias

    model, x = Both(), torch.randn(16, 32)
    function = compiled(model, x)
    y, bias = function(x)
    assert model.a.bias.is_leaf
    ours = torch.autograd.grad(y.sum() + bias.square().sum(), [*model.parameters()])
    y, bias = model(x)
    theirs = torch.autograd.grad(y.sum() + bias.square().sum(), [*model.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_gradients_of_two_models_with_the_same_code_are_their_own() -> None:
    models, x = [Net(seed).eval() for seed in range(2)], torch.randn(16, 32)
    compiled(models[0], x)
    functions = [torch.compile(model, backend=sparse, options=OPTIONS) for model in models]
    for _ in range(2):
        for model, function in zip(models, functions, strict=True):
            assert_gradients(model, function, x)


def two_models(x: Tensor) -> tuple[list[Net], list[Callable[[Tensor], Tensor]]]:
    """Models that share a graph, and their functions."""
    models = [Net(seed).eval() for seed in range(2)]
    graphs = counters["gossamer"]["graphs"]
    functions = [torch.compile(model, backend=sparse, options=OPTIONS) for model in models]
    for function in functions:
        function(x)
    assert counters["gossamer"]["graphs"] == graphs + 1
    return models, functions


def test_each_model_of_a_graph_has_a_node_of_its_own() -> None:
    x = torch.randn(16, 32)
    models, functions = two_models(x)
    first, second = (edges(function(x)) for function in functions)
    assert first is not second
    for _ in range(3):
        assert [edges(function(x)) for function in functions] == [first, second]
    replace(models[1])
    assert edges(functions[1](x)) is not second
    assert edges(functions[1](x)) is edges(functions[1](x))
    assert edges(functions[0](x)) is first
    for model, function in zip(models, functions, strict=True):
        assert_gradients(model, function, x)


@pytest.mark.parametrize("which", [0, 1])
def test_a_model_goes_while_another_one_has_its_graph(which: int) -> None:
    x = torch.randn(16, 32)
    models, functions = two_models(x)
    kept = edges(functions[1 - which](x))
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in models[which].parameters()]
    del models[which], functions[which]
    gc.collect()
    assert not any(storage() for storage in storages)
    assert edges(functions[0](x)) is kept
    assert_gradients(models[0], functions[0], x)


def test_a_replaced_parameter_of_a_second_model_goes() -> None:
    x = torch.randn(16, 32)
    models, functions = two_models(x)
    storage = weakref.ref(models[1].a.weight.untyped_storage())
    replace(models[1])
    functions[1](x)
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("kind", ["closure", "global", "after a graph break", "submodule"])
def test_models_are_found_wherever_a_function_has_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: the second call is that of another model which runs the graph of the first."""

    class Breaks(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.a(x))
            torch._dynamo.graph_break()
            return self.b(y)

    def closure(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: model(x)

    x = torch.randn(16, 32)
    torch.compiler.reset()
    for seed in range(2):
        model = (Breaks if kind == "after a graph break" else Net)(seed).eval()
        monkeypatch.setattr(sys.modules[__name__], "_model", model, raising=False)
        functions = {"closure": closure(model), "global": of_global, "submodule": nn.Sequential(model).eval()}
        function: Any = functions.get(kind, model)
        ours = torch.compile(function, backend=sparse, options=OPTIONS)
        ours(x)
        assert edges(ours(x)) is edges(ours(x))
        assert_gradients(model, ours, x)


def of_global(x: Tensor) -> Tensor:
    found: Tensor = _model(x)  # type: ignore[name-defined]  # noqa: F821
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_looks_at_all_gradients() -> None:
    model, x = Net(), torch.randn(16, 32)
    function = compiled(model, x)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_gradients(model, function, x)


def test_parameters_go_with_their_model() -> None:
    model, x = Net(), torch.randn(16, 32)
    function: Any = compiled(model, x)
    function(x)
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    assert edges(function(x)) is edges(function(x))
    del model, function
    gc.collect()
    assert not any(storage() for storage in storages)
