"""A graph with 1e8 edges and 64-bit indices: the memory that its checking, SpMM and the gradients take beside what they need.

Each run is a process of its own, in which the same has been computed on a small graph before: what the libraries and the
compiler take does not count. What is needed is the bytes of the matrix, of X and Y and, for the gradients, of theirs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import add_list, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.registry import Case, Contender, Outcome, Settings, Workload

DEGREE, COLUMNS = 20, 16
STEPS = ("check", "forward", "backward")
_AT_ONCE = 1 << 20  # edges that are made


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--edges", type=int, default=100_000_000, help="of the graph (default 1e8)")
    add_list(parser, "--steps", some_of(*STEPS), "check,forward,backward", "which")


def adjacency(edges: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, columns (int64) and values of a CSR matrix with 20 entries in every row, one in each twentieth of it."""
    nodes = edges // DEGREE
    stratum = nodes // DEGREE
    columns, values = torch.empty(nodes, DEGREE, dtype=torch.int64), torch.empty(nodes * DEGREE)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, nodes, _AT_ONCE // DEGREE):
        part = columns[start : start + _AT_ONCE // DEGREE]
        part.random_(0, stratum, generator=generator).add_(torch.arange(DEGREE) * stratum)
    values.uniform_(generator=generator)
    return torch.arange(0, nodes * DEGREE + 1, DEGREE), columns.view(-1), values


def resident(name: str) -> int:
    """Bytes of this process in memory, VmRSS now or VmHWM at most since it was reset.

    Not getrusage: a new process begins there with the peak of the one that has started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


def steps(edges: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """What each step calls, and the bytes that it needs on top of those that are there."""
    from gossamer import Format, SparseTensor

    positions, columns, values = adjacency(edges)
    x = torch.rand(len(positions) - 1, COLUMNS)
    arrays = {"positions": positions, "coordinates": columns, "values": values}
    make = lambda checked, gradient: SparseTensor.from_parts(
        Format.CSR, (len(x), len(x)), **arrays | {"values": values.requires_grad_(gradient)}, check=checked
    )

    def backward() -> Any:
        a, dense = make(False, True), x.requires_grad_()
        result = a @ dense
        result.backward(result.detach())
        return result, values.grad, dense.grad

    whole = sum(array.nbytes for array in (*arrays.values(), x))
    return {
        "check": (partial(make, True, False), whole),
        "forward": (lambda: make(False, False) @ x, whole + x.nbytes),
        "backward": (backward, whole + values.nbytes + 2 * x.nbytes),
    }


def main(step: str, edges: str, threads: str) -> None:
    """Prints, as JSON, the most memory that a step took beyond what the process had before the graph was there."""
    torch.set_num_threads(int(threads))
    steps(100 * DEGREE)[step][0]()
    before = resident("VmRSS")
    call, needed = steps(int(edges))[step]
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    assert kept is not None
    print(json.dumps({"seconds": seconds, "needed_bytes": needed, "peak_bytes": peak, "peak_over_needed": peak / needed}))


def unused(*_: Any) -> Any:
    raise NotImplementedError("it is measured in processes of its own")


def cases(args: argparse.Namespace) -> list[Case]:
    return [Case(f"{args.edges:.0e} edges, {step}", {"edges": args.edges, "step": step}, unused) for step in args.steps]


def measure(case: Case, contenders: Mapping[str, Contender], threads: int, settings: Settings) -> dict[str, Outcome]:
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, case.parameters["step"], case.parameters["edges"], threads]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        return {"sparse-eager": {"error": f"it ended with {done.returncode}: {done.stderr.strip()[-300:]}"}}
    return {"sparse-eager": json.loads(done.stdout.splitlines()[-1])}


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| case | s | needed, GB | peak, GB | peak / needed |", "| --- | --: | --: | --: | --: |"]
    for case in cases:
        found = case["results"]["sparse-eager"]
        if "error" not in found:
            sizes = f"{found['needed_bytes'] / 1e9:.2f} | {found['peak_bytes'] / 1e9:.2f} | {found['peak_over_needed']:.2f}"
            lines.append(f"| {case['name']} | {found['seconds']:.1f} | {sizes} |")
    return lines


WORKLOAD = Workload(
    "memory of a graph with 1e8 edges",
    add_arguments,
    cases,
    contenders=lambda: {"sparse-eager": Contender("Gossamer, eager", unused, missing=missing)},
    measure=measure,
    conclude=conclude,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
