"""What Dynamo does not let through: recurrent layers, experts and `generate` become sparse with one line, which is named."""

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config

import gossamer
from gossamer.backend import sparse
from gossamer.backend.report import generate, graph_breaks
from gossamer.backend.report.report import collect
from tests.backend.harness import assert_same, compile_and_run, prune_

EAGER = {"dense": "eager", "min_gain": 0}


class Recurrent(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(64, 96, batch_first=True)
        self.out = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last step."""
        return self.out(self.layer(x)[0][:, -1])


class Cells(nn.Module):
    """A loop over a cell."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last state."""
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Experts(nn.Module):
    """Each expert takes the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum over experts."""
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return result


@pytest.mark.parametrize("kind", ["GRU", "RNN", "LSTM"])
@pytest.mark.parametrize("grad", [False, True])
def test_recurrent_layers_are_sparse_where_dynamo_lets_them_through(kind: str, grad: bool) -> None:
    model, x = prune_(Recurrent(kind)), torch.randn(4, 3, 64)
    with config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=False):  # which has a fused LSTM
        run = compile_and_run(model, x, grad=grad)
        assert_same(run.output, model(x))
    assert {"layer.weight_ih_l0", "layer.weight_hh_l0", "out.weight"} <= {d.name for d in run.regions}


def test_a_fused_lstm_stays_dense_and_the_report_says_how_it_would_not() -> None:
    model, x = prune_(Recurrent("LSTM")), torch.randn(4, 3, 64)
    with config.patch(allow_rnn=True), torch.no_grad():
        report = gossamer.explain(model, x, options=EAGER)
    (reason,) = {d.reason for d in report.decisions if not d.sparse}
    assert "torch.backends.mkldnn.flags(enabled=False)" in reason


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_loops_over_cells_are_sparse(kind: str) -> None:
    model, x = prune_(Cells(kind)), torch.randn(4, 3, 64)
    run = compile_and_run(model, x)
    assert_same(run.output, model(x))
    assert {d.name for d in run.regions} == {"cell.weight_ih", "cell.weight_hh"}


@pytest.mark.parametrize("rows", [3, 16])
def test_experts_are_sparse_in_one_graph(rows: int) -> None:
    model, x = prune_(Experts()), torch.randn(rows, 64)
    with config.patch(capture_dynamic_output_shape_ops=True):
        run = compile_and_run(model, x)
        assert_same(run.output, model(x))
    assert {d.name for d in run.regions} == {"gate.weight", *(f"experts.{number}.weight" for number in range(4))}


@pytest.mark.parametrize(
    ("model", "x", "line"),
    [
        (lambda: Recurrent("GRU"), torch.randn(4, 3, 64), "torch._dynamo.config.allow_rnn = True"),
        (Experts, torch.randn(4, 64), "torch._dynamo.config.capture_dynamic_output_shape_ops = True"),
    ],
)
def test_the_report_names_the_line_that_keeps_a_graph_whole(model: Callable[[], nn.Module], x: torch.Tensor, line: str) -> None:
    with torch.no_grad():
        report = gossamer.explain(model(), x, options=EAGER)
    assert line in report.graph_breaks[0]


class Selecting(nn.Module):
    """Goes on with the rows that pass a test, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y[torch.where(y[:, 0] > 0)])


class Routing(nn.Module):
    """Asks which experts there are to be, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number in (x[:, 0] > 0).long().unique().tolist():
            rows = ((x[:, 0] > 0) == number).nonzero()[:, 0]
            y[rows] = self.experts[number](x[rows])
        return y


class Branching(nn.Module):
    """Stops when it has had enough, inside of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if x.sum() > 1e9:
                break
            x = layer(x)
        return x


class Asking(nn.Module):
    """Wants a break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


@pytest.fixture
def breaks_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_breaks, "_told", set())


def breaks_of(model: nn.Module, backend: Any = "sparse", **how: Any) -> list[str]:
    """The warnings of one call."""
    torch._dynamo.reset()
    graph_breaks.watch_graph_breaks(sparse)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        options = {"options": EAGER} if backend == "sparse" else {}
        with contextlib.suppress(torch._dynamo.exc.TorchDynamoException):
            torch.compile(prune_(model), backend=backend, **options, **how)(torch.randn(16, 64))
    return [str(w.message) for w in caught if "torch.compile " in str(w.message)]


