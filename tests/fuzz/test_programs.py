"""Random programs: some hundred here, the same ones everywhere; for hours with GOSSAMER_FUZZ_SECONDS and GOSSAMER_FUZZ_SEED.

What fails is printed as a program, by `python -m tests.fuzz` as well.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import attention, compiled_attention, layers, zoo

SECONDS = os.environ.get("GOSSAMER_FUZZ_SECONDS")
CASES = {"eager": 250, "compiled": 6, "gradients": 40, "models": 3}  # without it
SEED = int(os.environ.get("GOSSAMER_FUZZ_SEED", "0"))
A_HANG = 120  # seconds more than a run is given


@pytest.mark.parametrize("how", CASES)
def test_programs_give_what_dense_ones_give(how: str, tmp_path: Path) -> None:
    note = tmp_path / "program"
    seconds = float(SECONDS or 600)
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--seconds", str(seconds), "--seed", str(SEED)]
    command += [] if SECONDS else ["--count", str(CASES[how])]
    command += ["--note", str(note), *([f"--{how}"] if how != "eager" else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + A_HANG, check=False, cwd=Path(__file__).parents[2]
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end of\n{note.read_text()}")
    assert done.returncode >= 0, f"signal {-done.returncode} ended\n{note.read_text()}"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


def test_attention_is_that_of_dense_masks() -> None:
    cases = [case for case in map(attention.make, range(200)) if case.size == 17]  # few kernels to compile
    assert not [(case, problem) for case in cases if (problem := attention.difference(case)) is not None]


def test_compiled_attention_is_that_of_float64() -> None:
    compiled = compiled_attention.Compiled("eager")
    plans = (("bools", False, 1), ("flex", True, 1), ("einsum", False, 1))  # few graphs to compile
    seeds = [seed for seed in range(1500) if compiled_attention.plan(random.Random(seed)) in plans]
    wrong = [found for seed in seeds if (found := compiled_attention.difference(seed, compiled))[1] is not None]
    assert len(seeds) > 20
    assert not wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "count"), [("quantized", 1), ("masked", 1), ("experts", 1), ("points", 8), ("routed", 4)])
def test_layers_are_those_of_float64(kind: str, count: int) -> None:
    programs = {seed: layers.make(kind, seed) for seed in range(count)}
    wrong = [f"# {problem}\n{text}" for text in programs.values() if (problem := layers.difference(kind, text))]
    assert not wrong, "\n".join(wrong)


def test_a_setting_that_a_model_needs_is_put_back() -> None:
    """The small size that the rules have for hidden_dim is not what the last batch norm of an EfficientNet has."""
    pytest.importorskip("transformers")
    config, model = zoo.made("efficientnet")
    assert config.hidden_dim == 2560
    assert sum(parameter.numel() for parameter in model.parameters()) < zoo.LARGEST
