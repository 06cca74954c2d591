"""Checked graphs and `gossamer.bisect`: faults that are put into kernels on purpose are found, and right models have none."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.checking.differences import difference
from gossamer.backend.checking.part import Part
from gossamer.backend.graph_passes import GRAPH_PASSES
from gossamer.backend.run.compiled_region import CompiledRegion
from tests.backend.harness import compile_and_run, prune_

ALL = {"min_gain": 0}


class Layers(nn.Module):
    """Three pruned layers, of which the last is the only one with a weight of 24 x 48."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 40), nn.Linear(40, 48)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(48, 24))
        prune_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 32)


def faulty(monkeypatch: pytest.MonkeyPatch, has_fault: Callable[[list[Tensor]], bool]) -> None:
    """Makes the results of some regions too large."""
    right = CompiledRegion.__call__

    def wrong(self: CompiledRegion, operands: list[Tensor], out: Any = None) -> Any:
        found = right(self, operands, out)
        results = found if isinstance(found, list) else [found]
        for each in results if has_fault(operands) else ():
            each *= 1.5
        return found

    monkeypatch.setattr(CompiledRegion, "__call__", wrong)


def has_head(operands: list[Tensor]) -> bool:
    return any(each.shape == (24, 48) for each in operands)


@pytest.mark.parametrize("training", [False, True])
def test_a_right_model_has_no_differences(x: Tensor, training: bool) -> None:
    found = gossamer.bisect(Layers().train(training), x, options=ALL)
    assert not found, str(found)
    assert sum(each.sparse for each in found.decisions) >= 3
    assert "Results and gradients are torch's." in str(found)


