"""Options are checked when they are given, and an error names what is wrong and what would be right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer import OptionError, Options
from gossamer.dialects.settings import CALIBRATE
from tests.backend.harness import assert_same, compile_and_run, prune_


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_gian": 1}, r"unknown option 'min_gian' \(did you mean 'min_gain'\?\); the options are dense, schedule"),
        ({"dense": "inducto"}, r"option dense is 'inducto' \(did you mean 'inductor'\?\); it must be one of auto, indu"),
        ({"schedule": 3}, "option schedule is 3; it must be one of auto, "),
        ({"schedule": "gather"}, r"option schedule is 'gather' \(did you mean 'gpu-gather'\?\); it must be one of .*lookup"),
        ({"schedule": "bitmap"}, "option schedule is 'bitmap'; it must be one of auto, .*lookup, .*rowpairs, gpu-blocks"),
        ({"verify": "none"}, "option verify is 'none'; it must be one of version, full"),
        ({"gpu": "sparse"}, "option gpu is 'sparse'; it must be one of dense, untested"),
        ({"min_gain": -1}, "option min_gain is -1; it must be a number of at least 0"),
        ({"min_gain": float("nan")}, "option min_gain is nan"),
        ({"min_gain": True}, "option min_gain is True"),
        ({"min_gain": "2"}, "option min_gain is '2'"),
        ({"strict": 1}, "option strict is 1; it must be True or False"),
        ({"dump_ir": 7}, "option dump_ir is 7; it must be a path"),
        ({"dump_ir": ""}, "option dump_ir is ''; it must be a path"),
        ("fast", "options is a str; it must be a dictionary"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.parse(options)
    with pytest.raises(OptionError, match=message):
        gossamer.explain(nn.Linear(2, 2), torch.ones(2), options=options)


def test_option_errors_reach_the_caller_of_a_compiled_model() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="sparse", options={"min_gian": 1})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="OptionError: unknown option 'min_gian'"):
        compiled(torch.ones(2))


def test_unwritable_dump_directories(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OptionError, match=r"option dump_ir is '.*file/inside', which cannot be created: Not a directory"):
        Options(dump_ir=str(file / "inside"))
    with pytest.raises(OptionError, match=r"option dump_ir is '.*file', which cannot be created: File exists"):
        Options(dump_ir=str(file))


def test_dump_directory_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOSSAMER_DUMP_IR", str(tmp_path / "dump"))
    assert Options().dump_ir == str(tmp_path / "dump")
    assert (tmp_path / "dump").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("GOSSAMER_DUMP_IR", str(tmp_path / "file"))
    with pytest.raises(OptionError, match=r"the environment variable GOSSAMER_DUMP_IR is '.*file', which cannot be created"):
        Options()


def test_any_iterable_of_names_and_any_number_are_options() -> None:
    options = Options(disable=(name for name in ["sparse-weights"]), min_gain=np.float32(1.5))  # type: ignore[arg-type]
    assert options.disable == ("sparse-weights",) and repr(options.min_gain) == "1.5"


def test_options_of_torch_are_taken() -> None:
    options = {"dense": "eager", "min_gain": 0, "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    model, x = prune_(nn.Linear(32, 32)).eval(), torch.randn(4, 32)
    assert gossamer.explain(model, x, options=options).sparse
    assert gossamer.profile(model, x, options=options, calls=1).parts
    assert any(each.sparse for each in gossamer.bisect(model, x, options=options).decisions)


@pytest.mark.parametrize("text, measures", [("0", False), ("false", False), ("", True), ("1", True)])
def test_calibration_is_switched(text: str, measures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", text)
    assert CALIBRATE.get() is measures
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "perhaps")
    with pytest.raises(OptionError, match="GOSSAMER_CALIBRATE is 'perhaps'; it must be 0 or 1"):
        CALIBRATE.get()


def test_options_are_an_error_of_value_and_of_gossamer() -> None:
    assert issubclass(OptionError, ValueError) and issubclass(OptionError, gossamer.GossamerError)


def test_unknown_mode() -> None:
    with pytest.raises(OptionError, match=r"unknown mode 'max-autotun' \(did you mean 'max-autotune'\?\); the modes are"):
        gossamer.explain(nn.Linear(2, 2), torch.ones(2), mode="max-autotun")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_reach_inductor(mode: str) -> None:
    model, x = prune_(nn.Linear(64, 48)).eval(), torch.randn(5, 64)
    report = gossamer.explain(model, x, mode=mode, options={"min_gain": 0, "dense": "inductor"})
    assert len(report.sparse) == 1
    with torch.no_grad():
        assert_same(torch.compile(model, backend="sparse", mode=mode)(x), model(x))


@pytest.mark.parametrize("schedule", ["broadcast", "rowpairs", "reference"])
def test_schedules(schedule: str) -> None:
    model, x = prune_(nn.Sequential(nn.Linear(64, 48), nn.GELU())).eval(), torch.randn(5, 64)
    run = compile_and_run(model, x, schedule=schedule)
    assert [d.schedule for d in run.regions] == [schedule]
    assert_same(run.output, model(x).detach())


def test_without_a_cpp_compiler_the_remainder_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)
    monkeypatch.setattr("gossamer.backend.compile_module.with_inductor", None)
    model, x = prune_(nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48))).eval(), torch.randn(5, 64)
    run = compile_and_run(model, x, dense="auto")
    assert len(run.regions) == 1
    assert_same(run.output, model(x).detach())


def test_without_guards_of_modules_values_that_change_are_seen() -> None:
    model, x = prune_(nn.Sequential(nn.Linear(64, 48), nn.GELU())).eval(), torch.randn(5, 64)
    run = compile_and_run(model, x, guard_filter_fn=torch.compiler.skip_guard_on_all_nn_modules_unsafe)
    with torch.no_grad():
        model[0].weight.mul_(2)
        assert_same(run.function(x), model(x))
