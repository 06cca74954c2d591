"""MiniLM in one new process after the other, each with empty caches: is it as fast each time?

quiet  a process compiles and is timed
busy   a process compiles beside one that keeps a core busy, and so measures the machine then; another one is timed, alone, with
       the caches of the first
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import add_list, shares, some_of
from benchmarks.measure import race
from benchmarks.own_process import printed
from benchmarks.registry import Case, Contender, Outcome, Settings, Workload, contender
from benchmarks.workloads import minilm

KINDS = ("quiet", "busy")
NAMES = ("dense", "inductor", "sparse")
PROCESSES = 10


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--sparsity", shares, ".5", "shares of zeros")
    add_list(parser, "--inputs", minilm.inputs, "8x128", "batch x tokens")
    add_list(parser, "--beside", some_of(*KINDS), ",".join(KINDS), "what runs beside the first process")


def cases(args: argparse.Namespace) -> list[Case]:
    found = minilm.cases(argparse.Namespace(**vars(args), pattern="unstructured", dtype="f32"))
    return [
        Case(f"{case.name} {kind}", {**case.parameters, "beside": kind}, case.build) for kind in args.beside for case in found
    ]


def measure(case: Case, contenders: Mapping[str, Contender], threads: int, settings: Settings) -> dict[str, Outcome]:
    """The milliseconds of each contender in each process ("ms"). For Gossamer also the number of sparse layers ("sparse")."""
    found: list[dict[str, Any]] = []
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as caches:
            if case.parameters["beside"] == "busy":
                with busy():
                    process(contenders, case, threads, Path(caches), 2)
            found.append(process(contenders, case, threads, Path(caches), settings.repeats))
    return {name: {key: [each[name][key] for each in found] for key in found[0][name]} for name in contenders}


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Another process computes meanwhile."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def process(names: Sequence[str] | Mapping[str, Any], case: Case, threads: int, caches: Path, repeats: int) -> dict[str, Any]:
    """What `main` prints in a new process, whose caches are in a folder. RuntimeError if it fails."""
    given = [case.parameters["input"], case.parameters["sparsity"], threads, repeats]
    return printed(__spec__.name, [",".join(names), *given], caches)


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The speed-ups over eager, from the least to the most, and in how many processes all layers became sparse."""
    lines = ["| case | processes | over PyTorch eager | over Inductor | sparse layers |", "| --- | --: | --: | --: | --: |"]
    for case in cases:
        results = case["results"]
        if "ms" not in results.get("sparse", {}):
            continue
        own, sparse = results["sparse"]["ms"], results["sparse"]["sparse"]
        cells = []
        for base in ("dense", "inductor"):
            ratios = [other / ms for other, ms in zip(results.get(base, {}).get("ms", []), own, strict=False)]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}x" if ratios else "-")
        layers = f"{min(sparse)}" if min(sparse) == max(sparse) else f"{min(sparse)} to {max(sparse)}"
        lines.append(f"| {case['name']} | {len(own)} | {' | '.join(cells)} | {layers} |")
    return lines


def main(names: str, text: str, sparsity: str, threads: str, repeats: str) -> None:
    """Times contenders on MiniLM in turns, and prints the median of each, as JSON."""
    contenders = {name: contender(name) for name in names.split(",")}
    outcomes = race(minilm.build(text, "unstructured", float(sparsity)), contenders, int(threads), Settings(int(repeats)))
    found = {}
    for name, outcome in outcomes.items():
        if "median_ms" not in outcome:
            sys.exit(f"{name}: {outcome}")
        notes = {key: value for key, value in outcome["notes"].items() if key == "sparse"}
        found[name] = {"ms": outcome["median_ms"], **notes}
    print(json.dumps(found))


WORKLOAD = Workload(
    "MiniLM in ten new processes with empty caches",
    add_arguments,
    cases,
    contenders=lambda: {name: contender(name) for name in NAMES},
    measure=measure,
    conclude=conclude,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
