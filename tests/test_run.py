"""`python -m gossamer.run`: a kernel of a dump runs by itself, on random or saved data, and is compared with the reference."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.run import main
from tests.backend.harness import compile_and_run


def dumped(model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, Path]:
    """The stages of the one kernel of a model, by their names."""
    torch.manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter *= torch.rand_like(parameter) < 0.2
    compile_and_run(model.eval(), x, dump_ir=str(folder))
    return {path.stem.rpartition("_")[2]: path for path in sorted(folder.glob("*weight*.mlir"))}


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dumped(nn.Sequential(nn.Linear(24, 40), nn.GELU()), torch.randn(9, 24), tmp_path_factory.mktemp("layer"))


@pytest.mark.parametrize("stage", ["contract", "schedule"])
def test_a_layer_is_compared_and_timed(stage: str, layer: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(layer[stage]), "--open", "5"]) == 0
    shown = capsys.readouterr().out
    assert "operands 5x24 40x24 40" in shown and "equals the reference" in shown
    assert [line.split()[-1] for line in shown.splitlines()[2:]] == ["us", "us"]


def test_contract_ir_takes_any_schedule(layer: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(layer["contract"]), "--schedule", "rowpairs", "--density", "0.5"]) == 0
    assert "schedule rowpairs" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["contract", "schedule"])
def test_a_chain_is_compared(stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24))
    assert main([str(dumped(chain, torch.randn(33, 24), tmp_path)[stage])]) == 0
    shown = capsys.readouterr().out
    assert "schedule chain" in shown and "equals the reference" in shown


def test_saved_data_are_taken_again(layer: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.pt"
    assert main([str(layer["schedule"]), "--open", "7", "--save", str(data)]) == 0
    saved = torch.load(data)
    assert [list(each.shape) for each in saved] == [[7, 24], [40, 24], [40]] and (saved[1] == 0).any()
    assert main([str(layer["schedule"]), "--data", str(data)]) == 0
    assert capsys.readouterr().out.count("operands 7x24") == 2


def test_kernel_ir_that_was_changed_runs_as_it_is(
    layer: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(layer["schedule"].parent, tmp_path / "dump")
    changed = tmp_path / "dump" / layer["schedule"].name
    text = changed.read_text()
    changed.write_text(text.replace("arith.addf", "arith.subf", 1))
    assert main([str(changed)]) == 1
    assert "DIFFERS from the reference" in capsys.readouterr().out


def test_kernel_ir_without_its_contract_is_timed_alone(
    layer: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = shutil.copy(layer["schedule"], tmp_path)
    assert main([str(alone)]) == 0
    shown = capsys.readouterr().out
    assert "not compared: its contract" in shown and shown.count(" us") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere.mlir"], "No such file"),
        (["{assembly}"], "is not an .mlir file: give"),
        (["{expose-storage}"], "give a stage up to"),
        (["{lower-to-llvm}"], "no function @region|give a stage up to"),
        (["{contract}", "--schedule", "none"], "unknown schedule 'none', there are"),
        (["{schedule}", "--schedule", "broadcast"], "is kernel IR, which has its schedule already"),
        (["{contract}", "--data", "{assembly}"], "is no file of torch.save"),
        (["{contract}", "--data", "{data}"], r"tensor 0 of .* is \[2, 3\] of torch.float32, but the region takes \[\?x24\]"),
    ],
)
def test_bad_input_is_refused_with_a_reason(
    given: list[str], message: str, layer: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = tmp_path / "data.pt", tmp_path / "0001_x_assembly.s"
    torch.save([torch.ones(2, 3)] * 3, data)
    other.touch()
    places = {**layer, "data": data, "assembly": other}
    assert main([each.format_map(places) for each in given]) == 2
    problem = capsys.readouterr().err
    assert problem.startswith("gossamer.run: ")
    assert re.search(message, problem), problem


def test_a_convolution_cannot_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = dumped(nn.Sequential(nn.Conv2d(4, 8, 3)), torch.randn(1, 4, 6, 6), tmp_path)
    assert main([str(stages["contract"])]) == 2
    assert "the region is a convolution" in capsys.readouterr().err
