"""What a person sees: the report, the log, the warning about torch.sparse tensors, the dump."""

import logging
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import Decision, Report
from gossamer.backend.graph.names import paths
from gossamer.backend.profiling.measured import in_time
from gossamer.backend.report import graph_breaks
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.report import NO_PRODUCT
from gossamer.backend.report.words import in_bytes, one_name, one_reason, times, without_times
from tests.backend.harness import compile_and_run, prune_

EAGER = {"dense": "eager", "min_gain": 0}


def stack() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
    return prune_(nn.Sequential(*layers)).eval().requires_grad_(False)


def test_explain() -> None:
    model, x = stack(), torch.randn(5, 64)
    with torch.no_grad():
        report = gossamer.explain(model, x, options=EAGER)
    assert [d.name for d in report.decisions] == ["0.0.weight", "1.0.weight", "2.0.weight"]
    assert report.kernels == 1 and report.graph_breaks == [] and report.sparse == report.decisions


def test_explain_includes_the_backward() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    ops = [d.op for d in gossamer.explain(stack().train(), x, options=EAGER).decisions]
    assert ops == ["linear"] * 3 + ["linear backward"] * 3


def test_explain_shows_training_of_stored_weights() -> None:
    """One weight has several lines, and its gradient's packs nothing."""
    report = gossamer.explain(gossamer.store_sparse(stack().requires_grad_()), torch.randn(5, 64), options=EAGER)
    assert {d.op for d in report.sparse} >= {"linear", "sample mk,tk,tm->p"}
    assert "of weights packed in" in str(report)


def test_explain_takes_compiled_models_functions_and_keywords() -> None:
    model, x = stack(), torch.randn(5, 64)
    for subject in (model, torch.compile(model, backend="sparse"), torch.compile(model), model.forward):
        assert len(gossamer.explain(subject, x, options=EAGER).sparse) == 3
    assert len(gossamer.explain(torch.compile(lambda x: model(x)), x=x, options=EAGER).sparse) == 3


def test_explain_leaves_nothing_behind() -> None:
    model, x = stack(), torch.randn(5, 64)
    before = torch._dynamo.config.get_config_copy()
    gossamer.explain(model, x, options=EAGER)
    assert torch._dynamo.config.get_config_copy() == before
    assert torch._dynamo.eval_frame.cached_backends == {}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def test_graph_breaks_are_reported_with_their_line() -> None:
    model = stack()

    def broken(x: Tensor) -> Tensor:
        x = model(x)
        print()
        return model(x)

    report = gossamer.explain(broken, torch.randn(5, 64), options=EAGER)
    assert len(report.decisions) == 6 and len(report.graph_breaks) == 1
    line = broken.__code__.co_firstlineno + 2
    assert re.match(rf"{re.escape(__file__)}:{line}: .*print", report.graph_breaks[0])


def decision(name: str, **changes: object) -> Decision:
    fields = {
        "op": "linear", "shape": (768, 3072), "density": 0.1, "format": "padded(reduction=1, columns=192)",
        "schedule": "broadcast", "sparse": True, "reason": "2 ops fused", "gain": 3.2,
    } | changes  # fmt: skip
    return Decision(name, **fields)  # type: ignore[arg-type]


def test_the_table_groups_equal_layers() -> None:
    names = [f"encoder.layer.{i}.attention.self.{n}.weight" for i in range(12) for n in ("query", "key")]
    dense = decision("pooler.weight", sparse=False, format=None, schedule=None, reason="too dense for a gain of 1.1x")
    text = str(Report([*map(decision, names), dense], ["model.py:3: Attempted to call print"], 2))
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    assert lines[0] == "gossamer, inference: 24 sparse on 2 kernels, 1 left dense"
    assert sum("encoder.layer.{0-11}.attention." in line for line in lines) == 2
    assert "self.query.weight (x12)" in text and "sparse (broadcast), 2" in text and "3.2x" in text and "10%" in text
    assert "too dense for a" in text
    assert lines[-2:] == ["1 graph break; no kernel crosses a break:", "  1. model.py:3: Attempted to call print"]


