"""The rewritings of a graph: by name, one by one, with a way back where one fails."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import gossamer
from gossamer import OptionError
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.snapshot import Snapshot
from gossamer.backend.graph_passes import GRAPH_PASSES, graph_pass
from gossamer.backend.report.report import Decision
from gossamer.backend.weights.sparse_weights import SparseWeights
from tests.backend.harness import assert_same, compile_and_run, prune_

ROOT = Path(__file__).parents[2]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = prune_(nn.Linear(64, 96))
        self.second = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)


@pytest.mark.parametrize("name", GRAPH_PASSES)
def test_a_pass_is_found_by_its_name(name: str) -> None:
    found = graph_pass(name)
    assert type(found).__name__ == "".join(part.title() for part in name.split("-"))
    assert type(found).__module__.rpartition(".")[2] == name.replace("-", "_")


def test_listing_them_loads_no_compiler() -> None:
    code = "import sys; from gossamer.backend import graph_passes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch_mlir", "gossamer.backend.weights", "gossamer.passes.pipelines"} & set(loaded)


def test_one_can_be_left_out() -> None:
    model, x = Layer(), torch.randn(8, 64)
    run = compile_and_run(model, x, disable=["sparse-weights"], regions=0)
    assert_same(run.output, model(x))


def test_a_name_of_none_is_refused() -> None:
    with pytest.raises(
        OptionError,
        match=r"'sparse-weigths' \(did you mean 'sparse-weights'\?\); the graph passes are structured-weights, smaller-",
    ):
        gossamer.explain(Layer(), torch.randn(8, 64), options={"disable": ["sparse-weigths"]})
    with pytest.raises(OptionError, match="a list of names"):
        gossamer.Options(disable="fuse-rows")


def breaks(self: SparseWeights, graph: fx.Graph, context: GraphContext) -> list[Decision]:
    """Leaves a graph that computes something else, as a bug would."""
    relu = next(n for n in graph.nodes if n.target is torch.ops.aten.relu.default)
    relu.replace_all_uses_with(relu.args[0])
    graph.erase_node(relu)
    raise KeyError(relu)


@pytest.mark.parametrize("grad", [False, True])
def test_the_graph_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch, grad: bool, tmp_path: Path) -> None:
    monkeypatch.setattr(SparseWeights, "run", breaks)
    model, x = Layer(), torch.randn(8, 64)
    with pytest.warns(UserWarning, match="graph pass 'sparse-weights' failed \\(KeyError: relu") as caught:
        run = compile_and_run(model, x, strict=False, grad=grad, dump_ir=str(tmp_path), regions=0)
    assert sum("graph pass" in str(w.message) for w in caught) == 1
    assert_same(run.output, model(x))
    if grad:
        run.output.square().sum().backward()
        compiled, model.first.weight.grad = model.first.weight.grad, None
        model(x).square().sum().backward()
        assert compiled is not None and model.first.weight.grad is not None
        assert_same(compiled, model.first.weight.grad)


def test_strict_raises_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseWeights, "run", breaks)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="KeyError: relu"):
        compile_and_run(Layer(), torch.randn(8, 64))


class Mixed(nn.Module):
    """An integer input, a buffer, a size that is not known, beside a sparse weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = prune_(nn.Linear(64, 96))
        self.register_buffer("shift", torch.randn(96))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x[index]) + self.shift) * x.shape[0]


def test_the_reproducer_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(SparseWeights, "run", breaks)
        inputs = torch.randn(8, 64), torch.arange(5)
        compile_and_run(Mixed(), *inputs, dynamic=True, strict=False, dump_ir=str(tmp_path), regions=0)
    path = re.search(r"(\S+\.py) is a program that shows it", "".join(str(w.message) for w in caught))
    assert path is not None and Path(path[1]).parent == tmp_path
    text = Path(path[1]).read_text(encoding="utf-8")
    assert "KeyError: relu" in text and re.search(r"made\(\(96, 64\), torch.float32, 0\.[12]\d*\)", text)
    broken = f"from tests.backend import test_graph_passes as t; t.SparseWeights.run = t.breaks\n{text}"
    for program, fails in ((text, False), (broken, True)):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode != 0) == fails, done.stderr
        assert "KeyError: relu" in done.stderr or not fails


def test_dumps_show_the_graph_before_and_after_each_pass(tmp_path: Path) -> None:
    compile_and_run(Layer(), torch.randn(8, 64), dump_ir=str(tmp_path))
    files = sorted(path for path in tmp_path.iterdir() if "_graph_" in path.name)
    assert [path.name.split("_", 1)[1] for path in files] == ["graph_before.py", "graph_sparse-weights.py"]
    before, after = (path.read_text(encoding="utf-8") for path in files)
    assert "aten.relu" in before and "gossamer.region" not in before
    assert "gossamer.region" in after and "aten.relu" not in after


def test_the_time_of_each_pass_is_in_the_report() -> None:
    report = gossamer.explain(Layer(), torch.randn(8, 64), options={"dense": "eager", "disable": ["fold-values"]})
    assert list(report.seconds) == [name for name in GRAPH_PASSES if name != "fold-values"]
    assert all(seconds >= 0 for seconds in report.seconds.values())


def test_a_snapshot_restores_values_and_descriptors() -> None:
    graph = fx.symbolic_trace(Layer()).graph
    for node in graph.nodes:
        node.meta["val"] = node.name
    text, metas = graph.python_code("self").src, [dict(n.meta) for n in graph.nodes]
    before = Snapshot.of(graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    before.restore(graph)
    graph.lint()
    assert [n.target for n in graph.nodes] == [n.target for n in before.graph.nodes]
    assert [dict(n.meta) for n in graph.nodes] == metas and len(text) > 0


def test_what_passes_emit_inductor_can_lower() -> None:
    """Their graphs are decomposed already: what Inductor decomposes itself has no lowering there, and would end compilation."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    emitted = re.compile(r"emit\(\s*(aten|prims)\.(\w+)\.(\w+)")
    found = {match for path in (ROOT / "backend").rglob("*.py") for match in emitted.findall(path.read_text())}
    assert len(found) > 20
    operators = {getattr(getattr(getattr(torch.ops, space), name), overload) for space, name, overload in found}
    assert [str(each) for each in operators if each in decompositions and each not in lowerings] == []