@pytest.mark.usefixtures("breaks_unseen")
def test_a_break_between_sparse_layers_is_warned_of_once() -> None:
    (warning,) = breaks_of(Selecting())
    assert "test_graph_breaks.py:" in warning and "aten.nonzero" in warning and "compiled separately" in warning
    assert "Write torch._dynamo.config.capture_dynamic_output_shape_ops = True before" in warning
    assert "or compile with fullgraph=True, which includes it." in warning
    assert not breaks_of(Selecting())


@pytest.mark.usefixtures("breaks_unseen")
def test_dynamo_can_be_reset_after_a_warning_that_is_an_error() -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("error")
        torch.compile(lambda x: x.nonzero() * 2, backend=sparse, options=EAGER)(torch.ones(3))
        pytest.fail("the break is warned of")
    torch._dynamo.reset()


@pytest.mark.usefixtures("breaks_unseen")
def test_a_function_that_runs_uncompiled_is_warned_of() -> None:
    warning = breaks_of(Routing())[-1]
    assert "gave up the rest of forward" in warning and "layers of torch.nn that it calls are dense" in warning
    (warning,) = breaks_of(Branching())
    if torch.__version__ >= "2.13":
        assert "gave up forward" in warning and "Data-dependent branching" in warning
    else:  # it compiles what precedes the loop
        assert "broke the graph at" in warning and "generic_jump" in warning


_LIKE_PEFT = """
from torch import nn

class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        handle = self.model.register_forward_pre_hook(lambda module, args: args)
        y = self.model(x)
        handle.remove()
        return y
"""


@pytest.mark.usefixtures("breaks_unseen")
def test_a_break_for_mixed_batches_of_peft_names_the_model_to_compile(tmp_path: Path) -> None:
    place = tmp_path / "peft" / "peft_model.py"
    place.parent.mkdir()
    place.write_text(_LIKE_PEFT)
    spec = importlib.util.spec_from_file_location("like_peft", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warning = breaks_of(module.Wrapped(nn.Linear(64, 64)))[0]
    assert "Write model.base_model.model.compile(backend=...) instead" in warning


@pytest.mark.usefixtures("breaks_unseen")
def test_no_warning_of_breaks_that_others_see_or_want() -> None:
    assert not breaks_of(Selecting(), backend="eager")
    assert not breaks_of(Branching(), fullgraph=True)
    assert not breaks_of(Asking())


class Writer(nn.Module):
    """What a model of transformers does: `generate` calls the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next one."""
        return torch.relu(self.layer(x))

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """Two more."""
        return self(self(x))


def in_place(model: Any) -> Any:
    model.compile(backend="sparse", options=EAGER)
    return model


def its_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="sparse", options=EAGER)
    return model


@pytest.mark.parametrize("way", [in_place, its_forward])
def test_generate_runs_compiled(way: Callable[[Any], Any], recwarn: pytest.WarningsRecorder) -> None:
    model, x = prune_(Writer()), torch.randn(4, 64)
    expected = model.generate(x)
    with collect() as collected:
        assert_same(way(model).generate(x), expected)
    assert [d.sparse for d in collected.decisions] == [True]
    assert not [w for w in recwarn if "generate" in str(w.message)]


def test_generate_that_runs_uncompiled_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_warned", False)
    model, x = Writer(), torch.randn(4, 64)
    compiled = torch.compile(model, backend="sparse")
    with pytest.warns(UserWarning, match=r'model\.compile\(backend="sparse"\)'):
        result = compiled.generate(x)
    torch.testing.assert_close(result, model.generate(x))


def test_other_backends_and_models_are_not_warned_of(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(generate, "_warned", False)
    assert torch.compile(Writer(), backend="eager").generate(torch.randn(4, 64)).shape == (4, 64)
    assert not hasattr(torch.compile(nn.Linear(2, 2), backend="sparse"), "generate")
    assert not [w for w in recwarn if "generate" in str(w.message)]