def test_bytes_are_counted_once_a_weight() -> None:
    forward, backward = decision("w", dense_bytes=8_000_000, packed_bytes=1_000_000), {"op": "linear backward"}
    report = Report([forward, forward, decision("w", **backward, format="CSC", dense_bytes=8_000_000, packed_bytes=2_000_000)])
    assert (report.dense_bytes, report.packed_bytes) == (8_000_000, 3_000_000)
    assert "8.0 MB of weights packed in 3.0 MB (38%)" in str(report)


def test_explain_tells_the_bytes() -> None:
    with torch.no_grad():
        report = gossamer.explain(stack(), torch.randn(5, 64), options=EAGER)
    assert report.dense_bytes == 3 * 64 * 64 * 4
    assert all(0 < d.packed_bytes < d.dense_bytes for d in report.decisions)


def test_an_empty_report() -> None:
    first, second = str(Report()).splitlines()
    assert first == "gossamer, inference: 0 sparse on 0 kernels, 0 left dense" and "no weight matrix" in second


def test_numbers_inside_of_names_and_gaps() -> None:
    text = str(Report([decision(f"conv2d.{i}.w") for i in (0, 1, 4)], [], 1))
    assert "conv2d.{0-1,4}.w (x3)" in text
    assert one_name(["layers.09.w", "layers.10.w"]) == "layers.{09-10}.w"


def test_measured_times_share_a_row() -> None:
    """Layers of one kind have the same contenders, in any order. Their times become ranges."""
    reasons = ["in a chain; measured: rowpairs 9.5 us, dense 100 us", "in a chain; measured: dense 90 us, rowpairs 10 us"]
    assert without_times(reasons[0]) == without_times(reasons[1])
    assert one_reason(reasons) == "in a chain; measured: rowpairs 9.5-10 us, dense 90-100 us"
    assert one_reason(reasons[:1]) == reasons[0]
    assert without_times("measured: block 5 us") != without_times("measured: dense 5 us")
    places = ["a 1 us, b 2 us; alone: a 3 us, b 4 us", "b 2 us, a 5 us; alone: b 5 us, a 3 us"]
    assert one_reason(places) == "a 1-5 us, b 2 us; alone: a 3 us, b 4-5 us"


def test_a_frozen_copy_of_a_weight_has_its_own_name() -> None:
    model = nn.Linear(4, 4)
    model.weight_orig, model.bias_orig = nn.Parameter(torch.zeros(4, 4)), model.bias
    assert set(paths(model).values()) == {"weight", "weight_orig", "bias"}


def test_text_of_a_report_is_not_read_as_markup_and_fits_its_table() -> None:
    assert "model.py:100: Attempted" in str(Report([decision("w")], ["model.py:100: Attempted to call print"], 1))
    looked_up = decision("w", sparse=False, format=None, schedule=None, reason=NO_PRODUCT)
    assert "no weight matrix" not in str(Report([looked_up], [], 0))
    assert "0.04%" in str(Report([decision("w", density=0.0004)], [], 1)) and "0.04%" in str(decision("w", density=0.0004))
    assert [in_time(each) for each in (999.4, 999.7, 999.7e3, 1.5e9)] == ["999 us", "1 ms", "1 s", "1500 s"]
    assert [in_bytes(each) for each in (0, 1)] == ["0 kB", "1 kB"]


@pytest.mark.usefixtures("no_chains")
def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gossamer"):
        compile_and_run(stack(), torch.randn(5, 64))
    messages = [r.getMessage() for r in caplog.records if r.name == "gossamer"]
    assert len(messages) == 3
    assert re.match(r"0\.0\.weight 64x64, \d+% nonzero, linear: sparse as .*, 2 ops fused, predicted", messages[0])


def test_torch_logs_shows_decisions() -> None:
    program = (
        "import torch; torch.manual_seed(0); m = torch.nn.Linear(64, 64).eval(); m.weight.data[torch.rand(64, 64) < 0.9] = 0\n"
        "torch.compile(m, backend='sparse', options={'dense': 'eager', 'min_gain': 0})(torch.ones(2, 64))"
    )
    for logs, shown in (("+gossamer", True), ("-dynamo", False)):
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env={**_environment(), "TORCH_LOGS": logs}
        )
        assert run.returncode == 0, run.stderr
        assert ("weight 64x64, 10% nonzero" in re.sub(r"\b(9|11)%", "10%", run.stderr)) is shown


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


class Graph(nn.Module):
    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, self.linear(x))


