"""A model in eval mode whose gradients are enabled: its forward pass is that of inference, and its gradients are PyTorch's."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.backend.compile_eval import _Compiled
from gossamer.backend.report.report import collect
from tests.backend.harness import Run, assert_same, compile_and_run, prune_


class Net(nn.Module):
    """Two pruned layers, and what a test does with them."""

    def __init__(self, body: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 32)
        self.register_buffer("count", torch.zeros(3))
        prune_(self)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def two_layers(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x).relu())


def network(body: Callable[[Net, Tensor], Any] = two_layers) -> Net:
    torch.manual_seed(0)
    return Net(body).eval()


def run(model: nn.Module, x: Tensor, **options: Any) -> Run:
    return compile_and_run(model, x, grad=True, **options)


def as_in_inference(result: Any) -> bool:
    return "_Recomputation" in type(result.grad_fn).__name__


def gradients(model: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(y.float().square().sum() for y in results if isinstance(y, Tensor) and y.requires_grad)
    wanted = [*model.parameters(), *([x] if x.requires_grad else [])]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def assert_gradients(model: nn.Module, compiled: Callable[[Tensor], Any], x: Tensor) -> None:
    for ours, theirs in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_the_forward_pass_is_a_chain_as_in_inference(dense: str, needs_gradient: bool) -> None:
    model, x = network(), torch.randn(16, 32, requires_grad=needs_gradient)
    found = run(model, x, dense=dense, regions=2)
    assert as_in_inference(found.output)
    assert all("in a chain of 2" in decision.reason for decision in found.regions)
    assert_same(found.output, model(x))
    with collect() as collected:
        assert_gradients(model, found.function, x)
    assert any("backward" in decision.op and decision.sparse for decision in collected.decisions)


@pytest.mark.parametrize("dynamic", [False, True])
def test_other_sizes_have_gradients_too(dynamic: bool) -> None:
    model = network(lambda net, x: two_layers(net, x) * x.shape[0])
    found = run(model, torch.randn(16, 32), dynamic=dynamic)
    for rows in (16, 5, 1, 33):
        assert_gradients(model, found.function, torch.randn(rows, 32, requires_grad=True))


def test_a_size_that_the_training_graph_does_not_take_is_computed_without_it() -> None:
    model = network()
    found = run(model, torch.randn(16, 32), dynamic=True)
    assert_gradients(model, found.function, torch.randn(16, 32))
    recomputed = _recomputed(found.output)
    taken = []
    recomputed.training._compiled[()] = _Compiled(lambda *_: pytest.fail("is not for this size"), lambda x: taken.append(x))
    assert_gradients(model, found.function, torch.randn(8, 32))
    assert taken


def _recomputed(result: Tensor) -> Any:
    node: Any = result.grad_fn
    return node.call.function


BODIES: dict[str, Callable[[Net, Tensor], Any]] = {
    "several results": lambda net, x: (two_layers(net, x), net.a(x), x.shape[0], x > 0),
    "writes to an intermediate result": lambda net, x: net.b(net.a(x).relu_()).add_(1),
    "views of one result": lambda net, x: (lambda y: (y, y[:, 0], y.t()))(net.a(x)),
    "a view of a buffer": lambda net, x: (net.count[:2], net.a(x)),
    "a detached result": lambda net, x: (net.b(net.a(x).detach()), net.a(x).detach()),
    "the input": lambda net, x: (x, net.a(x)),
    "rows that the values choose": lambda net, x: two_layers(net, x)[x[:, 0] > 0],
    "a layer used twice": lambda net, x: net.b(net.a(net.b(net.a(x)))),
}


@pytest.mark.parametrize("body", BODIES)
def test_results_and_gradients_are_those_of_eager_code(body: str) -> None:
    model, x = network(BODIES[body]), torch.randn(16, 32, requires_grad=True)
    found = run(model, x)
    ours, theirs = found.output, model(x)
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    for y, z in pairs:
        torch.testing.assert_close(y, z)
        if isinstance(y, Tensor):
            assert (y.requires_grad, y.stride()) == (z.requires_grad, z.stride())
    assert_gradients(model, found.function, x)


def test_a_block_without_gradients_is_sparse_and_has_none() -> None:
    def body(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            hidden = net.a(x)
        return net.b(hidden), hidden

    model, x = network(body), torch.randn(16, 32, requires_grad=True)
    found = run(model, x, regions=2)
    assert as_in_inference(found.output[0]) and not found.output[1].requires_grad
    assert_gradients(model, found.function, x)


DERIVATIVES: dict[str, Callable[[Net, Tensor], Any]] = {
    "vjp": lambda net, x: torch.func.vjp(net.b, net.a(x))[1](x)[0],
    "grad under vmap": lambda net, x: torch.vmap(torch.func.grad(lambda one: two_layers(net, one).square().sum()))(x),
    "jacobian": lambda net, x: torch.vmap(torch.func.jacrev(net.a))(x),
}


@pytest.mark.parametrize("body", DERIVATIVES)
def test_derivatives_that_are_results_are_computed(body: str) -> None:
    model, x = network(DERIVATIVES[body]), torch.randn(4, 32, requires_grad=True)
    found = run(model, x)
    assert_same(found.output, model(x))
    assert_gradients(model, found.function, x)


@torch.library.custom_op("gossamer_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Counts its calls."""
    CALLS.append(x.shape)
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, gradient: 2 * gradient)
CALLS: list[torch.Size] = []