def test_the_layer_and_the_pass_at_fault_are_found(x: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faulty(monkeypatch, has_head)
    with torch.no_grad():
        found = gossamer.bisect(Layers().eval(), x, options={**ALL, "dump_ir": str(tmp_path)})
    (only,) = found.differences
    assert not only.gradients and only.values[0][0] == "result 0"
    assert only.place is not None
    assert (only.place.culprit, only.place.module) == ("sparse-weights", "head.1")
    assert Path(__file__).name in only.place.line
    assert only.file is not None and Path(only.file).parent == tmp_path
    first, *others = str(found).splitlines()
    assert first.startswith("A compiled graph differs from torch in result 0 by ") and first.endswith("% of the largest value.")
    labels, texts = zip(*((line[2:19].strip(), line[21:]) for line in others), strict=True)
    assert labels == ("first wrong value", "your line", "graph pass", "program") and texts[0].endswith(", in module head.1")
    assert texts[2] == "sparse-weights; options={'disable': ['sparse-weights']} leaves it out"


def test_the_program_shows_the_difference_alone(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    faulty(monkeypatch, has_head)
    with torch.no_grad():
        (only,) = gossamer.bisect(Layers().eval(), x, options={**ALL, "dump_ir": str(tmp_path)}).differences
    text = Path(str(only.file)).read_text(encoding="utf-8")
    assert "relu" not in text.partition("def graph")[2].partition(")")[2]  # no layer but the wrong one
    exec(compile(text, str(only.file), "exec"), {})
    assert "differs from torch in result 0" in capsys.readouterr().out


def test_a_fault_that_does_not_come_again_is_told(x: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A layer may be sparse in one compilation and dense in the next, if its gain is close."""
    faulty(monkeypatch, has_head)
    answers = iter([False])
    monkeypatch.setattr(Part, "is_right", lambda *_: next(answers, True))
    with torch.no_grad():
        (only,) = gossamer.bisect(Layers().eval(), x, options={**ALL, "dump_ir": str(tmp_path)}).differences
    assert only.values[0][0] == "result 0" and only.place is not None and only.place.culprit is None


def test_a_model_that_is_one_graph_under_fullgraph_alone_is_compared(x: Tensor) -> None:
    layers = Layers().eval()

    def selecting(x: Tensor) -> Tensor:
        return layers(x[x[:, 0] > -100])

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as of graph breaks
        found = gossamer.bisect(selecting, x, options=ALL, fullgraph=True)
        profile = gossamer.profile(selecting, x, options=ALL, fullgraph=True, calls=1)
    assert not found and sum(each.sparse for each in found.decisions) == 3
    assert any("first" in part.label for part in profile.parts)


def test_wrong_gradients_are_found(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, lambda operands: operands[0].shape == (6, 24))  # of the head's result alone
    (only,) = gossamer.bisect(Layers().train(), x, options=ALL).differences
    assert only.gradients
    assert {name for name, _ in only.values} >= {"the gradient of first.weight", "the gradient of second.weight"}
    assert only.place is not None and only.place.module == "head.1"
    model = Layers().train()
    (only,) = gossamer.bisect(lambda x: Output(model(x)), x, options=ALL).differences  # a dataclass, of a captured model
    assert only.gradients
    assert gossamer.profile(lambda x: Output(model(x)), x, options=ALL, backward=True, calls=1).parts


@dataclass
class Output:
    logits: Tensor


def test_a_report_without_gradients_says_so(x: Tensor) -> None:
    with torch.no_grad():
        found = gossamer.bisect(Layers().eval(), x, options=ALL)
    assert not found and str(found).startswith("Results are torch's. 3 of 3 ")


def test_complex_numbers_are_rounded_as_well(x: Tensor) -> None:
    model = Layers().eval()
    assert not gossamer.bisect(lambda x: torch.fft.rfft(model(x)), x, options=ALL)


def test_a_graph_that_writes_to_its_input_is_compared(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers().eval()

    def writing(x: Tensor) -> Tensor:
        h = model.first(x)
        print(end="")
        return model.head(torch.relu(model.second(h.relu_())))

    found = gossamer.bisect(writing, x, options=ALL)
    assert not found and sum(each.sparse for each in found.decisions) >= 3
    faulty(monkeypatch, lambda operands: operands[0].shape == (6, 24))  # of the head's result alone
    (only,) = gossamer.bisect(writing, x, options=ALL).differences
    assert only.gradients and only.place is not None


def test_results_are_those_of_the_compiled_graph_and_one_warning_says_what_differs(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, has_head)
    model = Layers().eval()
    compiled = torch.compile(model, backend="sparse", options={**ALL, "check": True})
    with torch.no_grad():
        with pytest.warns(UserWarning, match="differs from torch in result 0") as told:
            found = compiled(x)
        assert Path(__file__).name in {Path(each.filename).name for each in told}  # which has the line of the model
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(x)
        torch.testing.assert_close(found, 1.5 * model(x))


def test_a_difference_is_an_error_under_strict(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, has_head)
    with pytest.raises(gossamer.GossamerError, match="differs from torch"):
        compile_and_run(Layers().eval(), x, check=True)


def test_random_numbers_and_state_are_no_differences(x: Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 32))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layers(x)

    model = Model()
    prune_(model)
    torch.manual_seed(3)
    expected = model(x)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict({**state, "calls": torch.zeros(())})
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = compile_and_run(model, x, check=True, grad=True)
        run.output.sum().backward()
    torch.testing.assert_close(run.output, expected)
    assert model.calls == 1


def test_a_model_stays_as_it_was(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    prune_(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert not gossamer.bisect(model, x, options=ALL)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_sizes_may_be_open(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers().eval()
    assert not gossamer.bisect(model, x, options=ALL, dynamic=True)
    faulty(monkeypatch, has_head)
    with torch.no_grad():
        (only,) = gossamer.bisect(model, x, options=ALL, dynamic=True).differences
    assert only.place is not None and only.place.module == "head.1"


def test_a_wrong_graph_pass_is_named(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def run(self, graph: Any, context: Any) -> list[Any]:
            for node in [n for n in graph.nodes if n.target is torch.ops.aten.relu.default]:
                node.target = torch.ops.aten.sigmoid.default
            return []

    monkeypatch.setitem(GRAPH_PASSES, "fuse-rows", f"{__name__}:Wrong")
    monkeypatch.setattr("gossamer.backend.compile_graph.graph_pass", _passes_with(Wrong))
    with torch.no_grad():
        (only,) = gossamer.bisect(Layers().eval(), x, options=ALL).differences
    assert only.place is not None
    assert (only.place.culprit, only.place.node.name) == ("fuse-rows", "relu")


def _passes_with(wrong: type) -> Callable[[str], Any]:
    from gossamer.backend.graph_passes import graph_pass

    return lambda name: wrong() if name == "fuse-rows" else graph_pass(name)


@pytest.mark.parametrize(
    ("found", "expected", "size"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), 0.5),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), 0.0),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")]), float("inf")),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -float("inf")]), float("inf")),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), float("inf")),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (3, 3, 0.0),
        (3, 3.0, float("inf")),
        (None, None, 0.0),
    ],
)
def test_differences_are_a_share_of_the_largest_value(found: Any, expected: Any, size: float) -> None:
    assert difference(found, expected) == size