@pytest.fixture
def sparse_breaks_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_breaks, "_told", set())
    graph_breaks.watch_graph_breaks(gossamer.backend.sparse)


@pytest.mark.usefixtures("sparse_breaks_unseen")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_torch_sparse_tensor_is_warned_about_once() -> None:
    model, x = Graph(torch.eye(16).to_sparse_csr()), torch.randn(16, 8)
    with pytest.warns(UserWarning, match="torch.compile cannot trace torch.sparse tensors.*gossamer.prepare"):
        torch.compile(model, backend="sparse")(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(model, backend="sparse")(x)


@pytest.mark.usefixtures("sparse_breaks_unseen")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_backends_are_left_alone() -> None:
    graph = Graph(torch.eye(16).to_sparse_csr())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(graph, backend="eager")(torch.randn(16, 8))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.compile cannot trace")
def test_explain_lists_a_break_at_a_torch_sparse_tensor() -> None:
    report = gossamer.explain(Graph(torch.eye(16).to_sparse_csr()), torch.randn(16, 8), options=EAGER)
    assert any("test_report.py" in line and "sparse Tensor" in line for line in report.graph_breaks)


def test_a_package_of_aotinductor_is_said_to_be_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.export.export(stack(), (torch.randn(5, 64),)).module()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_aot", lambda *_, **__: "a package")
    with pytest.warns(UserWarning, match=r"AOTInductor compiles 3 pruned weights \('.*weight'.*\) densely"):
        assert torch._inductor.aot_compile(module, (torch.randn(5, 64),)) == "a package"
    dense = torch.export.export(nn.Linear(64, 64), (torch.randn(5, 64),)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._inductor.aot_compile(dense, (torch.randn(5, 64),))


@pytest.mark.usefixtures("no_chains")
def test_the_dump_has_every_stage(tmp_path: Path) -> None:
    compile_and_run(stack(), torch.randn(5, 64), dump_ir=str(tmp_path))
    files = sorted(p.name for p in tmp_path.glob("[0-9]*"))
    assert files[:3] == ["0001_graph_before.py", "0002_0.0.weight_fx.py", "0003_0.0.weight_contract.mlir"]
    assert files[-1].endswith("_graph_sparse-weights.py")
    assert {p.rsplit(".", 1)[1] for p in files} >= {"py", "mlir", "ll", "s"}
    assert [int(name[:4]) for name in files] == list(range(1, len(files) + 1))
    assert "torch.ops.aten.mm" in (tmp_path / files[1]).read_text()
    assert "#sparse_tensor.encoding" in (tmp_path / files[2]).read_text()
    torch._dynamo.reset()
    compile_and_run(stack(), torch.randn(5, 64), dump_ir=str(tmp_path))
    assert len(list(tmp_path.glob("[0-9]*"))) == 2 * len(files), "a second compilation goes on counting"


def test_dumps_from_many_threads(tmp_path: Path) -> None:
    def write(name: str) -> None:
        stages = Dump(str(tmp_path)).stages(name)
        for i in range(10):
            stages(f"stage{i}", "txt", name)

    threads = [threading.Thread(target=write, args=(f"r{i}/weird name",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(int(p.name[:4]) for p in tmp_path.glob("[0-9]*"))
    assert numbers == list(range(1, 41))


def test_a_long_name_has_a_short_file(tmp_path: Path) -> None:
    for name in ("n" * 250, "m" + "n" * 250, "语" * 90):
        Dump(str(tmp_path)).stages(name)("contract", "mlir", "")
    assert len({p.name[5:] for p in tmp_path.glob("[0-9]*")}) == 3


def test_importing_the_front_door_is_light() -> None:
    program = "import sys, gossamer; assert not {'torch', 'torch_mlir'} & set(sys.modules); print(gossamer.__version__)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr


def test_public_names() -> None:
    for name in gossamer.__all__:
        assert getattr(gossamer, name) is not None
    assert set(gossamer.__all__) <= set(dir(gossamer))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gossamer.nothing  # noqa: B018


def test_gains_are_written_without_exponents() -> None:
    assert [times(each) for each in (0.0254, 0.98, 3.14, 99.4, 99.6, 483.2)] == ["0.025", "0.98", "3.1", "99", "100", "483"]