IMPURE: dict[str, Callable[[Net, Tensor], Any]] = {
    "draws random numbers": lambda net, x: net.b(F.dropout(net.a(x), training=True)),
    "draws random numbers in a branch": lambda net, x: net.b(
        torch.cond(x.sum() < 1e9, lambda h: F.dropout(h, training=True), lambda h: 2 * h, (net.a(x),))
    ),
    "calls an operator of the user": lambda net, x: net.b(doubled(net.a(x))),
    "writes to a buffer": lambda net, x: (net.count.add_(1), net.a(x))[1],
    "returns a view of an input": lambda net, x: (net.a(x), x.view(-1)),
    "returns a view of a parameter": lambda net, x: (net.a(x), net.a.weight.t()),
}


@pytest.mark.parametrize("body", IMPURE)
@pytest.mark.parametrize("cached", [False, True])
def test_what_cannot_be_computed_twice_is_compiled_for_gradients(body: str, cached: bool) -> None:
    model, x = network(IMPURE[body]), torch.randn(16, 32, requires_grad=True)
    if cached:
        with torch._functorch.config.patch(enable_autograd_cache=True):
            compile_and_run(model, x, dense="inductor")  # without gradients
            torch._dynamo.reset()
            found = run(model, x, dense="inductor")
    else:
        found = run(model, x)
    result = found.output[0] if isinstance(found.output, tuple) else found.output
    assert "CompiledFunction" in type(result.grad_fn).__name__
    expected = copy.deepcopy(model)
    torch.manual_seed(1)
    ours = gradients(model, found.function, x)
    torch.manual_seed(1)
    if "random" not in body:
        for a, b in zip(ours, gradients(expected, expected, x)[: len(ours)], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_attention_without_dropout_draws_nothing() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v)

    model = prune_(Attention()).eval()
    found = run(model, torch.randn(2, 8, 32))
    assert as_in_inference(found.output)
    assert_gradients(model, found.function, torch.randn(2, 8, 32, requires_grad=True))


