"""The skeletons that CONTRIBUTING.md offers to copy do what they say."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx, nn

from gossamer.backend import graph_passes
from gossamer.dialects import packing
from gossamer.passes import opt, pipelines, registry
from gossamer.passes.schedules import families
from gossamer.runtime.packers import fill
from gossamer.runtime.packing import pack
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.backend.harness import compile_and_run
from tests.contracts import Region, assert_near

ROOT = Path(__file__).parents[1]
SKELETONS = ROOT / "docs" / "skeletons"


def skeleton(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"skeleton_{name}", SKELETONS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_contributors_find_every_skeleton() -> None:
    linked = set(re.findall(r"docs/skeletons/(\w+\.py)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert linked == {path.name for path in SKELETONS.glob("*.py")}


def test_the_pass_does_what_its_lit_test_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    registry.register(skeleton("name_of_the_pass").NameOfThePass)
    (lit,) = re.findall(r"```mlir\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    file = tmp_path / "test.mlir"
    file.write_text(lit)
    (pipeline,) = re.findall(r"-p '([^']+)'", lit)
    assert opt.main([str(file), "-p", pipeline, "-o", str(tmp_path / "out")]) == 0
    checked = subprocess.run(
        [sys.executable, "-m", "filecheck", str(file)], input=(tmp_path / "out").read_text(), text=True, capture_output=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("region", [Region(33, 41, epilogue=("bias", "relu")), Region(16, 7, transposed=True)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_schedule_computes_products(region: Region, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = skeleton("lower_plain")
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    registry.register(plain.LowerPlain)
    for known in (families.FAMILIES, families.ALL_FAMILIES):
        monkeypatch.setitem(known, "plain", plain.PLAIN)
    monkeypatch.setattr(pipelines, "SCHEDULES", (*pipelines.SCHEDULES, "plain"))
    x, w, extras = region.operands(tokens, 0.3)
    kernel = compile_region(region.text(), schedule="plain")
    out = torch.full((tokens, region.m), torch.nan)
    assert kernel.schedule == "plain" and kernel.formats[1] is not None
    kernel([x, pack(w, kernel.formats[1]), *extras], out)
    assert_near(out, region.reference(x, w, extras))


def test_the_tutorial_adds_the_schedule_to_a_clone(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "own_schedule.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    for room in ("backend", "dialects", "gossamer", "passes", "runtime", "sparsity", "docs/skeletons"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "plain.py").write_text(program)
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    ran = subprocess.run(["sh", "-ec", commands], cwd=tmp_path, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    expected = re.sub(r"\d+ us", r"\\d+ us", shown)
    assert re.match(expected, ran.stdout) and "iter_args" in ran.stdout


def test_the_graph_pass_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gossamer.backend.weights.drop_ones", skeleton("drop_ones"))
    monkeypatch.setitem(graph_passes.GRAPH_PASSES, "drop-ones", "weights.drop_ones:DropOnes")
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 16).requires_grad_(False), torch.randn(5, 24)
    layer.weight *= torch.rand(16, 24) < 0.3
    pass_ = type(graph_passes.graph_pass("drop-ones"))
    graphs, run_pass = list[str](), pass_.run

    def recorded(self: Any, graph: fx.Graph, context: Any) -> Any:
        decisions = run_pass(self, graph, context)
        graphs.append(str(graph))
        return decisions

    monkeypatch.setattr(pass_, "run", recorded)
    run = compile_and_run(lambda x: layer(x * 1.0), x, regions=1)
    torch.testing.assert_close(run.output, layer(x))
    assert len(graphs) == 1 and "mul" not in graphs[0]


@pytest.mark.parametrize("reduction", [0, 1])
def test_the_packing_stores_a_matrix(reduction: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = skeleton("packing")
    monkeypatch.setitem(packing.KINDS, "ell", found.Ell)
    monkeypatch.setitem(fill._FILL, found.Ell, found.fill_ell)
    ell = packing.parse_packing(f"ell(reduction={reduction}, least=2)")
    matrix = torch.tensor([[0.0, 1, 0, 2, 3], [0, 0, 0, 0, 0], [4, 0, 0, 0, 0]])
    packed = pack(matrix if reduction else matrix.t().contiguous(), ell)
    columns, values = packed.components
    assert columns.tolist() == [1, 3, 4, 0, 0, 0, 0, 0, 0]
    assert values.tolist() == [1, 2, 3, 0, 0, 0, 4, 0, 0]
