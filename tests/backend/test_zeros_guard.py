"""Models of one class: with similar zeros they share a graph, with others each has its own; and weights may change."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from gossamer.backend import sparse
from gossamer.backend.owners import zeros_guard
from gossamer.backend.owners.zeros import Zeros
from gossamer.backend.report.report import collect
from tests.backend.harness import assert_same, prune_, pruned

OPTIONS: dict[str, Any] = {"dense": "eager", "min_gain": 0, "strict": True}
X = torch.randn(8, 64)
LEVELS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)


class Layers(nn.Module):
    """Two linear layers, since Dynamo shares the code of the modules of one class."""

    def __init__(self, density: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 48)
        prune_(self, density)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.compiler.reset()


def compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(model, backend=sparse, fullgraph=True, options=OPTIONS)


def call(function: Callable[..., Any], model: Callable[..., Any], x: torch.Tensor = X) -> tuple[int, int]:
    """How many graphs a call compiles, and how many pruned layers are regions in them. The numbers are those of plain torch."""
    before = counters["gossamer"]["graphs"]
    with collect() as found, torch.no_grad():
        assert_same(function(x), model(x))
    return counters["gossamer"]["graphs"] - before, sum(d.sparse and d.density < 0.9 for d in found.decisions)


def test_a_pruned_copy_of_a_compiled_model_has_a_graph_of_its_own() -> None:
    dense, pruned = Layers(), Layers(0.1)
    of_dense, of_pruned = compiled(dense), compiled(pruned)
    assert call(of_dense, dense) == (1, 0)
    assert call(of_pruned, pruned) == (1, 2)
    assert call(of_dense, dense) == call(of_pruned, pruned) == (0, 0)


def test_a_dense_model_does_not_run_the_code_of_a_pruned_one() -> None:
    pruned, dense = Layers(0.1), Layers()
    assert call(compiled(pruned), pruned) == (1, 2)
    assert call(compiled(dense), dense) == (1, 0)


def test_models_with_similar_zeros_share_a_graph() -> None:
    first, second = Layers(0.1), Layers(0.1)
    assert call(compiled(first), first) == (1, 2)
    assert call(compiled(second), second) == (0, 0)
    assert call(compiled(copy.deepcopy(first)), first) == (0, 0)


def test_loaded_weights_get_a_graph_that_suits_them() -> None:
    model, pruned = Layers(), Layers(0.1)
    function = compiled(model)
    assert call(function, model) == (1, 0)
    model.load_state_dict(pruned.state_dict())
    assert call(function, model) == (1, 2)
    assert call(function, model) == (0, 0)


def test_a_model_whose_largest_matrix_stays_dense_is_noticed() -> None:
    """As an embedding does, or the head of a language model."""
    model = Layers()
    model.a, model.b = nn.Linear(64, 512), nn.Linear(512, 8)
    function = compiled(model)
    assert call(function, model) == (1, 0)
    model.b.weight.data *= torch.rand_like(model.b.weight) < 0.1
    assert call(function, model) == (1, 1)


def test_writes_that_torch_does_not_count_are_noticed() -> None:
    model = Layers()
    function = compiled(model)
    assert call(function, model) == (1, 0)
    for layer in (model.a, model.b):
        layer.weight.data *= torch.rand_like(layer.weight) < 0.1
    assert call(function, model) == (1, 2)


def test_weights_that_move_within_their_storage_are_noticed() -> None:
    """As the weights of several models do that share one vector."""
    model, weights = Layers(), torch.stack([torch.randn(96 * 64), pruned(96, 64).flatten()])
    model.a.weight.data = weights[0].view(96, 64)
    function = compiled(model)
    assert call(function, model) == (1, 0)
    model.a.weight.data = weights[1].view(96, 64)
    assert call(function, model) == (1, 1)


def test_a_replaced_layer_is_noticed() -> None:
    model, other = Layers(), Layers(0.1)
    function = compiled(model)
    assert call(function, model) == (1, 0)
    model.b, _before = other.b, model.b  # which lives on
    assert call(function, model) == (1, 1)


@pytest.mark.parametrize("at", range(0, 8, 3))
def test_a_few_calls_notice_one_of_many_matrices(at: int) -> None:
    """A call looks at two of eight matrices."""
    model = nn.Sequential(*(nn.Linear(64 + 8 * n, 72 + 8 * n) for n in range(8)))
    function = compiled(model)
    assert call(function, model) == (1, 0)
    prune_(model[at], 0.1)
    assert [sum(found) for found in zip(*(call(function, model) for _ in range(5)), strict=True)] == [1, 1]


def test_weights_that_come_and_go_do_not_keep_dynamo_busy() -> None:
    model, others = Layers(), [Layers(0.1), Layers()]
    function, compiled_graphs = compiled(model), 0
    for turn in range(12):
        model.load_state_dict(others[turn % 2].state_dict())
        compiled_graphs += call(function, model)[0]
    assert compiled_graphs <= 1 + zeros_guard._MOST_RENEWALS


@pytest.mark.parametrize("alive", [True, False])
def test_a_sweep_over_many_sparsities_compiles_each(alive: bool, recwarn: pytest.WarningsRecorder) -> None:
    kept = []
    for density in LEVELS:
        model = Layers(density)
        function = compiled(model)
        kept += [model] if alive else []
        regions = sum(call(function, model, torch.randn(rows, 64))[1] for rows in (8, 12, 16))  # new sizes are left open
        assert (regions > 0) == (density < 0.9)
        del model, function
        gc.collect()
    assert not [warning for warning in recwarn if "recompile_limit" in str(warning.message)]


@pytest.mark.parametrize("function", [lambda x: MODEL(x), None], ids=["global", "local"])
def test_loaded_weights_get_graphs_for_as_many_sizes_as_before(function: Callable[..., Any] | None) -> None:
    """Dynamo allows eight graphs, and with fullgraph=True raises an error beyond."""
    global MODEL
    MODEL = Layers(0.1)
    called = torch.compile(function or MODEL, backend=sparse, fullgraph=True, dynamic=False, options=OPTIONS)
    for density in (0.1, 0.5, 0.2):
        MODEL.load_state_dict(Layers(density).state_dict())
        for rows in 4 * [*range(2, 8)]:
            call(called, MODEL, torch.randn(rows, 64))


FORBIDDING: dict[str, Callable[[], Any]] = {
    "stance": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "setting": lambda: torch._dynamo.config.patch(error_on_recompile=True),
}


@pytest.mark.parametrize("forbidding", FORBIDDING)
@pytest.mark.parametrize("density", [0.5, 1.0])
def test_loaded_weights_keep_their_graph_if_the_user_forbids_another(forbidding: str, density: float) -> None:
    model = Layers(0.1)
    function = compiled(model)
    assert call(function, model) == (1, 2)
    model.load_state_dict(Layers(density).state_dict())
    with FORBIDDING[forbidding]():
        assert [call(function, model)[0] for _ in range(20)] == 20 * [0]
    assert call(function, model)[0] == 1


def test_each_model_keeps_its_own_graph_if_the_user_forbids_others() -> None:
    models = [Layers(), Layers(0.1), Layers(0.4)]
    functions, run = [compiled(model) for model in models], list[Any]()
    assert [call(functions[n], models[n])[0] for n in (0, 1)] == [1, 1]
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (0, 1, 2, 0, 1, 2):
            assert call(functions[n], models[n])[0] == 0
            latest, _ = _debug_get_cache_entry_list(Layers.forward.__code__)
            run.append(latest.code)
    assert run[0] == run[3] != run[1] == run[4], "the third model shares the graph of another one"


def test_a_function_of_a_global_model_compiles_for_a_few() -> None:
    """Dynamo counts the graphs of all these models together, so that later ones share the last."""
    global MODEL
    function = compiled(with_global_model)
    found = []
    for density in LEVELS:
        MODEL = Layers(density)
        found.append(call(function, MODEL)[0])
    assert 1 < sum(found) <= zeros_guard._MOST_TOGETHER + 1


def test_a_global_model_with_loaded_weights_gets_another_graph() -> None:
    global MODEL
    MODEL = Layers()
    function = compiled(with_global_model)
    assert call(function, MODEL) == (1, 0)
    MODEL.load_state_dict(Layers(0.1).state_dict())
    assert call(function, MODEL) == (1, 2)


MODEL: Layers


def with_global_model(x: torch.Tensor) -> Any:
    return MODEL(x)


def test_training_looks_at_zeros_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers().train()
    function, looks, samples = compiled(model), [], []
    counted, made = Zeros.of, zeros_guard.Made
    monkeypatch.setattr(Zeros, "of", lambda tensor: looks.append(tensor) or counted(tensor))
    monkeypatch.setattr(zeros_guard, "Made", lambda *given: samples.append(given) or made(*given))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(32):
        function(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 2 < len(looks) <= 2 * 7
    assert len(samples) <= 2 * 7  # to sample a weight takes 0.1 ms: too long for every step


def test_a_model_that_is_pruned_during_training_becomes_sparse() -> None:
    model = Layers().train()
    function = compiled(model)
    function(X).sum().backward()
    prune_(model, 0.1)
    with collect() as found:
        function(X).sum().backward()
    assert {decision.name for decision in found.decisions if decision.sparse} >= {"a.weight", "b.weight"}


class Cached(Layers):
    """A layer before a cache of keys, which begins as zeros."""

    def __init__(self, density: float) -> None:
        super().__init__(density)
        self.register_buffer("keys", torch.zeros(32, 96))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys[at] = self.a(x)
        return self.b(self.keys)


def test_a_cache_that_fills_needs_no_other_graph() -> None:
    model, before = Cached(0.1), counters["gossamer"]["graphs"]
    function, plain = compiled(model), copy.deepcopy(model)
    with collect() as found, torch.no_grad():
        for first in (0, 8, 16, 24, 0):
            assert_same(function(X, torch.arange(first, first + 8)), plain(X, torch.arange(first, first + 8)))
    assert counters["gossamer"]["graphs"] - before == 1
    assert {decision.name for decision in found.decisions if decision.sparse} == {"a.weight", "b.weight"}


def test_a_guard_keeps_no_model_alive() -> None:
    model = Layers()
    call(compiled(model), model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_two_matrices_resemble_each_other_if_their_zeros_do() -> None:
    def zeros(density: float, block: int = 1) -> Zeros:
        layer = prune_(nn.Linear(512, 512), density, (block, block))
        return Zeros.of(layer.weight)

    assert zeros(0.1).resemble(zeros(0.1))
    assert zeros(0.1).resemble(zeros(0.11))
    assert not zeros(0.1).resemble(zeros(0.2))
    assert not zeros(0.25).resemble(zeros(0.25, 8)), "blocks are another pattern"
    assert zeros(1.0).resemble(zeros(0.95)), "both are dense"
    pairs = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(16, 64)
    assert Zeros.of(pairs).pairs and not Zeros.of(pairs.roll(2, 0) + torch.eye(16, 256)).pairs


@pytest.mark.parametrize("shape", [(1, 256), (256, 1), (3, 5, 7, 9), (17, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_zeros_of_odd_shapes_and_all_types(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.rand(shape) < 0.3).to(dtype)
    found = Zeros.of(tensor)
    assert (found.elements, found.nonzeros) == (tensor.numel(), int(tensor.bool().sum()))
    assert found == Zeros.of(tensor.transpose(0, -1).contiguous().transpose(0, -1))