def test_gradients_of_gradients_are_those_of_eager_code() -> None:
    model, x = network(lambda net, x: net.b(torch.tanh(net.a(x)))), torch.randn(16, 32, requires_grad=True)
    found = run(model, x)
    assert as_in_inference(found.output)
    norms = []
    for function in (found.function, model):
        model.zero_grad()
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        norms.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*norms, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("often", [0, 3, 6])
def test_gradients_of_gradients_do_not_depend_on_earlier_passes(often: int) -> None:
    model, x = network(lambda net, x: net.b(torch.tanh(net.a(x)))), torch.randn(16, 32, requires_grad=True)
    function = run(model, x).function
    for _ in range(often):
        function(x).sum().backward()
    for _ in range(6):
        norms = []
        for each in (function, model):
            model.zero_grad()
            y = each(x)
            (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            first.square().sum().backward()
            norms.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for ours, theirs in zip(*norms, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_graph_that_is_retained_has_its_gradients_twice() -> None:
    model, x = network(), torch.randn(16, 32)
    function = run(model, x).function
    for _ in range(4):  # by then the training graph is taken at once
        model.zero_grad()
        loss = function(x).sum()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward()
        for parameter, gradient in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


RESULTS: dict[str, Callable[[Net, Tensor], Any]] = {
    "plain": lambda net, x: net.a(x),
    "sliced": lambda net, x: net.a(x)[:, 1:5],
    "turned": lambda net, x: net.a(x).t(),
    "two views": lambda net, x: (lambda y: (y, y[:, :3]))(net.a(x)),
    "a sum of sequences": lambda net, x: net.a(x.unflatten(0, (2, 8))) + 1,
}


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_results_can_be_written_to(results: str, dense: str, training: bool) -> None:
    model, x = network(RESULTS[results]).train(training), torch.randn(16, 32)
    function = run(model, x, dense=dense).function
    for _ in range(5):  # by then the training graph is taken at once
        found = []
        for each in (function, model):
            model.zero_grad()
            y = each(x)
            first, *others = y if isinstance(y, tuple) else (y,)
            first.mul_(2)
            first[:, 0] = 1
            sum(part.square().sum() for part in (first, *others)).backward()
            found.append([first.detach(), *[part.detach() for part in others], model.a.weight.grad])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["weight", "input"])
def test_what_is_written_to_before_backward_raises(what: str) -> None:
    model, x = network(), torch.randn(16, 32)
    y = run(model, x).function(x)
    with torch.no_grad():
        (model.a.weight if what == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_an_input_run_once() -> None:
    model, x = network(), torch.randn(16, 32, requires_grad=True)
    calls = []
    x.register_hook(lambda gradient: calls.append(gradient))
    run(model, x).output.sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(calls[0], x.grad)


def test_train_and_eval_compile_anew_though_no_layer_asks_for_the_mode() -> None:
    model, x = network(), torch.randn(16, 32)
    function = run(model, x).function
    assert as_in_inference(function(x))
    model.train()
    assert not as_in_inference(function(x))
    model.eval()
    assert as_in_inference(function(x))


def test_a_part_that_is_trained_makes_it_training() -> None:
    model, x = network(), torch.randn(16, 32)
    model.b.train()
    assert not as_in_inference(run(model, x).output)


def test_weights_without_a_module_are_trained() -> None:
    weight = torch.where(torch.rand(32, 32) < 0.2, torch.randn(32, 32), 0).requires_grad_()
    assert not as_in_inference(run(lambda x: x @ weight, torch.randn(16, 32)).output)  # type: ignore[arg-type]


def test_who_always_calls_backward_gets_the_training_graph_at_once() -> None:
    model, x = network(), torch.randn(16, 32)
    function = run(model, x).function
    kinds = []
    for _ in range(12):
        y = function(x)
        kinds.append(not y.grad_fn.passed)
        y.sum().backward()
    assert kinds[0] and not any(kinds[4:9])
    for _ in range(600):  # nobody calls backward any more
        y = function(x)
    assert not y.grad_fn.passed


def test_autocast_of_the_forward_pass_holds_for_its_gradients() -> None:
    model, x = network(), torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(model, x, schedule="reference")
        ours, theirs = found.function(x), model(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and as_in_inference(ours)
    pairs = [torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]) for y in (ours, theirs)]
    for mine, other in zip(*pairs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=5e-2, atol=5e-1)


def test_a_changed_weight_is_noticed() -> None:
    model, x = network(), torch.randn(16, 32)
    function = run(model, x).function
    with torch.no_grad():
        model.a.weight.mul_(-2)
    assert_same(function(x), model(x))
    assert_gradients(model, function, x)


def test_several_threads_ask_for_the_first_gradients_at_once() -> None:
    model, x = network(), torch.randn(16, 32)
    function = run(model, x).function
    losses = [function(x).square().sum() for _ in range(4)]  # before: while one thread traces, torch lets no other call
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda loss: torch.autograd.grad(loss, [*model.parameters()]), losses))
    for ours in found:
        for a, b in zip(ours, gradients(model, model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    model, x = network(), torch.randn(rows, 32, requires_grad=True)
    found = run(model, x)
    assert found.output.shape == (rows, 32)
    assert_gradients(model, found.function, x)


def test_a_convolution_is_computed_as_in_inference() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    for layer in (model[0], model[3]):
        with torch.no_grad():
            layer.weight.mul_(torch.rand_like(layer.weight) < 0.2)
    x = torch.randn(2, 4, 9, 9, requires_grad=True)
    found = run(model, x)
    assert as_in_inference(found.output)
    assert_same(found.output, model(x))
    assert_gradients(model, found.function, x)
