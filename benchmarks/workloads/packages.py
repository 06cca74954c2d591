"""Packages of AOTInductor with the kernels of a pruned MiniLM inside, beside the compiled model: a call, and a start.

The start is a new process: `load_s` are the seconds of gossamer.load_package, `first_s` those of the first call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_list, shares
from benchmarks.contenders.sparse import missing
from benchmarks.models import PrunedModel
from benchmarks.registry import Case, Contender, Prepared, Workload, contender
from benchmarks.workloads import minilm

_START = """
import json, sys, time
import torch
inputs = torch.load(sys.argv[2])
torch.set_num_threads(int(sys.argv[3]))
begin = time.perf_counter()
import gossamer
model = gossamer.load_package(sys.argv[1])
loaded = time.perf_counter()
model(*inputs)
print(json.dumps({"load_s": loaded - begin, "first_s": time.perf_counter() - loaded}))
"""


def started(package: Path, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
    """The seconds of a start."""
    torch.save(list(inputs), package.with_suffix(".inputs"))
    command = [sys.executable, "-W", "ignore", "-c", _START, package, package.with_suffix(".inputs"), torch.get_num_threads()]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(problem: PrunedModel) -> Prepared:
    import gossamer

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = gossamer.export(problem.model, problem.inputs)
        package = Path(torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2"))
        loaded: Any = gossamer.load_package(package)
        notes = {"package_bytes": package.stat().st_size, **started(package, problem.inputs)}
    return Prepared(lambda: loaded(*problem.inputs), lambda: notes)


def contenders() -> dict[str, Contender]:
    found = {name: contender(name) for name in ("dense", "inductor", "sparse")}
    return found | {"package": Contender("package of AOTInductor", prepare, missing=missing)}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--sparsity", shares, ".9", "shares of zeros")
    add_list(parser, "--inputs", minilm.inputs, "1x32,1x128,8x128", "batch x tokens")


def cases(args: argparse.Namespace) -> list[Case]:
    return minilm.cases(argparse.Namespace(**vars(args), pattern="unstructured", dtype="f32"))


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """How long packages take to load, and to give their first result."""
    found = list[str]()
    for case in cases:
        notes = case["results"].get("package", {}).get("notes", {})
        if "load_s" in notes:
            size, load, first = notes["package_bytes"] / 1e6, notes["load_s"], notes["first_s"]
            found.append(f"- {case['name']}: {size:.0f} MB load in {load:.2f} s, the first call takes {first * 1e3:.0f} ms")
    return found


WORKLOAD = Workload(
    "all-MiniLM-L6-v2 as a package of AOTInductor", add_arguments, cases, contenders, conclude=conclude, preparing=40.0
)
